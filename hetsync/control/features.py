"""From observations to the numbers that a policy sees. A policy fits one version of this file only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hetsync.control.actions import KEEP, TUNED, direction
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

# To be raised with every change of what the names below mean, of their number or their order.
VERSION = 2

FEATURES = (
    # The papers' five points of a window's losses: logarithms over the running mean; 0 without losses.
    "loss_first",
    "loss_minimum",
    "loss_maximum",
    "loss_last",
    "loss_fluctuation",  # largest change between two tasks, over the running mean
    "trend",  # fall of the logarithm of the mean loss since the last window, times 4
    "long_trend",  # the same, smoothed over about five windows, times 8
    "gained",  # fall of the logarithm of the mean loss since the start, over 5
    "accumulation",  # log2 K, over 4
    "delay_bound",  # log2 (1 + D), over 6
    "synchronous",  # 1 where D = 0
    "quorum",
    "staleness",  # log2 (1 + mean), over 6
    "efficiency",
    "efficiency_change",  # since the last window, times 4
    "communication_share",
    "waiting_share",
    "jitter",
    "noise_scale",  # log10 of the noise scale over the samples of a full contribution set, over 3; 0 where unknown
    "noise_scale_known",  # 1 or 0
    "progress",
    "learning_rate",  # what the schedule multiplies it by
    "last_accumulation_move",  # -1, 0, 1
    "last_delay_bound_move",
    "since_move",  # windows since the settings changed, over 10
)

Vector = npt.NDArray[np.float32]

RECENT = 0.3  # weight of a window in the running mean of the loss
LONG = 0.2  # weight of a window in the long trend
TINY = 1e-12


class Features:
    """Turns the windows of one job, one after the other, into vectors within [-1, 1]; remembers what trends need."""

    def __init__(self, batch_size: int) -> None:
        """`batch_size` is B, samples of a slice of all ranks."""
        self._batch = batch_size
        self._first_level: float | None = None  # logarithm of the mean loss
        self._level: float | None = None
        self._running: float | None = None  # mean loss
        self._long_trend = 0.0
        self._efficiency: float | None = None
        self._settings: Settings | None = None
        self._moves = [0] * len(TUNED)
        self._since_move = 0

    def of(self, seen: Observation) -> Vector:
        """(F,) as `FEATURES` names them, all finite."""
        settings = seen.settings
        self._watch_moves(settings)
        before, self._efficiency = self._efficiency, seen.efficiency
        known = seen.noise_scale is not None and seen.noise_scale > 0
        ratio = (seen.noise_scale or 0) / (self._batch * settings.accumulation) if known else 1.0
        values = [
            *self._losses(seen.losses),
            math.log2(settings.accumulation) / 4,
            math.log2(1 + settings.delay_bound) / 6,
            float(settings.synchronous),
            settings.quorum,
            math.log2(1 + seen.staleness) / 6,
            seen.efficiency,
            0.0 if before is None else 4 * (seen.efficiency - before),
            seen.communication_share,
            seen.waiting_share,
            seen.jitter,
            math.log10(max(ratio, TINY)) / 3,
            float(known),
            seen.progress,
            seen.learning_rate,
            *self._moves,
            self._since_move / 10,
        ]
        return np.clip(np.nan_to_num(np.array(values), posinf=1.0, neginf=-1.0), -1, 1).astype(np.float32)

    def _losses(self, losses: tuple[float, ...]) -> list[float]:
        """The first eight. A loss that is not finite counts as very large; one that is not positive as very small."""
        if not losses:
            return [0.0] * 5 + [0.0, 8 * self._long_trend, self._gained()]
        values = np.nan_to_num(np.array(losses), nan=1e30, posinf=1e30).clip(TINY, 1e30)
        mean = float(values.mean())
        usual = mean if self._running is None else self._running
        points = np.log([values[0], values.min(), values.max(), values[-1]]) - math.log(usual)
        fluctuation = float(np.abs(np.diff(values)).max()) / usual if len(values) > 1 else 0.0
        level = math.log(mean)
        trend = 0.0 if self._level is None else self._level - level
        self._long_trend += LONG * (trend - self._long_trend)
        self._running = usual + RECENT * (mean - usual)
        self._level = level
        if self._first_level is None:
            self._first_level = level
        return [*points.tolist(), fluctuation, 4 * trend, 8 * self._long_trend, self._gained()]

    def _gained(self) -> float:
        return (self._first_level - self._level) / 5 if self._first_level is not None and self._level is not None else 0

    def _watch_moves(self, settings: Settings) -> None:
        old = settings if self._settings is None else self._settings
        self._moves, self._settings = [step - KEEP for step in direction(old, settings)], settings
        self._since_move = 0 if any(self._moves) else self._since_move + 1
