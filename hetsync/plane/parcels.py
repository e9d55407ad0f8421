"""What travels through channels: a header, and the bytes of each tensor that has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetsync.plane import codec


def packed(note: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of the header, and of each tensor; those of contiguous CPU tensors where they are."""
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    header = torch.frombuffer(bytearray(codec.dumps((note, shapes))), dtype=torch.uint8)
    return [header, *(_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors if tensor.numel())]


def empty_parcel(header: torch.Tensor) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """Of a header: its note, tensors as they were sent but for their values, and the bytes to be filled, in order."""
    note, shapes = codec.loads(bytes(header.numpy()))
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
    return note, tensors, [_bytes(tensor) for tensor in tensors if tensor.numel()]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
