"""Which ranks crawl: by their own history, since devices differ. Pure: no clock, no plane."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

HISTORY = 64  # slices that a rank is measured by
LEAST_HISTORY = 8
IN_A_ROW = 3  # one may be slow for a good reason: a kernel is compiled for a new shape


class SlowRanks:
    def __init__(self, factor: float) -> None:
        """A rank crawls whose last tasks all took `factor` times its own median, for as many samples a slice."""
        self._factor = factor
        self._history: dict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._slow: dict[int, int] = defaultdict(int)

    def observe(self, rank: int, samples: float, seconds: float) -> bool:
        """Slices of so many samples took so long each: does it crawl? Slow ones are no part of its history."""
        history = self._history[rank]
        if len(history) >= LEAST_HISTORY and seconds > self._factor * _usual(history, samples):
            self._slow[rank] += 1
            return self._slow[rank] >= IN_A_ROW
        self._slow[rank] = 0
        history.append((samples, seconds))
        return False


def _usual(history: Iterable[tuple[float, float]], samples: float) -> float:
    """Seconds that a slice of so many samples takes at most, by those before: shares move. A larger one takes longer in
    proportion at most, since some of the cost is fixed; a smaller one, for that reason, may take as long."""
    return median(seconds * max(1.0, samples / before) for before, seconds in history)
