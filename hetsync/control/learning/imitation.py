"""Learning from an expert's example, before learning from rewards.

Data set aggregation (Ross et al. 2011, "A reduction of imitation learning and structured prediction to no-regret
online learning"): first the expert acts and the policy watches; then the policy acts, and is told what the expert
would have done where that has led it. It learns from all of that at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv

from hetsync.control.actions import CHOICES

ROUNDS = 5  # the first is the expert's
TRIES = 0.15  # of what is done in it: any action, so that its mistakes are seen put right
EPOCHS = 60  # of all that is known, in each round
BATCH = 256
LEARNING_RATE = 1e-3

Say = Callable[[str], None]


def imitate(model: PPO, environments: VecEnv, decisions: int, seed: int, say: Say) -> int:
    """Returns the decisions that it took: at least as many as asked for. `environments` tell the `expert_action`."""
    dice = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    seen: list[np.ndarray] = []
    shown: list[np.ndarray] = []
    environments.seed(seed)
    vectors: Any = environments.reset()
    expert = _expert_actions(environments.reset_infos)
    for number in range(ROUNDS):
        for _ in range(-(-decisions // (ROUNDS * environments.num_envs))):
            seen.append(vectors)
            shown.append(expert)
            actions = model.predict(vectors)[0] if number else expert
            tries = dice.random(len(expert)) < TRIES
            actions = np.where(tries[:, None], dice.integers(len(CHOICES), size=expert.shape), actions)
            vectors, _, dones, infos = environments.step(actions)
            starts = environments.reset_infos
            expert = _expert_actions(
                [start if done else info for done, start, info in zip(dones, starts, infos, strict=True)]
            )
        agreement = _fit(model, np.concatenate(seen), np.concatenate(shown), generator)
        say(f"{len(seen) * len(expert):,} decisions of the expert: {agreement:.1%} of them are the policy's likeliest")
    return len(seen) * environments.num_envs


def _expert_actions(infos: list[dict[str, Any]]) -> np.ndarray:
    return np.array([info["expert_action"] for info in infos])


def _fit(model: PPO, seen: np.ndarray, shown: np.ndarray, generator: torch.Generator) -> float:
    """Raise the likelihood of what was shown (N, T) for what was seen (N, F); returns how often it is likeliest."""
    inputs, actions = torch.from_numpy(seen), torch.from_numpy(shown)
    policy = model.policy
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(inputs), generator=generator).split(BATCH):
            _, likelihood, _ = policy.evaluate_actions(inputs[indices], actions[indices])
            optimizer.zero_grad()
            (-likelihood.mean()).backward()
            optimizer.step()
    with torch.no_grad():
        likeliest = policy.get_distribution(inputs).mode()
    return float((likeliest == actions).all(1).float().mean())
