"""Learning a policy by stable-baselines3's PPO: beforehand on simulated jobs, and on while a live job runs.

Nothing else imports stable-baselines3: who only follows a policy does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsync.control.actions import Actions, Limits
from hetsync.control.baselines import described
from hetsync.control.controller import Decision
from hetsync.control.environment import Draw, TuningEnvironment
from hetsync.control.features import Features
from hetsync.control.imitation import imitate
from hetsync.control.observation import Observation
from hetsync.control.planner import Planner
from hetsync.control.policy import Specification, Weights, load_policy, save_policy
from hetsync.control.rewards import FallOfLogLoss, MakeReward
from hetsync.errors import UserError

try:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecMonitor
except ImportError as missing:
    raise UserError(
        "learning a policy needs stable-baselines3, which is not installed: pip install 'hetsync[control]'"
    ) from missing

HIDDEN = (64, 64)
PROCESSES = 2
IMITATED = 0.4  # of the decisions to learn from
JUDGED = 0.1  # of them: the actor stays as it is
ROLLOUT = 1000  # decisions of each process between two updates: 25 episodes
MINIBATCH = 500
DISCOUNT = 0.97
# Of improving on what has been imitated: small steps.
FINE: dict[str, Any] = {"learning_rate": 2e-4, "n_epochs": 8, "clip_range": 0.1, "target_kl": 0.03}
# Of learning on in a live job, which has one course of a hundred windows, not thousands.
ONLINE_ROLLOUT = 32
ONLINE_RATE = 1e-4

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


def new_model(environments: VecEnv, seed: int, **options: Any) -> PPO:
    torch.set_num_threads(1)  # the network is small, and its sums shall not depend on the machine
    settings: dict[str, Any] = {"gamma": DISCOUNT, "policy_kwargs": {"net_arch": list(HIDDEN)}, **options}
    model = PPO("MlpPolicy", environments, seed=seed, device="cpu", **settings)
    model.set_logger(silent())
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

    For a part of the `steps` the policy imitates a planner that knows the landscape; then PPO goes on from there, at
    first with the actor as it is, until the critic knows what that is worth.

    UserError where the file cannot be written.
    """
    limits = limits or Limits()
    simulated = partial(simulated_jobs, draw, limits, make_reward, processes)
    judged = round(JUDGED * steps)
    rollout = min(ROLLOUT, -(-max(2, judged) // processes))
    with closing(simulated(rival=None, make_adviser=Planner)) as advising:
        model = new_model(advising, seed, n_steps=rollout, batch_size=min(MINIBATCH, rollout * processes), **FINE)
        imitated = imitate(model, advising, round(IMITATED * steps), seed, say)
    curve = Curve(say, imitated)
    with closing(VecMonitor(simulated())) as rewarding:
        rewarding.seed(seed)
        improve(model, rewarding, judged, steps - imitated - judged, curve)
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


def improve(model: PPO, environments: VecEnv, judged: int, decisions: int, callback: BaseCallback) -> None:
    """Go on from what has been imitated: for `judged` decisions only the critic learns, then actor and critic."""
    model.set_env(environments)
    actor = [weight for name, weight in model.policy.named_parameters() if "value" not in name]
    for number, learns in ((judged, False), (decisions, True)):
        for weight in actor:
            weight.requires_grad_(learns)
        model.learn(number, callback, reset_num_timesteps=not learns)


def silent() -> Logger:
    """Writes nothing anywhere; PPO's own would leave a folder in the temporary one."""
    return Logger(None, [])


def weights_of(model: PPO) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.policy.state_dict().items()}


class FineTuned:
    """A saved policy that goes on learning, from the fall of the logarithm of the training loss.

    It draws its actions, as learning needs, instead of taking the likeliest.
    """

    def __init__(self, path: str | None, limits: Limits, batch_size: int, window_seconds: float, seed: int) -> None:
        """UserError where the policy cannot be read or does not fit."""
        weights, specification = load_policy(path)
        self.model = PPO(
            "MlpPolicy",
            DummyVecEnv([TuningEnvironment]),  # for its spaces only
            learning_rate=ONLINE_RATE,
            n_steps=ONLINE_ROLLOUT,
            batch_size=ONLINE_ROLLOUT,
            n_epochs=4,
            gamma=DISCOUNT,
            policy_kwargs={"net_arch": list(specification.hidden)},
            seed=seed,
            device="cpu",
        )
        try:
            self.model.policy.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"control.policy {path} holds other layers than its specification says") from error
        self.model.set_logger(silent())
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
