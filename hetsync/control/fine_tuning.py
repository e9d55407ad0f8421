"""Learning on while a live job runs, by stable-baselines3's PPO. The job is the environment: nothing is simulated."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from hetsync.control.actions import Actions, Limits, described
from hetsync.control.controller import Decision
from hetsync.control.features import Features, Vector
from hetsync.control.policy_network import load_policy
from hetsync.control.ppo_model import action_space, new_model, observation_space
from hetsync.control.rewards import FallOfLogLoss
from hetsync.errors import UserError
from hetsync.sync.observation import Observation

# A live job has one episode of a hundred windows, not thousands.
ROLLOUT = 32  # windows between two updates
LEARNING_RATE = 1e-4


class Unplayable(gymnasium.Env[Vector, Any]):
    """Tells PPO the spaces. What happens in them comes from the job, window by window."""

    def __init__(self) -> None:
        self.observation_space = observation_space()
        self.action_space = action_space()


class FineTuned:
    """A saved policy that goes on learning, from the fall of the logarithm of the training loss.

    It draws its actions, as learning needs, instead of taking the likeliest.
    """

    def __init__(self, path: str | None, limits: Limits, batch_size: int, window_seconds: float, seed: int) -> None:
        """UserError where the policy cannot be read or does not fit."""
        weights, specification = load_policy(path)
        self.model = new_model(
            DummyVecEnv([Unplayable]),
            seed,
            specification.hidden,
            learning_rate=LEARNING_RATE,
            n_steps=ROLLOUT,
            batch_size=ROLLOUT,
            n_epochs=4,
        )
        try:
            self.model.policy.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"control.policy {path} holds other layers than its specification says") from error
        self.updates = 0
        self._actions = Actions(limits)
        self._features = Features(batch_size)
        self._reward = FallOfLogLoss(window_seconds, smoothing=0.3)
        self._first = True
        # Features, action, value and log probability of the last decision, with what it asked for.
        self._last: tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor, Decision] | None = None

    def decide(self, seen: Observation) -> Decision:
        features = self._features.of(seen)
        inputs = torch.from_numpy(features)[None]
        with torch.no_grad():
            self._learn(seen, self.model.policy.predict_values(inputs))
            action, value, log_probability = self.model.policy(inputs)
        settings = self._actions.apply(seen.settings, action[0].tolist())
        chance = float(log_probability.exp())
        decision = Decision(settings, f"drawn (p {chance:.2f}) after {self.updates} updates: {described(settings)}")
        self._last = features, action, value, log_probability, decision
        return decision

    def _learn(self, seen: Observation, value: torch.Tensor) -> None:
        """From what the last decision led to, where it came into force."""
        loss = math.fsum(seen.losses) / len(seen.losses) if seen.losses else math.nan
        reward = self._reward(seen, loss)
        if self._last is None:
            return
        features, action, old_value, log_probability, decision = self._last
        if decision.settings != seen.settings:
            return
        buffer = self.model.rollout_buffer
        start = np.array([self._first])
        self._first = False
        buffer.add(features[None], action.numpy(), np.array([reward]), start, old_value, log_probability)
        if buffer.full:
            buffer.compute_returns_and_advantage(value, np.array([False]))
            with torch.enable_grad():
                self.model.train()
            buffer.reset()
            self.updates += 1
