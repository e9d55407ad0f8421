"""Tuning a simulated job as a Gymnasium environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from hetsync.control.actions import Actions, Limits, direction
from hetsync.control.controller import Controller
from hetsync.control.features import Features, Vector
from hetsync.control.learning.episodes import Episode
from hetsync.control.learning.jobs import Job, Random, random_job, with_settings
from hetsync.control.ppo_model import action_space, observation_space
from hetsync.control.rewards import FallOfLogLoss, MakeReward, Reward
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

Draw = Callable[[Random], Job]
MakeExpert = Callable[[Episode, Limits], Controller]

DEFAULTS = Settings(4, 0.25, 1)  # of recipes, when the policy that comes along was learned


class JobEnvironment(gymnasium.Env[Vector, Any], ABC):
    """An episode is a job that `draw` draws; a step is one of its windows. Subclasses say what is seen and done.

    The episode is truncated when the job's time is up, and terminates when all samples are applied or the loss is no
    longer finite, which costs `DIVERGED`. `info` tells the virtual `seconds`, the `loss` and the `settings`.

    With a `baseline`, each reward is how much more it is than that of the same job left alone at these settings: so a
    return of 0 is what they reach, and how fast a job can learn at all, which no controller decides, drops out.
    """

    DIVERGED = -5.0

    def __init__(self, draw: Draw, make_reward: MakeReward, baseline: Settings | None = None) -> None:
        self._draw = draw
        self._make_reward = make_reward
        self._baseline = baseline

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        job = self._draw(self.np_random)
        self._baseline_rewards = iter(self._rewards_of(with_settings(job, self._baseline)) if self._baseline else ())
        self._start(job)
        self._begin()
        seen, _ = self._window()
        next(self._baseline_rewards, 0.0)
        return self._vector(seen), self._info()

    def _start(self, job: Job) -> None:
        self.episode = Episode(job)
        self._reward: Reward = self._make_reward(job.window_seconds)

    def _rewards_of(self, job: Job) -> list[float]:
        """Window by window, of a job that is left alone."""
        self._start(job)
        rewards = []
        while not (self.episode.over or self.episode.late):
            rewards.append(self._window()[1])
        return rewards

    def step(self, action: Any) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        episode = self.episode
        episode.tune(self._settings(episode.simulation.machine.settings, action))
        seen, reward = self._window()
        reward -= next(self._baseline_rewards, 0.0)
        return self._vector(seen), reward, episode.over, episode.late and not episode.over, self._info()

    def _window(self) -> tuple[Observation, float]:
        episode = self.episode
        episode.advance()
        seen = episode.observe()
        reward = self._reward(seen, episode.loss)
        return seen, self.DIVERGED if episode.diverged else reward

    def _info(self) -> dict[str, Any]:
        episode = self.episode
        return {
            "seconds": episode.simulation.now,
            "loss": episode.loss,
            "settings": episode.simulation.machine.settings,
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

    With an expert, `info` tells the action (T,) that it would take now as `expert_action`.
    """

    def __init__(
        self,
        draw: Draw = random_job,
        limits: Limits | None = None,
        make_reward: MakeReward = FallOfLogLoss,
        baseline: Settings | None = DEFAULTS,
        make_expert: MakeExpert | None = None,
    ) -> None:
        super().__init__(draw, make_reward, baseline)
        self._limits = limits or Limits()
        self._actions = Actions(self._limits)
        self._make_expert = make_expert
        self._expert_action: tuple[int, ...] | None = None
        self.observation_space = observation_space()
        self.action_space = action_space()

    def _begin(self) -> None:
        self._features = Features(self.episode.job.batch_size)
        self._expert = self._make_expert(self.episode, self._limits) if self._make_expert else None

    def _vector(self, seen: Observation) -> Vector:
        if self._expert is not None and not self.episode.over:
            self._expert_action = direction(seen.settings, self._expert.decide(seen).settings)
        return self._features.of(seen)

    def _info(self) -> dict[str, Any]:
        return super()._info() | ({} if self._expert_action is None else {"expert_action": self._expert_action})

    def _settings(self, current: Settings, action: npt.NDArray[np.int64]) -> Settings:
        return self._actions.apply(current, action.tolist())
