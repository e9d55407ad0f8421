"""The order in which a tensor's values lie in memory (channels_last, transposed)."""

from __future__ import annotations

import torch


def laid_out_like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The same values, lying as the tensor's do. Fused optimizers take that for granted of gradients and states: on
    CPUs they go through memory without a look at strides, and other weights than were meant take the steps."""
    if values.shape != tensor.shape or values.stride() == tensor.stride():
        return values
    return torch.empty_like(tensor, dtype=values.dtype, device=values.device).copy_(values)
