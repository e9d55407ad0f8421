"""What a controller is rewarded for, window by window. A reward is made anew for every job."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from hetsync.sync.observation import Observation

# A loss counts as at least this, so that its logarithm does not run away.
LEAST_LOSS = 1e-8


class Reward(Protocol):
    def __call__(self, seen: Observation, loss: float) -> float:
        """Of the window that was seen; `loss` is of the job's weights at its end, by validation where that is had."""
        ...


class FallOfLogLoss:
    """How much the logarithm of the smoothed loss falls a unit of time.

    Over windows of equal length it adds up to the whole fall by a given time, which no detour can change.
    """

    def __init__(self, unit_seconds: float, smoothing: float = 0.4) -> None:
        """`unit_seconds` is the time scale of the job; `smoothing` the newest window's weight in the smoothed loss."""
        self._unit = unit_seconds
        self._smoothing = smoothing
        self._level: float | None = None

    def __call__(self, seen: Observation, loss: float) -> float:
        if not math.isfinite(loss) or not seen.seconds:
            return 0.0
        new = math.log(max(loss, LEAST_LOSS))
        old = new if self._level is None else self._level
        self._level = old + self._smoothing * (new - old)
        return (old - self._level) * self._unit / seen.seconds


MakeReward = Callable[[float], Reward]
"""From the time scale of a job, in seconds, to its reward."""
