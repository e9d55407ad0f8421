"""What a controller is rewarded for, window by window. A reward is made anew for every job."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Protocol

from hetsync.control.observation import Observation

# A loss counts as at least this, so that its logarithm does not run away.
LEAST_LOSS = 1e-8


class Reward(Protocol):
    def __call__(self, seen: Observation, loss: float) -> float:
        """Of the window that was seen; `loss` is of the job's weights at its end, by validation where that is had."""
        ...


class FallOfLogLoss:
    """Ours: how much the logarithm of the smoothed loss falls a unit of time.

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


class PapersGain:
    """The papers' (P2, formula 2 as its prose says): N falls to min(N, K · (x − μ) / σ), and the reward is by how much.

    x is the accumulated loss of the window's last update, μ and σ the mean and the standard deviation of all so far.
    It can be gamed: once a loss lies below the mean, a greater K makes N fall although nothing is learnt.
    """

    def __init__(self, unit_seconds: float) -> None:
        self._losses: list[float] = []
        self._lowest = 0.0

    def __call__(self, seen: Observation, loss: float) -> float:
        slices = seen.settings.accumulation
        if not seen.losses or not math.isfinite(seen.losses[-1]):
            return 0.0
        accumulated = slices * seen.losses[-1]
        self._losses.append(accumulated)
        deviation = statistics.pstdev(self._losses)
        if not deviation:
            return 0.0
        before = self._lowest
        self._lowest = min(before, slices * (accumulated - statistics.fmean(self._losses)) / deviation)
        return before - self._lowest


MakeReward = Callable[[float], Reward]
"""From the time scale of a job, in seconds, to its reward."""
