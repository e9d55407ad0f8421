"""Learning a policy beforehand, on simulated jobs: by an expert's example, then by PPO from rewards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecMonitor

from hetsync.control.actions import Limits
from hetsync.control.learning.environment import Draw, TuningEnvironment
from hetsync.control.learning.expert import Expert
from hetsync.control.learning.imitation import imitate
from hetsync.control.policy_network import Specification, save_policy
from hetsync.control.ppo_model import HIDDEN, new_model, weights_of
from hetsync.control.rewards import FallOfLogLoss, MakeReward

PROCESSES = 2
IMITATED = 0.4  # of the decisions to learn from
CRITIC_ONLY = 0.1  # of them: the actor stays as it is
ROLLOUT = 1000  # decisions of each process between two updates: 25 episodes
MINIBATCH = 500
# Of improving on what has been imitated: small steps.
FINE: dict[str, Any] = {"learning_rate": 2e-4, "n_epochs": 8, "clip_range": 0.1, "target_kl": 0.03}

Say = Callable[[str], None]


class Curve(BaseCallback):
    """The learning curve: mean return of the episodes that ended since the last update, said and kept."""

    def __init__(self, say: Say, before: int = 0) -> None:
        """So many decisions were learned from `before`."""
        super().__init__()
        self._before = before
        self.points: list[tuple[int, float]] = []
        self._say = say
        self._returns: list[float] = []

    def _on_step(self) -> bool:
        self._returns += [float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        if self._returns:
            self.points.append((self._before + self.num_timesteps, float(np.mean(self._returns))))
            self._say(f"{self.points[-1][0]:,} decisions: mean return {self.points[-1][1]:.3f}")
            self._returns = []


def learned(environments: VecEnv, steps: int, seed: int, callback: BaseCallback | None = None, **options: Any) -> PPO:
    """PPO on these environments, from nothing. `options` override its settings."""
    model = new_model(environments, seed, **{"learning_rate": lambda left: 1e-4 + 4e-4 * left, **options})
    model.learn(steps, callback)
    return model


def simulated_jobs(draw: Draw, limits: Limits, make_reward: MakeReward, processes: int, **options: Any) -> VecEnv:
    """Environments side by side; `options` are further ones of `TuningEnvironment`."""

    def make() -> TuningEnvironment:
        torch.set_num_threads(1)
        return TuningEnvironment(draw, limits, make_reward, **options)

    return SubprocVecEnv([make] * processes) if processes > 1 else DummyVecEnv([make])


def train(
    draw: Draw,
    output: Path,
    steps: int,
    seed: int,
    command: str,
    say: Say,
    limits: Limits | None = None,
    make_reward: MakeReward = FallOfLogLoss,
    processes: int = PROCESSES,
) -> Specification:
    """Learn on jobs that `draw` draws, and write the policy. Equal arguments give equal weights.

    For a part of the `steps` the policy imitates an expert that knows the landscape; then PPO goes on from there, at
    first with the actor as it is, until the critic knows what that is worth.

    UserError where the file cannot be written.
    """
    limits = limits or Limits()
    simulated = partial(simulated_jobs, draw, limits, make_reward, processes)
    critic_only = round(CRITIC_ONLY * steps)
    rollout = min(ROLLOUT, -(-max(2, critic_only) // processes))
    with closing(simulated(baseline=None, make_expert=Expert)) as shown:
        model = new_model(shown, seed, n_steps=rollout, batch_size=min(MINIBATCH, rollout * processes), **FINE)
        imitated = imitate(model, shown, round(IMITATED * steps), seed, say)
    curve = Curve(say, imitated)
    with closing(VecMonitor(simulated())) as rewarding:
        rewarding.seed(seed)
        improve(model, rewarding, critic_only, steps - imitated - critic_only, curve)
    specification = Specification(
        HIDDEN,
        limits,
        getattr(make_reward, "__name__", str(make_reward)),
        command,
        seed,
        imitated + model.num_timesteps,
        tuple((at, round(mean, 4)) for at, mean in curve.points),
    )
    save_policy(output, weights_of(model), specification)
    return specification


def improve(model: PPO, environments: VecEnv, critic_only: int, decisions: int, callback: BaseCallback) -> None:
    """Go on from what has been imitated: for `critic_only` decisions only the critic learns, then actor and critic."""
    model.set_env(environments)
    actor = [weight for name, weight in model.policy.named_parameters() if "value" not in name]
    for number, learns in ((critic_only, False), (decisions, True)):
        for weight in actor:
            weight.requires_grad_(learns)
        model.learn(number, callback, reset_num_timesteps=not learns)
