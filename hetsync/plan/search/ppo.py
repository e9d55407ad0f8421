"""Proximal policy optimisation (Schulman et al. 2017) of a policy that improves assignments.

The action is a device for every group, and a pace. Their probabilities multiply; each one's ratio is clipped by itself,
as the product of 64 would leave the trust region at once. All share the step's advantage.

Groups that follow each other mostly belong together, and one alone on another device costs two transfers, or is
forbidden by the order of stages. So where a group moves, the next one to be decided is likely to move along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hetsync.plan.search.features import Floats, Indices
from hetsync.plan.search.masks import Masks
from hetsync.plan.search.placement_policy import PlacementPolicy, staying

CLIP = 0.2
EPOCHS = 4
ENTROPY = 0.01
VALUE = 0.5
DISCOUNT = 0.95
LEARNING_RATE = 3e-3
MOST_NORM = 1.0
LEAST_SPREAD = 0.01  # of advantages: what is less is noise
FORBIDDEN = -1e9  # logit of what may not be chosen
ALONG = 3.0  # times as likely as not, a group moves along with the one before: runs are four groups long, on average


@dataclass(frozen=True)
class Inputs:
    """Of the policy: N assignments."""

    groups: torch.Tensor
    joined: torch.Tensor
    devices: torch.Tensor
    pairs: torch.Tensor
    paces: torch.Tensor

    @cached_property
    def distinct(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first row of each kind, and which of these each row is like: most episodes stand at the same plan."""
        places: dict[bytes, int] = {}
        first: list[int] = []
        like: list[int] = []
        for row, figures in enumerate(zip(self.devices, self.pairs, self.paces, strict=True)):
            key = b"".join(each.numpy().tobytes() for each in figures)
            if key not in places:
                places[key] = len(first)
                first.append(row)
            like.append(places[key])
        return torch.tensor(first), torch.tensor(like)


@dataclass(frozen=True)
class Step:
    """N decisions. `given` (N, G, D): logits besides the policy's, of what was forbidden, and of moving along;
    `log_probabilities` (N, G + 1), the pace's last."""

    inputs: Inputs
    given: torch.Tensor
    devices: torch.Tensor
    paces: torch.Tensor
    log_probabilities: torch.Tensor
    values: torch.Tensor


class Ppo:
    """A policy, and what makes it better."""

    def __init__(self, policy: PlacementPolicy, random: np.random.Generator) -> None:
        self.policy, self._random = policy, random
        self._optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)

    @torch.no_grad()
    def decide(self, inputs: Inputs, masks: Masks, devices: Indices, backwards: bool) -> Step:
        """Sampled devices and paces. Groups are decided in their order or backwards, each as masks then allow."""
        logits_NGD, pace_logits_NK, values_N = self._outputs(inputs)
        paces = self._sampled(pace_logits_NK.numpy())
        given_NGD = np.zeros(logits_NGD.shape, np.float32)
        along, rows, devices = math.log(ALONG) + staying(*logits_NGD.shape[1:]), np.arange(len(devices)), devices.copy()
        moved_N, before_N = np.zeros(len(rows), dtype=bool), devices[:, 0]
        groups = range(devices.shape[1])
        for group in reversed(groups) if backwards else groups:
            given_NGD[rows[moved_N], group, before_N[moved_N]] = along
            given_NGD[:, group][~masks.allowed(group)] = FORBIDDEN
            before_N = self._sampled(logits_NGD[:, group].numpy() + given_NGD[:, group])
            moved_N = before_N != devices[:, group]
            devices[:, group] = before_N
            masks.put(group, before_N)
        step = (torch.from_numpy(given_NGD), torch.from_numpy(devices), torch.from_numpy(paces))
        log_probabilities, _ = _chosen(logits_NGD, pace_logits_NK, *step)
        return Step(inputs, *step, log_probabilities, values_N)

    def learn(self, steps: Sequence[Step], rewards: npt.NDArray[np.float32]) -> None:
        """From episodes of `steps` with rewards (steps, N)."""
        returns = np.zeros_like(rewards)
        following = np.zeros(rewards.shape[1], np.float32)
        for index in reversed(range(len(steps))):
            following = rewards[index] + DISCOUNT * following
            returns[index] = following
        returns_T = torch.from_numpy(returns)
        advantages_T = returns_T - torch.stack([step.values for step in steps])
        advantages_T = advantages_T / (advantages_T.std() + LEAST_SPREAD)
        step = _together(steps)
        for _ in range(EPOCHS):
            self._optimizer.zero_grad()
            self._loss(step, returns_T.flatten(), advantages_T.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MOST_NORM)
            self._optimizer.step()

    def _loss(self, step: Step, returned: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        logits_NGD, pace_logits_NK, values_N = self._outputs(step.inputs)
        log_probabilities, entropy = _chosen(logits_NGD, pace_logits_NK, step.given, step.devices, step.paces)
        ratio = (log_probabilities - step.log_probabilities).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).sum(1).mean()
        return -gain - ENTROPY * entropy + VALUE * (values_N - returned).square().mean()

    def _outputs(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, like = inputs.distinct
        logits, pace_logits, values = self.policy(
            inputs.groups, inputs.joined, inputs.devices[first], inputs.pairs[first], inputs.paces[first]
        )
        return logits[like], pace_logits[like], values[like]

    def _sampled(self, logits: Floats) -> Indices:
        """One a row (Gumbel's trick)."""
        chosen: Indices = (logits + self._random.gumbel(size=logits.shape)).argmax(1)
        return chosen


def _together(steps: Sequence[Step]) -> Step:
    first = steps[0].inputs
    inputs = Inputs(
        first.groups,
        first.joined,
        torch.cat([step.inputs.devices for step in steps]),
        torch.cat([step.inputs.pairs for step in steps]),
        torch.cat([step.inputs.paces for step in steps]),
    )
    return Step(
        inputs,
        torch.cat([step.given for step in steps]),
        torch.cat([step.devices for step in steps]),
        torch.cat([step.paces for step in steps]),
        torch.cat([step.log_probabilities for step in steps]),
        torch.cat([step.values for step in steps]),
    )


def _chosen(
    logits_NGD: torch.Tensor,
    pace_logits_NK: torch.Tensor,
    given: torch.Tensor,
    devices: torch.Tensor,
    paces: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (N, G + 1) of what was chosen, and the mean entropy."""
    groups = (logits_NGD + given).log_softmax(2)
    pace = pace_logits_NK.log_softmax(1)
    entropy = -(groups.exp() * groups).sum(2).mean() - (pace.exp() * pace).sum(1).mean()
    both = [groups.gather(2, devices[:, :, None]).squeeze(2), pace.gather(1, paces[:, None])]
    return torch.cat(both, 1), entropy
