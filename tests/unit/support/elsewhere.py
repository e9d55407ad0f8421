"""Tensors that say of themselves that they are on a GPU, and compute here."""

from __future__ import annotations

from typing import Any

import torch


class OnMps(torch.Tensor):
    """On an Apple GPU, which has no float64, and whose memory no library of sums reads."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("mps", 0)

    def cpu(self, *words: Any, **keys: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def double(self, *words: Any, **keys: Any) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    def data_ptr(self) -> int:
        raise RuntimeError("the library reads a GPU's memory")


class OnCuda(torch.Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def on(kind: type[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    return values.clone().as_subclass(kind)
