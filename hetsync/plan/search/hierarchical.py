"""Hierarchical placement (Mirhoseini et al. 2018), as Trinity's paper compares it.

A grouper gives each of the problem's groups, here its operations, a group of its own making; a placer gives each of
these a device. What that comes to is repaired where stages would wait for each other (`acyclic`): the paper's runtime
had no stages, and without that hardly a sample would run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hetsync.plan.search.conversation import Conversation
from hetsync.plan.search.features import Features
from hetsync.plan.search.reinforce import Placer, PolicyGradient, of_allowed, sampled
from hetsync.plan.search.search import Scored

HIDDEN = 64  # of the grouper
MOST_GROUPS = 32  # of its making


class Hierarchical(PolicyGradient):
    """On time alone."""

    def networks(self, features: Features) -> Iterable[nn.Parameter]:
        self._joined_GG = torch.from_numpy(features.joined)
        self._operations_GF = torch.cat([torch.from_numpy(features.groups), self._joined_GG + self._joined_GG.T], 1)
        operations, width = self._operations_GF.shape
        groups = min(operations, MOST_GROUPS)
        self._groups = groups
        self._grouper = nn.Sequential(nn.Linear(width, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, groups))
        self._placer = Placer(width + groups + 1, features.count, self.width)
        return [*self._grouper.parameters(), *self._placer.parameters()]

    def sample(self, allowed_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NGH = self._grouper(self._operations_GF).expand(len(allowed_ND), -1, -1)
        groups_NG, grouped_NG = sampled(logits_NGH, self.random)
        even_NHD = of_allowed(allowed_ND)[:, None].expand(-1, self._groups, -1)
        devices_NH, placed_NH = self._placer.place(self._vectors(groups_NG), even_NHD, self.random, once=False)
        return devices_NH.gather(1, groups_NG), grouped_NG.sum(1) + placed_NH.sum(1)

    def _vectors(self, groups_NG: torch.Tensor) -> torch.Tensor:
        """Of the grouper's groups (N, H, F): means over operations, ways to other groups, and how many they are."""
        on_NHG = nn.functional.one_hot(groups_NG, self._groups).float().transpose(1, 2)
        counts_NH1 = on_NHG.sum(2, keepdim=True)
        means_NHF = on_NHG @ self._operations_GF / counts_NH1.clamp(min=1)
        between_NHH = on_NHG @ self._joined_GG @ on_NHG.transpose(1, 2)
        return torch.cat([means_NHF, between_NHH.log1p(), counts_NH1.log1p()], 2)


class HierarchicalMulti(Hierarchical):
    """The same on the objective of time, bytes and memory."""

    def cost(self, scored: Scored) -> float:
        return Conversation.cost(self, scored)
