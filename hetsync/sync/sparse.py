"""Sparse tensors (a graph's adjacency matrix), of which torch compares, hashes and keeps nothing, by the dense tensors
that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

COMPRESSED = {  # what names the rows or columns, and what lies there
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo or tensor.layout in COMPRESSED


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values; a dense tensor itself."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in COMPRESSED:
        return [*(indices(tensor) for indices in COMPRESSED[tensor.layout]), tensor.values()]
    return [tensor]


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """What `from_parts` needs beside the parts, as plain values."""
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return {"layout": str(tensor.layout).removeprefix("torch."), "shape": list(tensor.shape), "coalesced": coalesced}


def from_parts(parts: Sequence[torch.Tensor], description: dict[str, Any]) -> torch.Tensor:
    """The sparse tensor again. KeyError, ValueError, RuntimeError: they do not fit."""
    layouts = {str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *COMPRESSED)}
    layout, shape = layouts[description["layout"]], description["shape"]
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=description["coalesced"] or None, check_invariants=True
        )
    outer, inner, values = parts
    return torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=True)


def known_copies(model: nn.Module) -> dict[int, Any]:
    """For deepcopy, which knows no compressed ones: copies of those that modules keep, also in lists."""
    kept = tree_leaves([vars(module) for module in model.modules()])
    return {id(each): each.clone() for each in kept if isinstance(each, torch.Tensor) and each.layout in COMPRESSED}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """As torch.equal."""
    if one.layout is not other.layout or one.shape != other.shape:
        return False
    return all(map(torch.equal, dense_parts(one), dense_parts(other)))
