"""How soon a job is back to speed after one of its devices has become slower, from its timelines."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from itertools import accumulate

from benchmarks.peers.timeline import Timeline

WINDOW_ROUNDS = 20
BACK = 0.97  # of the ceiling
SLOWER = 2.0  # times the median of all slices before: the device has slowed down


def recovery(timelines: Sequence[Timeline], slowed: int, rates: Sequence[float]) -> dict[str, float | None] | None:
    """What followed after rank `slowed` had slowed down; `rates` are the ranks' new solo samples/s.

    `window` is the part of the new ceiling that the next 20 rounds reached: how busy the devices were, weighted by
    their rates. `rounds` were over before the first 20 rounds in a row that reached 97 % of it; None if none did.
    The whole is None where no slow-down is to be seen, or fewer than 20 rounds follow.
    """
    since = slow_down(timelines[slowed])
    landings = sorted(stop for kind, _, stop in timelines[0] if kind == "sum")
    if since is None:
        return None
    marks = [since, *landings[bisect.bisect_right(landings, since) :]]
    if len(marks) <= WINDOW_ROUNDS:
        return None
    computing, evaluating = ([Spent(timeline, kind) for timeline in timelines] for kind in ("compute", "rest"))
    stretches = zip(marks, marks[WINDOW_ROUNDS:], strict=False)
    reached = [ceiling_part(computing, evaluating, rates, start, stop) for start, stop in stretches]
    back = next((rounds for rounds, part in enumerate(reached) if part >= BACK), None)
    return {"window": reached[0], "rounds": back}


def slow_down(timeline: Timeline) -> float | None:
    """When the first slice began that took far longer than those before it."""
    slices = [(start, stop - start) for kind, start, stop in timeline if kind == "compute"]
    for number, (start, seconds) in enumerate(slices[1:], 1):
        if seconds > SLOWER * statistics.median(before for _, before in slices[:number]):
            return start
    return None


class Spent:
    """Seconds that a rank has spent in one kind of interval."""

    def __init__(self, timeline: Timeline, kind: str) -> None:
        spans = sorted((start, stop) for name, start, stop in timeline if name == kind)
        self._starts = [start for start, _ in spans]
        self._stops = [stop for _, stop in spans]
        self._before = [0.0, *accumulate(stop - start for start, stop in spans)]

    def _until(self, moment: float) -> float:
        number = bisect.bisect_right(self._starts, moment)
        return self._before[number] - max(0.0, self._stops[number - 1] - moment) if number else 0.0

    def within(self, start: float, stop: float) -> float:
        return self._until(stop) - self._until(start)


def ceiling_part(
    computing: Sequence[Spent], evaluating: Sequence[Spent], rates: Sequence[float], start: float, stop: float
) -> float:
    """Computing time weighted by the ranks' rates; evaluation is off the clock."""
    reached = sum(rate * rank.within(start, stop) for rate, rank in zip(rates, computing, strict=True))
    lost = sum(rate * rank.within(start, stop) for rate, rank in zip(rates, evaluating, strict=True))
    return reached / (sum(rates) * (stop - start) - lost)
