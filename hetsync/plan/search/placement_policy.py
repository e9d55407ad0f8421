"""The network of a policy that improves assignments: for every group, how likely each device is."""

from __future__ import annotations

import math

import torch
from torch import nn

from hetsync.plan.search.features import DEVICES, GROUPS, PAIRS

WIDTH = 64
LAYERS = 2  # of neighbours' means
PACES = ("micro_batches", "all_in_flight", "here")
BESIDE = [PAIRS.index("needs_here"), PAIRS.index("needed_here")]
MOVES = 1.0  # runs of groups that an untrained policy moves to wherever, on average
NEAR = 8.0  # times as likely as a move to the device of a neighbour, a group at a border stays

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PlacementPolicy(nn.Module):
    """Groups by a graph network, each pair of group and device by a layer over both and what is between them.

    Untrained, it leaves most groups where they are; those that move do so in runs (`ppo.py`), and mostly to where a
    neighbour is, as anywhere else they would need two links.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.group = nn.Linear(len(GROUPS), width)
        self.neighbours = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(LAYERS))
        self.of_group = nn.Linear(width, width)
        self.of_device = nn.Linear(len(DEVICES), width)
        self.of_pair = nn.Linear(len(PAIRS), width)
        self.choice = nn.Linear(width, 1)
        self.pace = nn.Sequential(nn.Linear(width + len(PACES), width), nn.Tanh(), nn.Linear(width, 1))
        self.value = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        for name, parameter in self.named_parameters():
            if name.startswith(("choice", "pace.2", "value.2")):
                nn.init.zeros_(parameter)  # untrained, all are as likely

    def forward(
        self,
        groups_GF: torch.Tensor,
        joined_GG: torch.Tensor,
        devices_NDF: torch.Tensor,
        pairs_NGDF: torch.Tensor,
        paces_NKF: torch.Tensor,
    ) -> Outputs:
        """Logits (N, G, D) of devices, logits (N, K) of paces, and values (N,)."""
        hidden_GW = self._groups(groups_GF, joined_GG)
        hidden_NGDW = (
            self.of_group(hidden_GW)[None, :, None] + self.of_device(devices_NDF)[:, None] + self.of_pair(pairs_NGDF)
        ).tanh()
        here_NGD = pairs_NGDF[..., 0]
        group_count, device_count = here_NGD.shape[1:]
        stay = staying(group_count, device_count)
        near_NGD = pairs_NGDF[..., BESIDE].sum(-1).clamp(max=1) * (1 - here_NGD)
        logits_NGD = self.choice(hidden_NGDW).squeeze(-1) + stay * here_NGD + (stay - math.log(NEAR)) * near_NGD
        pooled_NW = (hidden_NGDW * here_NGD[..., None]).sum((1, 2)) / group_count
        count = paces_NKF.shape[1]
        pace_logits_NK = (
            self.pace(torch.cat([pooled_NW[:, None].expand(-1, count, -1), paces_NKF], 2)).squeeze(-1)
            + math.log(8 * max(count - 1, 1)) * paces_NKF[..., -1]
        )
        return logits_NGD, pace_logits_NK, self.value(pooled_NW).squeeze(-1)

    def _groups(self, groups_GF: torch.Tensor, joined_GG: torch.Tensor) -> torch.Tensor:
        before = joined_GG.T / joined_GG.T.sum(1, keepdim=True).clamp(min=1)
        behind = joined_GG / joined_GG.sum(1, keepdim=True).clamp(min=1)
        hidden: torch.Tensor = self.group(groups_GF).tanh()
        for layer in self.neighbours:
            hidden = hidden + layer(torch.cat([hidden, before @ hidden, behind @ hidden], 1)).tanh()
        return hidden


def staying(groups: int, devices: int) -> float:
    """Logit by which an untrained policy leaves a group where it is."""
    return math.log(max(groups / MOVES - 1, 0.5)) + math.log(max(devices - 1, 1))


def untrained(seed: int) -> PlacementPolicy:
    """One that has learned nothing. The generator of torch stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PlacementPolicy()
