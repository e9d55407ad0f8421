"""What "DeepTTE in parallel" (Qingdao, 2021; P2 in short) tunes by: its environment, its actions, its reward."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import gymnasium
import numpy as np
import numpy.typing as npt

from hetsync.control.actions import Limits
from hetsync.control.features import Vector
from hetsync.control.learning.environment import Draw, JobEnvironment
from hetsync.control.learning.jobs import random_job
from hetsync.control.rewards import MakeReward
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation


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


class PapersEnvironment(JobEnvironment):
    """The papers' (P2): the five points of the accumulated loss and K; K more, less or as it is, by an amount.

    The first number of an action below 1 means more, below 2 less; the second is the amount as a part of K, at least
    one slice. The papers do not say how far a step goes, nor how losses are scaled: here as multiples of the first one.
    """

    OBSERVED = ("first", "minimum", "maximum", "last", "fluctuation", "accumulation")

    def __init__(
        self, draw: Draw = random_job, limits: Limits | None = None, make_reward: MakeReward = PapersGain
    ) -> None:
        super().__init__(draw, make_reward)
        self._limits = limits or Limits()
        self.observation_space = gymnasium.spaces.Box(0.0, 10.0, (len(self.OBSERVED),), np.float32)
        self.action_space = gymnasium.spaces.Box(np.zeros(2, np.float32), np.array([3, 1], np.float32))

    def _begin(self) -> None:
        self._unit: float | None = None

    def _vector(self, seen: Observation) -> Vector:
        self._unit, vector = papers_vector(seen, self._unit)
        return vector

    def _settings(self, current: Settings, action: npt.NDArray[np.float32]) -> Settings:
        return papers_settings(current, action, self._limits)


def papers_vector(seen: Observation, unit: float | None) -> tuple[float | None, Vector]:
    """(6,) within [0, 10]; and the unit of losses, which the first window sets."""
    slices = seen.settings.accumulation
    losses = slices * np.nan_to_num(np.array(seen.losses), nan=np.inf)
    if unit is None and losses.size:
        unit = float(losses[0]) / slices
    points = np.zeros(5)
    if losses.size and unit:
        fluctuation = np.abs(np.diff(losses)).max(initial=0.0)
        points = np.array([losses[0], losses.min(), losses.max(), losses[-1], fluctuation]) / (unit * slices)
    vector = np.clip(np.nan_to_num([*points, slices], nan=10.0), 0, 10)
    return unit, vector.astype(np.float32)


def papers_settings(current: Settings, action: npt.NDArray[np.float32], limits: Limits) -> Settings:
    slices = current.accumulation
    amount = max(1, round(float(action[1]) * slices))
    slices += amount if action[0] < 1 else -amount if action[0] < 2 else 0
    return replace(current, accumulation=min(max(slices, limits.min_accumulation), limits.max_accumulation))
