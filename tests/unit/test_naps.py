"""When a communication thread looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
