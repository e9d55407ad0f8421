"""When a communication thread polls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync.plane.local import LocalPlane
from hetsync.sync import communicator, polling
from hetsync.sync.router import Router
from hetsync.sync.shared_state import EngineOptions, MainThread, Phase, SharedState
from hetsync.sync.worker import Worker
from hetsync.telemetry import Telemetry

seconds = st.floats(0, 100)


@pytest.mark.parametrize(
    ("quiet", "shortest", "expected"),
    [
        (0.0, polling.SHORTEST_POLL_SECONDS, 50e-6),  # news: the next may follow at once
        (0.0, polling.SHORTEST_CALM_POLL_SECONDS, 4e-3),  # a rank that computes lets them wait
        (0.010, polling.SHORTEST_CALM_POLL_SECONDS, 5e-3),
        (1.0, polling.SHORTEST_POLL_SECONDS, 16e-3),
    ],
)
def test_sleeps_grow_with_the_quiet(quiet: float, shortest: float, expected: float) -> None:
    found = polling.poll_seconds(quiet, polling.POLL_FRACTION_COMPUTING, polling.LONGEST_IDLE_POLL_SECONDS, shortest)
    assert found == pytest.approx(expected)


@given(quiet=seconds, longest=seconds, shortest=seconds)
def test_a_limit_is_a_limit(quiet: float, longest: float, shortest: float) -> None:
    assert polling.poll_seconds(quiet, polling.POLL_FRACTION_WAITING, longest, shortest) <= longest


@given(quiet=seconds)
def test_whoever_waits_loses_a_tenth_at_most(quiet: float) -> None:
    found = polling.poll_seconds(quiet, polling.POLL_FRACTION_WAITING, polling.LONGEST_IDLE_POLL_SECONDS)
    assert found <= max(0.1 * quiet, polling.SHORTEST_POLL_SECONDS)


@pytest.mark.parametrize(
    ("delayed", "main_thread", "phase", "summing", "fraction", "shortest"),
    [
        (True, MainThread.COMPUTING, Phase.TRAINING, True, polling.POLL_FRACTION_COMPUTING, 4e-3),
        (False, MainThread.COMPUTING, Phase.TRAINING, True, polling.POLL_FRACTION_COMPUTING, 50e-6),  # buckets go out
        (False, MainThread.COMPUTING, Phase.TRAINING, False, polling.POLL_FRACTION_COMPUTING, 4e-3),  # none has yet
        (True, MainThread.WAITING, Phase.TRAINING, False, polling.POLL_FRACTION_WAITING, 50e-6),  # polls soon
        (False, MainThread.WAITING, Phase.TRAINING, False, polling.POLL_FRACTION_WAITING, 50e-6),
        (True, MainThread.COMPUTING, Phase.RESTING, False, polling.POLL_FRACTION_COMPUTING, 50e-6),  # sums of its own
    ],
)
def test_only_a_rank_that_computes_and_has_no_gradients_under_way_lets_news_wait(
    monkeypatch: pytest.MonkeyPatch,
    delayed: bool,
    main_thread: MainThread,
    phase: Phase,
    summing: bool,
    fraction: float,
    shortest: float,
) -> None:
    """In synchronous mode others wait for them."""
    asked: list[tuple[float, float]] = []

    def poll_seconds(quiet: float, fraction: float, longest: float, shortest: float) -> float:
        asked.append((fraction, shortest))
        return 1e-3

    monkeypatch.setattr(polling, "poll_seconds", poll_seconds)
    made = _communicator(main_thread, phase, delayed)
    if summing:
        made._rounds._pending.post(torch.ones(3), "float32")
    assert made._sleep_seconds(0.0) == 1e-3
    assert asked == [(fraction, shortest)]


@pytest.mark.parametrize(
    ("patience", "expected"),
    [(0.0, 4e-3), (0.1, 4e-3), (0.32, 10e-3), (100.0, 16e-3)],
)
@pytest.mark.parametrize("summing", [True, False])
def test_on_the_cores_that_compute_a_rank_polls_no_more_often_than_a_round_needs(
    patience: float, expected: float, summing: bool
) -> None:
    made = _communicator(MainThread.COMPUTING, Phase.TRAINING, delayed=True)
    if summing:
        made._rounds._pending.post(torch.ones(3), "float32")
    made._shared.patience_seconds = patience
    assert made._sleep_seconds(0.0) == pytest.approx(expected)
    made._shared.main_thread = MainThread.WAITING
    assert made._sleep_seconds(1e-3) <= 1e-4  # now its patience is over


@pytest.mark.parametrize(
    ("main_thread", "summing", "quiet", "expected"),
    [
        (MainThread.WAITING, True, 0.0, 0.0),
        (MainThread.WAITING, True, 0.4e-3, 0.0),
        (MainThread.WAITING, True, 1e-3, 1e-4),  # somebody is late
        (MainThread.WAITING, False, 0.0, 50e-6),  # for a message, which nobody here moves on
        (MainThread.COMPUTING, True, 0.0, 50e-6),  # the processor has better to do
    ],
)
def test_while_a_sum_moves_whoever_waits_does_not_sleep(
    main_thread: MainThread, summing: bool, quiet: float, expected: float
) -> None:
    made = _communicator(main_thread, Phase.TRAINING, delayed=False)
    if summing:
        made._rounds._pending.post(torch.ones(3), "float32")
    assert made._sleep_seconds(quiet) == pytest.approx(expected)


class OnGpu:
    is_cuda = True


@pytest.mark.parametrize(
    ("main_thread", "summing", "expected"),
    [
        (MainThread.COMPUTING, True, 0.5e-3),
        (MainThread.COMPUTING, False, 4e-3),
        (MainThread.WAITING, True, 0.0),
    ],
)
def test_a_gpus_rank_polls_often_while_its_sums_go_through_the_host(
    main_thread: MainThread, summing: bool, expected: float
) -> None:
    """Whatever its patience: that is of cores that compute."""
    made = _communicator(main_thread, Phase.TRAINING, delayed=True)
    made._shared.weights = [OnGpu()]  # type: ignore[list-item]
    made._shared.patience_seconds = 0.1
    if summing:
        made._rounds._pending.post(torch.ones(3), "float32")
    assert made._sleep_seconds(0.0) == pytest.approx(expected)


def _communicator(main_thread: MainThread, phase: Phase, delayed: bool) -> communicator.Communicator:
    plane = LocalPlane()
    shared = SharedState(Worker(0), None, EngineOptions(1))
    shared.weights = [torch.ones(3)]
    shared.main_thread, shared.phase = main_thread, phase
    if delayed:
        shared.delayed_mode()
    return communicator.Communicator(
        plane,
        EngineOptions(4),
        shared,
        router=Router(plane),
        coordinator=None,
        on_task=lambda task: None,
        on_dropped=lambda task: None,
        on_death=lambda death: None,
        on_damage=lambda damage: None,
        state=dict,
        books=None,
        tally=None,
        succeed=None,
        telemetry=Telemetry(None),
    )
