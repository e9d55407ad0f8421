"""A model whose predictions are given."""

from __future__ import annotations

from typing import Any

import torch


class Told(torch.nn.Module):
    def __init__(self, predicted: torch.Tensor) -> None:
        super().__init__()
        self.predicted = predicted

    def forward(self, batch: Any, *others: Any) -> torch.Tensor:
        return self.predicted
