"""Wire formats: what a tensor of float32 or float64 looks like between two ranks.

| format | bytes | error of one rounding |
| --- | --- | --- |
| float32 | 4 a value, 8 of float64 | none |
| bfloat16 | 2 a value | at most 2⁻⁸ of the value |
| int8 | 1028 a block of 1024 values, padded | at most 1/254 of the block's largest absolute value |

An int8 block is its float32 scale followed by its 1024 values, so that a shard made of whole blocks is a
contiguous piece of the encoded tensor, and rounding a shard equals rounding that part of the whole. In
every format zeros are encoded as zero bytes. The name float32 says that nothing is rounded: float64 stays float64.

Infinities and nan never come out finite: bfloat16 keeps them, int8 turns their whole block into nan.
"""

from __future__ import annotations

from typing import get_args

import torch

from hetsync.plane.base import PlaneError, Residual, WireFormat

BLOCK = 1024
SCALE_BYTES = 4
# On CPUs int8 works on 1 MiB at a time, in the cache: page faults of whole temporaries cost twice the work.
CPU_BLOCKS = 256
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory outside autograd; raises `PlaneError` unless it is flat, contiguous, and float32 or float64."""
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.dim() != 1 or not tensor.is_contiguous():
        raise PlaneError(
            f"a plane carries flat, contiguous tensors of float32 or float64, not {tuple(tensor.shape)} of"
            f" {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.detach()


def bytes_of(tensor: torch.Tensor, wire: WireFormat) -> int:
    """In which it travels."""
    return tensor.nbytes if wire == "float32" else encoded_bytes(tensor.numel(), wire)


def encoded_bytes(n: int, wire: WireFormat) -> int:
    """Bytes that `encode` makes of n values."""
    if wire == "int8":
        return -(-n // BLOCK) * (BLOCK + SCALE_BYTES)
    return n * _floating(wire).itemsize


def shard_values(n: int, size: int, wire: WireFormat) -> int:
    """Values in each of `size` equal shards that together hold n; the last ones are filled up with zeros."""
    granule = BLOCK if wire == "int8" else 1
    return -(-n // (size * granule)) * granule


def padded(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """The tensor with zeros up to n values; itself if it has n."""
    return tensor if tensor.numel() == n else torch.nn.functional.pad(tensor, (0, n - tensor.numel()))


def encode(tensor: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """A flat tensor as a new uint8 tensor of `encoded_bytes` bytes, on the same device."""
    tensor = flat(tensor)
    if wire == "int8":
        return _encode_blocks(tensor.float())
    return tensor.to(_floating(wire), copy=True).view(torch.uint8)


def decode(data: torch.Tensor, n: int, wire: WireFormat) -> torch.Tensor:
    """The n float32 values that `encode` was given, as far as the format keeps them, in new memory."""
    if data.numel() != encoded_bytes(n, wire):
        raise PlaneError(f"{n} values of {wire} are {encoded_bytes(n, wire)} bytes, not {data.numel()}")
    if wire == "int8":
        return _decode_blocks(data.view(-1, BLOCK + SCALE_BYTES))[:n]
    return data.view(_floating(wire)).to(torch.float32, copy=True)


def round_trip(tensor: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """What the other ranks see of this rank's addend, in new memory and of its type; callers feed its error back."""
    return decode(encode(tensor, wire), tensor.numel(), wire).to(tensor.dtype)


def encode_sum(total: torch.Tensor, wire: WireFormat, residual: Residual | None, first: int = 0) -> torch.Tensor:
    """The sum of a shard that begins at value `first`, encoded; what this rounding takes from it waits in `residual`.

    Changes `total`.
    """
    if residual is None:
        return encode(total, wire)
    if residual.values is not None:
        total += residual.values
    data = encode(total, wire)
    lost = total.sub_(decode(data, total.numel(), wire))
    residual.first, residual.values = first, lost.nan_to_num_(0.0, 0.0, 0.0)  # or one infinity would come back for ever
    return data


def deliver(residual: Residual | None, tensor: torch.Tensor) -> None:
    """Add what is kept to this rank's addend, for a sum that is not rounded; nothing is kept then."""
    if residual is not None and residual.values is not None:
        shard = tensor[residual.first :][: residual.values.numel()]  # shards are filled up beyond the tensor's end
        shard += residual.values[: shard.numel()]
        residual.values = None


def _floating(wire: WireFormat) -> torch.dtype:
    if wire == "float32":
        return torch.float32
    if wire == "bfloat16":
        return torch.bfloat16
    raise PlaneError(f"no wire format {wire!r}; there are {', '.join(WIRE_FORMATS)}")


def _encode_blocks(tensor: torch.Tensor) -> torch.Tensor:
    n_whole = tensor.numel() // BLOCK * BLOCK
    data = torch.empty(encoded_bytes(tensor.numel(), "int8"), dtype=torch.uint8, device=tensor.device)
    rows = data.view(-1, SCALE_BYTES + BLOCK)
    step = CPU_BLOCKS if tensor.device.type == "cpu" else max(len(rows), 1)
    for blocks, out in zip(tensor[:n_whole].view(-1, BLOCK).split(step), rows.split(step), strict=False):
        _encode_into(blocks, out[: len(blocks)])
    if n_whole < tensor.numel():
        _encode_into(padded(tensor[n_whole:], BLOCK).view(1, BLOCK), rows[-1:])
    return data


def _encode_into(blocks: torch.Tensor, rows: torch.Tensor) -> None:
    # Two passes, yet several times faster than `aminmax` along a dimension, and without the copy of `abs`.
    largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    scale = largest.abs_() / 127  # without the sign of a -0.0
    # A scale that is not finite makes the block nan in `decode`, whatever integers stand beside it.
    divisor = torch.where(scale > 0, scale, 1.0)
    values = (blocks / divisor).round_().nan_to_num_(nan=0.0).clamp_(-127, 127)
    rows[:, :SCALE_BYTES].view(torch.float32).copy_(scale)
    rows[:, SCALE_BYTES:].view(torch.int8).copy_(values)


def _decode_blocks(data: torch.Tensor) -> torch.Tensor:
    scale = data[:, :SCALE_BYTES].view(torch.float32)
    values = data[:, SCALE_BYTES:].view(torch.int8).to(torch.float32)
    # An infinite scale times 127 would be infinite, times 0 nan: one kind of damage is easier to find.
    return values.mul_(torch.where(scale.isfinite(), scale, torch.nan)).view(-1)
