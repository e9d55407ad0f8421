"""A policy while stable-baselines3's PPO trains it: spaces, network, weights.

Who only follows a policy imports neither that library nor gymnasium.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from hetsync.control.actions import CHOICES, TUNED
from hetsync.control.features import FEATURES, Vector
from hetsync.control.policy_network import Weights

HIDDEN = (64, 64)
DISCOUNT = 0.97


def observation_space() -> spaces.Space[Vector]:
    """`FEATURES`, in order."""
    return spaces.Box(-1.0, 1.0, (len(FEATURES),), np.float32)


def action_space() -> spaces.MultiDiscrete:
    """For each of `TUNED`: a rung down, none, a rung up."""
    return spaces.MultiDiscrete([len(CHOICES)] * len(TUNED))


def new_model(environments: VecEnv, seed: int, hidden: tuple[int, ...] = HIDDEN, **options: Any) -> PPO:
    """An untrained policy for these environments. `options` override PPO's settings."""
    torch.set_num_threads(1)  # the network is small, and its sums shall not depend on the machine
    settings: dict[str, Any] = {"gamma": DISCOUNT, "policy_kwargs": {"net_arch": list(hidden)}, **options}
    model = PPO("MlpPolicy", environments, seed=seed, device="cpu", **settings)
    model.set_logger(Logger(None, []))  # PPO's own would leave a folder in the temporary one
    return model


def weights_of(model: PPO) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.policy.state_dict().items()}
