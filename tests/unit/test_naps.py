"""When a communication thread looks."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetsync
from hetsync.plane.local import LocalPlane
from hetsync.sync import naps

seconds = st.floats(0, 100)


@pytest.mark.parametrize(
    ("quiet", "shortest", "expected"),
    [
        (0.0, naps.SHORTEST_SECONDS, 50e-6),  # news: the next may follow at once
        (0.0, naps.SHORTEST_DELAYED_SECONDS, 4e-3),  # a rank that computes lets them wait
        (0.010, naps.SHORTEST_DELAYED_SECONDS, 5e-3),
        (1.0, naps.SHORTEST_SECONDS, 16e-3),
    ],
)
def test_naps_grow_with_the_quiet(quiet: float, shortest: float, expected: float) -> None:
    nap = naps.nap_seconds(quiet, naps.FRACTION_COMPUTING, naps.LONGEST_IDLE_SECONDS, shortest)
    assert nap == pytest.approx(expected)


@given(quiet=seconds, longest=seconds, shortest=seconds)
def test_a_limit_is_a_limit(quiet: float, longest: float, shortest: float) -> None:
    assert naps.nap_seconds(quiet, naps.FRACTION_WAITING, longest, shortest) <= longest


@given(quiet=seconds)
def test_whoever_waits_loses_a_tenth_at_most(quiet: float) -> None:
    nap = naps.nap_seconds(quiet, naps.FRACTION_WAITING, naps.LONGEST_IDLE_SECONDS)
    assert nap <= max(0.1 * quiet, naps.SHORTEST_SECONDS)


@pytest.mark.parametrize(("delay_bound", "expected"), [(4, 4e-3), (0, 50e-6)])
def test_only_a_rank_that_computes_in_delayed_mode_lets_news_wait(
    monkeypatch: pytest.MonkeyPatch, delay_bound: int, expected: float
) -> None:
    """In synchronous mode buckets are on their way while it computes, and others wait for them."""
    asked: list[tuple[float, float]] = []
    looked = threading.Event()

    def nap(quiet: float, fraction: float, longest: float, shortest: float) -> float:
        asked.append((fraction, shortest))
        looked.set()
        return 1e-3

    monkeypatch.setattr(naps, "nap_seconds", nap)

    def latest() -> tuple[float, float]:
        for _ in range(2):  # the thread may be about to ask when the circumstances change
            looked.clear()
            assert looked.wait(10)
        return asked[-1]

    computing: list[tuple[float, float]] = []
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetsync.join(
        model, optimizer, [torch.ones(3)] * 8, batch_size=4, plane=LocalPlane(), delay_bound=delay_bound
    ) as session:
        for batch in session.slices():
            computing.append(latest())
            loss = model(batch).sum()
            loss.backward()
            session.step(loss)
        at_rest = latest()
    assert set(computing) == {(naps.FRACTION_COMPUTING, expected)}
    assert at_rest[1] == naps.SHORTEST_SECONDS  # the main thread may have sums of its own
    assert (naps.FRACTION_WAITING, naps.SHORTEST_DELAYED_SECONDS) not in asked  # whoever waits looks soon
