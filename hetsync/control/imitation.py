"""Learning from an adviser's example, before learning from rewards.

Data set aggregation (Ross et al. 2011, "A reduction of imitation learning and structured prediction to no-regret
online learning"): first the adviser acts and the policy looks on; then the policy acts, and is told what the adviser
would have done where that has led it. It learns from all of that at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv

ROUNDS = 5  # of the first, the adviser's
TRIES = 0.15  # of what is done in it: any action, so that its mistakes are seen put right
EPOCHS = 60  # of all that is known, in each round
BATCH = 256
LEARNING_RATE = 1e-3

Say = Callable[[str], None]


def imitate(model: PPO, environments: VecEnv, decisions: int, seed: int, say: Say) -> int:
    """Returns the decisions that it took: at least as many as asked for. `environments` advise in their `info`."""
    dice = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    seen: list[np.ndarray] = []
    advised: list[np.ndarray] = []
    environments.seed(seed)
    vectors: Any = environments.reset()
    advice = _advice(environments.reset_infos)
    for number in range(ROUNDS):
        for _ in range(-(-decisions // (ROUNDS * environments.num_envs))):
            seen.append(vectors)
            advised.append(advice)
            actions = model.predict(vectors)[0] if number else advice
            tries = dice.random(len(advice)) < TRIES
            actions = np.where(tries[:, None], dice.integers(3, size=advice.shape), actions)
            vectors, _, dones, infos = environments.step(actions)
            starts = environments.reset_infos
            advice = _advice([start if done else info for done, start, info in zip(dones, starts, infos, strict=True)])
        agreement = _fit(model, np.concatenate(seen), np.concatenate(advised), generator)
        say(f"{len(seen) * len(advice):,} decisions of the adviser: {agreement:.1%} of them are the policy's likeliest")
    return len(seen) * environments.num_envs


def _advice(infos: list[dict[str, Any]]) -> np.ndarray:
    return np.array([info["advice"] for info in infos])


def _fit(model: PPO, seen: np.ndarray, advised: np.ndarray, generator: torch.Generator) -> float:
    """Raise the likelihood of what was advised (N, 2) for what was seen (N, F); returns how often it is likeliest."""
    inputs, actions = torch.from_numpy(seen), torch.from_numpy(advised)
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
