"""Tensors as safetensors keeps them, which knows no complex128: as pairs of float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hetsync.sync.reals import reals


def paired(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of those that are kept as pairs."""
    return [name for name, tensor in tensors.items() if tensor.dtype is torch.complex128]


def storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU that share no memory."""
    pairs = set(paired(tensors))
    values = {name: reals(tensor.detach()) if name in pairs else tensor.detach() for name, tensor in tensors.items()}
    return {name: each.cpu().contiguous().clone() for name, each in values.items()}


def restored(stored: Mapping[str, torch.Tensor], pairs: Iterable[str]) -> dict[str, torch.Tensor]:
    """What `storable` was given, whose `paired` are these. KeyError: there is no such pair.

    Copied, since files are read into memory that may not be aligned for complex128: a view of it crashes PyTorch.
    """
    return {**stored, **{name: torch.complex(*stored[name].unbind(-1)) for name in pairs}}
