"""Is training lost in delayed mode? Where the delay bound is by rule, all then go back to the last good weights, and on
without delay: what synchronous training survives does not end because of delay.

Two signs, which cost nothing: a loss, or a sum over a rank's progress (told as its loss), that is not finite; and
losses that have climbed half of the way back up to where training began. Losses that have no trend to speak of, such
as those of a GAN, are not judged.

Pure: no clock, no tensors.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise
from typing import NamedTuple

WINDOW_BATCHES = 8
CLIMBED = 0.5  # of the way back up, by which training is lost
WELL = 0.1  # of it, up to which losses are good
LOST_WINDOWS = 2  # in a row
RECENT_WINDOWS = 64
LEAST_TREND = 8.0  # of what losses have fallen by, over what they change by from window to window


class Lost(NamedTuple):
    """Training, as `rank` told in round `round` of the anchor. `loss` is not finite, or a mean that is far above the
    `best` one. After `good` samples all was well."""

    rank: int
    round: int
    loss: float
    best: float
    good: int

    def __str__(self) -> str:
        if math.isfinite(self.loss):
            return f"delay has lost training: the loss is {self.loss:.3g}, and was {self.best:.3g}"
        return f"delay has lost training: the loss, or a step, became {self.loss} on rank {self.rank}"


class DelayGuard:
    def __init__(self, batch: int) -> None:
        self._window = WINDOW_BATCHES * batch
        self._sum, self._samples = 0.0, 0
        self._first = self.best = math.nan  # means of windows
        self._recent: deque[float] = deque(maxlen=RECENT_WINDOWS)  # with a good end
        self._above = 0  # windows in a row
        self.good = 0  # samples applied as the last window with a good end was over

    def observe(self, loss_sum: float, samples: int, delayed: bool, applied: int) -> float | None:
        """A task's losses, over so many samples, in the order in which tasks end, with so many samples `applied`. The
        loss by which training is lost, if it is."""
        if not math.isfinite(loss_sum):
            return loss_sum if delayed else None
        self._sum, self._samples = self._sum + loss_sum, self._samples + samples
        if self._samples < self._window:
            return None
        mean, self._sum, self._samples = self._sum / self._samples, 0.0, 0
        climbed = self._climbed(mean)
        self._above = self._above + 1 if delayed and climbed > CLIMBED else 0
        if not self._above:
            self._take(mean)
        if climbed <= WELL:
            self.good = applied
        return mean if self._above >= LOST_WINDOWS else None

    def _take(self, mean: float) -> None:
        if not self._recent:
            self._first = self.best = mean
        self.best = min(self.best, mean)
        self._recent.append(mean)

    def _climbed(self, mean: float) -> float:
        """What part of the way back up; 0 of losses without a trend."""
        if len(self._recent) < 2:
            return 0.0
        fallen = self._first - self.best
        changes = [abs(after - before) for before, after in pairwise(self._recent)]
        return (mean - self.best) / fallen if fallen > LEAST_TREND * statistics.median(changes) else 0.0

    def went_back(self) -> None:
        self._sum, self._samples, self._above = 0.0, 0, 0
