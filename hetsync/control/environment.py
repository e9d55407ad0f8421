"""Tuning a simulated job as Gymnasium environments: ours, and the papers'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from hetsync.control.actions import Actions, Limits, direction
from hetsync.control.controller import Controller
from hetsync.control.features import FEATURES, Features, Vector
from hetsync.control.jobs import Course, Job, Random, random_job, with_settings
from hetsync.control.observation import Observation
from hetsync.control.rewards import FallOfLogLoss, MakeReward, PapersGain, Reward
from hetsync.sync.messages import Settings

Draw = Callable[[Random], Job]
MakeAdviser = Callable[[Course, Limits], Controller]

DEFAULTS = Settings()  # of recipes


class JobEnvironment(gymnasium.Env[Vector, Any], ABC):
    """An episode is a job that `draw` draws; a step is one of its windows. Subclasses say what is seen and done.

    The episode is truncated when the job's time is up, and terminates when all samples are applied or the loss is no
    longer finite, which costs `DIVERGED`. `info` tells the virtual `seconds`, the `loss` and the `settings`.

    With a `rival`, each reward is how much more it is than that of the same job left alone at these settings: so a
    return of 0 is what they reach, and how fast a job can learn at all, which no controller decides, drops out.
    """

    DIVERGED = -5.0

    def __init__(self, draw: Draw, make_reward: MakeReward, rival: Settings | None = None) -> None:
        self._draw = draw
        self._make_reward = make_reward
        self._rival = rival

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        job = self._draw(self.np_random)
        self._rivals_rewards = iter(self._rewards_of(with_settings(job, self._rival)) if self._rival else ())
        self._start(job)
        self._begin()
        seen, _ = self._window()
        next(self._rivals_rewards, 0.0)
        return self._vector(seen), self._info()

    def _start(self, job: Job) -> None:
        self.course = Course(job)
        self._reward: Reward = self._make_reward(job.window_seconds)

    def _rewards_of(self, job: Job) -> list[float]:
        """Window by window, of a job that is left alone."""
        self._start(job)
        rewards = []
        while not (self.course.over or self.course.late):
            rewards.append(self._window()[1])
        return rewards

    def step(self, action: Any) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        course = self.course
        course.tune(self._settings(course.simulation.policy.settings, action))
        seen, reward = self._window()
        reward -= next(self._rivals_rewards, 0.0)
        return self._vector(seen), reward, course.over, course.late and not course.over, self._info()

    def _window(self) -> tuple[Observation, float]:
        course = self.course
        course.advance()
        seen = course.observe()
        reward = self._reward(seen, course.loss)
        return seen, self.DIVERGED if course.diverged else reward

    def _info(self) -> dict[str, Any]:
        course = self.course
        return {
            "seconds": course.simulation.now,
            "loss": course.loss,
            "settings": course.simulation.policy.settings,
        }

    def _begin(self) -> None:
        """A new job."""

    @abstractmethod
    def _vector(self, seen: Observation) -> Vector:
        """What is seen of a window."""

    @abstractmethod
    def _settings(self, current: Settings, action: Any) -> Settings:
        """What an action asks for."""


class TuningEnvironment(JobEnvironment):
    """Sees `FEATURES`; decreases, keeps or increases K and D by a rung. Beyond the limits nothing changes.

    With an adviser, `info` tells the action (2) that it would take now as `advice`.
    """

    def __init__(
        self,
        draw: Draw = random_job,
        limits: Limits | None = None,
        make_reward: MakeReward = FallOfLogLoss,
        rival: Settings | None = DEFAULTS,
        make_adviser: MakeAdviser | None = None,
    ) -> None:
        super().__init__(draw, make_reward, rival)
        self._limits = limits or Limits()
        self._actions = Actions(self._limits)
        self._make_adviser = make_adviser
        self._advice: tuple[int, int] | None = None
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (len(FEATURES),), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([3, 3])

    def _begin(self) -> None:
        self._features = Features(self.course.job.batch_size)
        self._adviser = self._make_adviser(self.course, self._limits) if self._make_adviser else None

    def _vector(self, seen: Observation) -> Vector:
        if self._adviser is not None and not self.course.over:
            self._advice = direction(seen.settings, self._adviser.decide(seen).settings)
        return self._features.of(seen)

    def _info(self) -> dict[str, Any]:
        return super()._info() | ({} if self._advice is None else {"advice": self._advice})

    def _settings(self, current: Settings, action: npt.NDArray[np.int64]) -> Settings:
        return self._actions.apply(current, action.tolist())


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
    return replace(current, accumulation=min(max(slices, limits.least_accumulation), limits.greatest_accumulation))
