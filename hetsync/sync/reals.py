"""Complex tensors (weights of Fourier layers) as pairs of real values: all that is summed is real."""

from __future__ import annotations

import torch

from hetsync.sync.layout import laid_out_like


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with a last dimension of real and imaginary parts; a real tensor itself. Of a view that is
    conjugate by name only, which weights and their states are not, a copy."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def count_reals(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def as_of(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Real values as `reals` has them, of the tensor's own kind and type, and in its order in memory."""
    own = (torch.view_as_complex(values.contiguous()) if tensor.is_complex() else values).to(tensor.dtype)
    return laid_out_like(own, tensor)
