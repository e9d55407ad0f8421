"""Small nets with statistics of batches, which are spoiled with gradients, and are not of one sample."""

from __future__ import annotations

import torch
from torch import nn


class NormedNet(nn.Module):
    """(N, 4) to (N, 2); the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(points)
        return scores


class NormedDigits(nn.Sequential):
    """(N, 1, 8, 8) to (N, 10)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))
