"""TAPP (Mao et al. 2021): a partition network cuts the model into consecutive groups, an allocation network gives each
a device, and one policy gradient improves both.

The paper's reward is the measured time of a batch; here it is the evaluator's. The problem's groups are its layers, in
their order. Untrained, the partition has groups of about equal time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hetsync.plan.search.features import Features
from hetsync.plan.search.reinforce import Placer, PolicyGradient, sampled, start_even

HIDDEN = 64  # of the partition network
SHARPNESS = 1.0  # by which an untrained partition draws a layer to the group at its place in time


class Tapp(PolicyGradient):
    """By time."""

    learning_rate = 1e-2

    def networks(self, features: Features) -> Iterable[nn.Parameter]:
        seconds_G = torch.from_numpy(features.seconds).float()
        middles_G1 = (seconds_G.cumsum(0) - seconds_G / 2)[:, None]
        self._layers_GF = torch.cat([torch.from_numpy(features.groups), middles_G1, seconds_G[:, None]], 1)
        layers, width = self._layers_GF.shape
        self.require_group_each()
        stages = min(features.count, layers)
        self._untrained_GS = -SHARPNESS * (middles_G1 * stages - torch.arange(stages) - 0.5).square()
        last = nn.Linear(HIDDEN, stages)
        start_even(last)
        self._partition = nn.Sequential(nn.Linear(width, HIDDEN), nn.Tanh(), last)
        self._allocation = Placer(2 * (width + 1), features.count, self.width)
        return [*self._partition.parameters(), *self._allocation.parameters()]

    def sample(self, allowed_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups_NG, cut_N = self._cut(allowed_ND.sum(1))
        devices_NS, placed_NS = self._allocation.place(self._vectors(groups_NG), allowed_ND, self.random, once=True)
        there_NS = torch.arange(devices_NS.shape[1]) <= groups_NG[:, -1:]
        return devices_NS.gather(1, groups_NG), cut_N + (placed_NS * there_NS).sum(1)

    def _cut(self, devices_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Groups (N, G) of the layers, no more than devices, and log-probabilities (N,). A layer is in the group of the
        one before or in the next one; where all devices must be used, in time to have as many."""
        logits_GS = self._partition(self._layers_GF) + self._untrained_GS
        layers, stages = logits_GS.shape
        most_N = devices_N.clamp(max=stages)
        least_N = most_N if self.problem.every_rank else torch.zeros_like(most_N)
        group_N, log_probabilities_N = torch.zeros_like(devices_N), torch.zeros(len(devices_N))
        groups, places = [group_N], torch.arange(stages)
        for layer in range(1, layers):
            next_N = group_N + 1
            late_N = least_N - next_N >= layers - layer  # every layer that is left must begin a group
            stay = (places == group_N[:, None]) & ~late_N[:, None]
            begin = (places == next_N[:, None]) & (next_N < most_N)[:, None]
            group_N, chosen_N = sampled(
                logits_GS[layer].expand(len(devices_N), -1).masked_fill(~(stay | begin), -1e9), self.random
            )
            log_probabilities_N = log_probabilities_N + chosen_N
            groups.append(group_N)
        return torch.stack(groups, 1), log_probabilities_N

    def _vectors(self, groups_NG: torch.Tensor) -> torch.Tensor:
        """Of groups (N, S, F): means over layers, how many these are, and the same of the next group."""
        on_NSG = nn.functional.one_hot(groups_NG, self._untrained_GS.shape[1]).float().transpose(1, 2)
        counts_NS1 = on_NSG.sum(2, keepdim=True)
        own_NSF = torch.cat([on_NSG @ self._layers_GF / counts_NS1.clamp(min=1), counts_NS1.log1p()], 2)
        next_NSF = torch.cat([own_NSF[:, 1:], torch.zeros_like(own_NSF[:, :1])], 1)
        return torch.cat([own_NSF, next_NSF], 2)
