"""Tensors as safetensors keeps them. It knows no complex128, which are pairs of float64, and nothing sparse: parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hetsync.sync.reals import reals
from hetsync.sync.sparse import dense_parts, described, from_parts, is_sparse


def paired(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of those that are kept as pairs."""
    return [name for name, tensor in _parted(tensors).items() if tensor.dtype is torch.complex128]


def parted(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """What else there is to know of those that are kept in parts, by name."""
    return {name: described(tensor) for name, tensor in tensors.items() if is_sparse(tensor)}


def _parted(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parts of sparse ones have names of their own: `NAME.0`, `NAME.1` and so on."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = dense_parts(tensor)
        found |= {f"{name}.{place}": part for place, part in enumerate(parts)} if is_sparse(tensor) else {name: tensor}
    return found


def storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU, each with memory of its own: the tensor's where that can be, and else a copy."""
    pairs = set(paired(tensors))
    made: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, tensor in _parted(tensors).items():
        value = (reals(tensor.detach()) if name in pairs else tensor.detach()).cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        made[name] = value.clone() if memory in known else value
        known.add(memory)
    return made


def restored(
    stored: Mapping[str, torch.Tensor], pairs: Iterable[str], parts: Mapping[str, dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """What `storable` was given, whose `paired` and `parted` are these. KeyError, RuntimeError: there are no such ones.

    Copied, since files are read into memory that may not be aligned for complex128: a view of it crashes PyTorch.
    """
    found = {**stored, **{name: torch.complex(*stored[name].unbind(-1)) for name in pairs}}
    for name, description in parts.items():
        count = 2 if description["layout"] == "sparse_coo" else 3
        found[name] = from_parts([found.pop(f"{name}.{place}") for place in range(count)], description)
    return found
