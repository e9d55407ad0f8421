"""Tensors as they are summed: complex ones (weights of Fourier layers) as pairs of real values, in float32, or in
float64 where that is a tensor's own precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetsync.plane.base import Allocate
from hetsync.sync.layout import laid_out_like


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with a last dimension of real and imaginary parts; a real tensor itself. Of a view that is
    conjugate by name only, which weights and their states are not, a copy."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def count_reals(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def summed_in(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The type of flat memory that holds all of them, and their sums."""
    double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if double else torch.float32


def allocated(allocate: Allocate, count: int, tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """So many values of that type, flat and not cleared."""
    dtype = summed_in(tensors)
    return allocate(count * dtype.itemsize // 4, device).view(dtype)


def as_of(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Real values as `reals` has them, of the tensor's own kind and type, and in its order in memory."""
    own = (torch.view_as_complex(values.contiguous()) if tensor.is_complex() else values).to(tensor.dtype)
    return laid_out_like(own, tensor)
