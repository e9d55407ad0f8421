"""Which ranks crawl: by their own history, since devices differ. Pure: no clock, no plane."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

HISTORY = 64  # slices that a rank is measured by
LEAST_HISTORY = 8
IN_A_ROW = 3  # one may be slow for a good reason: a kernel is compiled for a new shape


class SlowRanks:
    def __init__(self, factor: float) -> None:
        """A rank crawls whose last tasks all took `factor` times its own median."""
        self._factor = factor
        self._history: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._slow: dict[int, int] = defaultdict(int)

    def observe(self, rank: int, slice_seconds: float) -> bool:
        """Does it crawl? Slow slices are no part of its history."""
        history = self._history[rank]
        if len(history) >= LEAST_HISTORY and slice_seconds > self._factor * median(history):
            self._slow[rank] += 1
            return self._slow[rank] >= IN_A_ROW
        self._slow[rank] = 0
        history.append(slice_seconds)
        return False
