"""Learned policies: the file that holds one, and the controller that follows it without the library that trained it.

A file is safetensors: the weights of actor and critic under the names that stable-baselines3 gives them, and in its
metadata, as JSON, the specification of the environment that it learned in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hetsync.control.actions import CHOICES, KEEP, TUNED, Actions, Limits, described
from hetsync.control.controller import Decision
from hetsync.control.features import FEATURES, VERSION, Features
from hetsync.errors import UserError
from hetsync.files import write_atomically
from hetsync.sync.observation import Observation

GENERAL = "general.safetensors"
SPECIFICATION = "hetsync_policy"
WORDS = ("down", "kept", "up")
SURE = 0.7  # probability from which a change is worth what every change costs

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Specification:
    """What a policy learned from, and how.

    Args:
        hidden: Widths of the hidden layers, of actor and critic alike; tanh follows each.
        limits: Ladders' bounds while it learned.
        reward: Name of the reward.
        command: What made the file.
        seed: Of everything drawn.
        steps: Decisions that it learned from.
        learning_curve: (decisions so far, mean return of the episodes since the last entry).
        features: Names of the inputs, in order.
        features_version: Version of these.
    """

    hidden: tuple[int, ...]
    limits: Limits
    reward: str
    command: str
    seed: int
    steps: int
    learning_curve: tuple[tuple[int, float], ...]
    features: tuple[str, ...] = FEATURES
    features_version: int = VERSION


def _limits(told: dict[str, Any]) -> Limits:
    """Policies written by 0.1.0 before its release call them least and greatest."""
    now = {"least": "min", "greatest": "max"}
    words = {key: key.partition("_") for key in told}
    return Limits(**{f"{now.get(first, first)}_{rest}": told[key] for key, (first, _, rest) in words.items()})


class PolicyNetwork(torch.nn.Module):
    """The actor alone: features (F,) to logits (T, 3), for each of `TUNED`."""

    def __init__(self, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = (len(FEATURES), *hidden)
        layers: list[torch.nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [torch.nn.Linear(inner, outer), torch.nn.Tanh()]
        self.hidden = torch.nn.Sequential(*layers)
        self.actions = torch.nn.Linear(widths[-1], len(TUNED) * len(CHOICES))

    @torch.no_grad()
    def forward(self, features_F: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.actions(self.hidden(features_F))
        return logits.view(len(TUNED), len(CHOICES))

    def load(self, weights: Weights) -> None:
        """From a file's weights. RuntimeError where shapes or names differ."""
        ours = {
            name.replace("hidden.", "mlp_extractor.policy_net.").replace("actions.", "action_net."): name
            for name in self.state_dict()
        }
        self.load_state_dict({ours[name]: tensor for name, tensor in weights.items() if name in ours})


class PolicyController:
    """Does what the network finds likeliest, changes only where it is sure of them."""

    def __init__(self, network: PolicyNetwork, limits: Limits, batch_size: int, sure: float = SURE) -> None:
        """`sure` is the least probability of a change."""
        self._network = network
        self._sure = sure
        self._actions = Actions(limits)
        self._features = Features(batch_size)

    def decide(self, seen: Observation) -> Decision:
        features = torch.from_numpy(self._features.of(seen))
        return chosen(self._network(features), seen, self._actions, self._sure)


def chosen(logits: torch.Tensor, seen: Observation, actions: Actions, sure: float) -> Decision:
    """The likeliest actions, with their probabilities as the reason."""
    likeliest, picks = logits.softmax(1).max(1)
    taken = picks.where(likeliest >= sure, KEEP).tolist()
    settings = actions.apply(seen.settings, taken)
    parts = zip(TUNED.values(), taken, picks.tolist(), likeliest.tolist(), strict=True)
    words = ", ".join(f"{name} {WORDS[do]} ({WORDS[pick]} p {p:.2f})" for name, do, pick, p in parts)
    return Decision(settings, f"{words}: {described(settings)}")


def untrained(limits: Limits, batch_size: int, seed: int, hidden: tuple[int, ...] = (64, 64)) -> PolicyController:
    """A policy that has learned nothing and never will."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PolicyNetwork(hidden)
    return PolicyController(network, limits, batch_size, sure=0.0)


def save_policy(path: Path, weights: Weights, specification: Specification) -> None:
    """Write the file, all of it or nothing. UserError where that fails."""
    metadata = {SPECIFICATION: json.dumps(asdict(specification))}
    content = save({name: tensor.contiguous() for name, tensor in weights.items()}, metadata)
    write_atomically(path, content, "choose another --output")


def load_policy(path: str | None) -> tuple[Weights, Specification]:
    """The policy in a file; None is the one that comes along. UserError where it cannot be read or does not fit."""
    with resources.as_file(resources.files("hetsync.control") / "policies" / GENERAL) as general:
        file = general if path is None else Path(path)
        if not file.is_file():
            raise UserError(f"control.policy {file} does not exist: make one by hetsync control train --output {file}")
        try:
            with safe_open(file, framework="pt") as opened:
                told = json.loads((opened.metadata() or {})[SPECIFICATION])
                weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, no mapping
            if not all(tensor.isfinite().all() for tensor in weights.values()):
                raise ValueError("its weights are not finite")
            fields: dict[str, Any] = {key: _tuples(value) for key, value in told.items()}
            specification = Specification(**{**fields, "limits": _limits(told["limits"])})
        except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"control.policy {file} is no policy of HetSync ({error}): give what hetsync control train has written"
            ) from error
    if specification.features_version != VERSION or specification.features != FEATURES:
        raise UserError(
            f"control.policy {file} knows version {specification.features_version} of what controllers see, this"
            f" HetSync version {VERSION}: train it anew by hetsync control train --output {file}"
        )
    return weights, specification


def load_network(path: str | None) -> PolicyNetwork:
    """The actor in a file."""
    weights, specification = load_policy(path)
    try:
        network = PolicyNetwork(specification.hidden)
        network.load(weights)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"control.policy {path} holds other layers than its specification says: train it anew"
        ) from error
    return network


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
