"""TAPP (Mao et al. 2021): a partition network cuts the model into consecutive groups, an allocation network gives each
a device, and one policy gradient improves both.

The paper's reward is the measured time of a batch; here it is the evaluator's. The problem's groups are its layers, in
their order. Untrained, the partition has groups of about the sizes that suit the devices, the fastest's first, as the
first stages have the most micro-batches in flight; the allocation gives a group to a device whose speed suits its size;
and many micro-batches are likelier than few, since pipelines are mostly fastest by these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from hetsync.plan.search.features import Features, Floats, Indices
from hetsync.plan.search.reinforce import FORBIDDEN, Placer, PolicyGradient, log_probabilities, of_allowed, start_even

HIDDEN = 64  # of the partition network
LEAST = 1e-4  # part of all time, or of all speeds, that is told apart from less
SHARPNESS = 3.0  # by which an untrained partition draws a layer to the group at its place in time
MANY = 1.0  # logit for each doubling of the micro-batches
FIT = 6.0  # by which an untrained allocation draws a group to devices of its part of all speeds


class Tapp(PolicyGradient):
    """By time."""

    learning_rate = 3e-2  # 300 evaluations are 18 updates, each of which moves a weight by no more than the rate
    number_rate = 0.2

    def networks(self, features: Features) -> Iterable[nn.Parameter]:
        seconds_G = torch.from_numpy(features.seconds).float()
        middles_G1 = (seconds_G.cumsum(0) - seconds_G / 2)[:, None]
        self._layers_GF = torch.cat([torch.from_numpy(features.groups), middles_G1, seconds_G[:, None]], 1)
        layers, width = self._layers_GF.shape
        self.require_group_each()
        stages = min(features.count, layers)
        speeds_RD = 1 / features.step_seconds
        self._parts_RD = torch.from_numpy(speeds_RD / speeds_RD.sum(1, keepdims=True)).float()
        self._untrained_RGS = _untrained(middles_G1[:, 0].numpy(), self._parts_RD.numpy(), stages)
        last = nn.Linear(HIDDEN, stages)
        start_even(last)
        with torch.no_grad():
            self.number.add_(MANY * torch.tensor(self.numbers).log2())
        self._partition = nn.Sequential(nn.Linear(width, HIDDEN), nn.Tanh(), last)
        self._allocation = Placer(2 * (width + 1), features.count, self.width)
        return [*self._partition.parameters(), *self._allocation.parameters()]

    def sample(self, allowed_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups_NG, cut_N = self._cut(allowed_ND.sum(1))
        vectors_NSF, fit_NSD = self._vectors(groups_NG), self._fit(groups_NG) + of_allowed(allowed_ND)[:, None]
        devices_NS, placed_NS = self._allocation.place(vectors_NSF, fit_NSD, self.random, once=True)
        there_NS = torch.arange(devices_NS.shape[1]) <= groups_NG[:, -1:]
        return devices_NS.gather(1, groups_NG), cut_N + (placed_NS * there_NS).sum(1)

    def _cut(self, devices_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Groups (N, G) of the layers, no more than devices, and log-probabilities (N,). A layer is in the group of the
        one before or in the next one; where all devices must be used, in time to have as many."""
        samples = len(devices_N) // len(self._untrained_RGS)
        logits_NGS = self._partition(self._layers_GF) + self._untrained_RGS.repeat(samples, 1, 1)
        _, layers, stages = logits_NGS.shape
        most_N = devices_N.clamp(max=stages)
        least_N = most_N if self.problem.every_rank else torch.zeros_like(most_N)
        groups_NG = torch.from_numpy(self._drawn(logits_NGS.detach().numpy(), most_N.numpy(), least_N.numpy()))
        own_NG1, places = groups_NG[:, :-1, None], torch.arange(stages)
        late_NG1 = _late(own_NG1, least_N[:, None, None], torch.arange(layers - 1, 0, -1)[:, None])
        stay_NGS = (places == own_NG1) & ~late_NG1
        begin_NGS = (places == own_NG1 + 1) & (own_NG1 + 1 < most_N[:, None, None])
        allowed_NGS = logits_NGS[:, 1:].masked_fill(~(stay_NGS | begin_NGS), FORBIDDEN)
        return groups_NG, log_probabilities(allowed_NGS, groups_NG[:, 1:]).sum(1)

    def _drawn(self, logits_NGS: Floats, most_N: Indices, least_N: Indices) -> Indices:
        """The groups, layer after layer, by Gumbel's trick."""
        _, layers, stages = logits_NGS.shape
        noise_GNS = self.random.gumbel(size=(layers - 1, len(most_N), stages)).astype(np.float32)
        rows, group_N = np.arange(len(most_N)), np.zeros_like(most_N)
        groups = [group_N]
        for left, scores_NS in zip(range(layers - 1, 0, -1), logits_NGS.swapaxes(0, 1)[1:] + noise_GNS, strict=True):
            next_N = group_N + 1
            wants_N = scores_NS[rows, np.minimum(next_N, stages - 1)] > scores_NS[rows, group_N]
            begins_N = (next_N < most_N) & (wants_N | _late(group_N, least_N, left))
            group_N = group_N + begins_N
            groups.append(group_N)
        return np.stack(groups, 1)

    def _vectors(self, groups_NG: torch.Tensor) -> torch.Tensor:
        """Of groups (N, S, F): means over layers, how many these are, and the same of the next group."""
        on_NSG = self._on(groups_NG)
        counts_NS1 = on_NSG.sum(2, keepdim=True)
        own_NSF = torch.cat([on_NSG @ self._layers_GF / counts_NS1.clamp(min=1), counts_NS1.log1p()], 2)
        next_NSF = torch.cat([own_NSF[:, 1:], torch.zeros_like(own_NSF[:, :1])], 1)
        return torch.cat([own_NSF, next_NSF], 2)

    def _fit(self, groups_NG: torch.Tensor) -> torch.Tensor:
        """Logits (N, S, D): highest where a group has the part of all time that a device has of all speeds."""
        seconds_NS = self._on(groups_NG) @ self._layers_GF[:, -1]
        parts_ND = self._parts_RD.repeat(len(groups_NG) // len(self._parts_RD), 1)
        return -FIT * (seconds_NS.clamp(min=LEAST)[:, :, None] / parts_ND.clamp(min=LEAST)[:, None]).log().square()

    def _on(self, groups_NG: torch.Tensor) -> torch.Tensor:
        """(N, S, G): 1 where a layer is in a group."""
        return nn.functional.one_hot(groups_NG, self._untrained_RGS.shape[2]).float().transpose(1, 2)


def _untrained(middles_G: Floats, parts_RD: Floats, stages: int) -> torch.Tensor:
    """Logits (R, G, S): highest in the group at a layer's place, where groups have devices' parts of all time, the
    fastest's first."""
    ends_RS = np.cumsum(-np.sort(-parts_RD, 1)[:, :stages], 1)
    ends_RS /= ends_RS[:, -1:]
    places_RG = np.array([np.interp(middles_G, [0.0, *ends_S], np.arange(stages + 1)) for ends_S in ends_RS])
    away_RGS: Floats = places_RG[:, :, None] - np.arange(stages) - 0.5
    return torch.from_numpy(-SHARPNESS * away_RGS**2).float()


def _late(group: Any, least: Any, left: Any) -> Any:
    """Whether every layer that is left must begin a group, so that there are `least`."""
    return least - (group + 1) >= left
