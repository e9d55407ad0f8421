"""Wire formats: what a tensor of float32 or float64 looks like between two ranks.

| format | bytes | error of one rounding |
| --- | --- | --- |
| float32 | 4 a value, 8 of float64 | none |
| bfloat16 | 2 a value | at most 2⁻⁸ of the value |
| int8 | 1028 a block of 1024 values, padded | at most 1/254 of the block's largest absolute value |
| int4 | 516 a block of 1024 | at most 1/14 of it |
| int2 | 260 a block of 1024: -1, 0 or 1 times its scale | the whole block's is shorter than the block |
| top64 | 132 a block of 4096: the 64 largest by absolute value, in 4 bits | the others, and 1/14 of the largest |

A block is its float32 scale followed by its values, so that a shard made of whole blocks is a contiguous piece of the
encoded tensor, and rounding a shard equals rounding that part of the whole. In every format zeros are encoded as zero
bytes, and a rounding takes away from each block some of its length: what error feedback keeps does not grow without
bound (Karimireddy et al. 2019). int2 has ternary values as in TernGrad (Wen et al. 2017), top64 is about the wire of
SparseLoCo (Sarfi et al. 2025). The name float32 says that nothing is rounded: float64 stays float64.

Infinities and nan never come out finite: bfloat16 keeps them, the others turn what is sent of their block into nan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane.base import PlaneError, Residual

SCALE_BYTES = 4
# On CPUs blocks are made of 1 MiB at a time, in the cache: page faults of whole temporaries cost twice the work.
CPU_VALUES = 256 * 1024
OTHER_VALUES = 16 * 1024 * 1024  # at a time elsewhere, so that temporaries of large models are small beside these
INDEX_BITS = 12  # of a place in a sparse block
SMALL = 0.2  # of a block's largest value: what is less is left for later in 2 bits
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)


def of_gradients(wire: WireFormat) -> WireFormat:
    """What gradients travel in, where progress does in `wire`: at least 8 bits. What a coarser one leaves for later no
    local weights hold meanwhile: a step, an evaluation and a checkpoint would lack it, a skipped step lose it."""
    return "int8" if wire in BLOCKS and BLOCKS[wire].bits < BLOCKS["int8"].bits else wire


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
    if (blocks := BLOCKS.get(wire)) is not None:
        return -(-n // blocks.values) * blocks.n_bytes
    return n * _floating(wire).itemsize


def shard_values(n: int, size: int, wire: WireFormat) -> int:
    """Values in each of `size` equal shards that together hold n; the last ones are filled up with zeros."""
    granule = block_values(wire)
    return -(-n // (size * granule)) * granule


def block_values(wire: WireFormat) -> int:
    """Values that are rounded together."""
    return BLOCKS[wire].values if wire in BLOCKS else 1


def padded(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """The tensor with zeros up to n values; itself if it has n."""
    return tensor if tensor.numel() == n else torch.nn.functional.pad(tensor, (0, n - tensor.numel()))


def encode(tensor: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """A flat tensor as a new uint8 tensor of `encoded_bytes` bytes, on the same device."""
    tensor = flat(tensor)
    if (blocks := BLOCKS.get(wire)) is not None:
        return _encode_blocks(tensor.float(), blocks)
    return tensor.to(_floating(wire), copy=True).view(torch.uint8)


def decode(data: torch.Tensor, n: int, wire: WireFormat) -> torch.Tensor:
    """The n float32 values that `encode` was given, as far as the format keeps them, in new memory."""
    if data.numel() != encoded_bytes(n, wire):
        raise PlaneError(f"{n} values of {wire} are {encoded_bytes(n, wire)} bytes, not {data.numel()}")
    if (blocks := BLOCKS.get(wire)) is not None:
        return _decode_blocks(data.view(-1, blocks.n_bytes), blocks)[:n]
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
    if (kept := residual.in_shard(total.numel())) is not None:
        total += kept
    data = encode(total, wire)
    lost = total.sub_(decode(data, total.numel(), wire))
    residual.first, residual.values = first, lost.nan_to_num_(0.0, 0.0, 0.0)  # or one infinity would come back for ever
    return data


def deliver(residual: Residual | None, tensor: torch.Tensor) -> None:
    """Add what is kept to this rank's addend, for a sum that is not rounded; nothing is kept then."""
    for first, values in residual.take_all() if residual is not None else ():
        shard = tensor[first:][: values.numel()]  # shards are filled up beyond the tensor's end
        shard += values[: shard.numel()]


def _floating(wire: WireFormat) -> torch.dtype:
    if wire == "float32":
        return torch.float32
    if wire == "bfloat16":
        return torch.bfloat16
    raise PlaneError(f"no wire format {wire!r}; there are {', '.join(WIRE_FORMATS)}")


@dataclass(frozen=True)
class Blocks:
    """A format whose values are rounded by blocks.

    Attributes:
        values: Of a block.
        bits: Of a value that is sent.
        sent: Values of a block that are sent, the largest ones; the others are zeros.
    """

    values: int
    bits: int
    sent: int

    @property
    def sparse(self) -> bool:
        return self.sent < self.values

    @property
    def place_bytes(self) -> int:
        return self.sent * INDEX_BITS // 8 if self.sparse else 0

    @property
    def n_bytes(self) -> int:
        return SCALE_BYTES + self.place_bytes + self.sent * self.bits // 8


BLOCKS: Mapping[str, Blocks] = MappingProxyType(
    {
        "int8": Blocks(1024, 8, 1024),
        "int4": Blocks(1024, 4, 1024),
        "int2": Blocks(1024, 2, 1024),
        "top64": Blocks(4096, 4, 64),
    }
)


def _encode_blocks(tensor: torch.Tensor, form: Blocks) -> torch.Tensor:
    whole = tensor.numel() // form.values * form.values
    rows = torch.empty(-(-tensor.numel() // form.values), form.n_bytes, dtype=torch.uint8, device=tensor.device)
    step = (CPU_VALUES if tensor.device.type == "cpu" else OTHER_VALUES) // form.values
    for blocks, out in zip(tensor[:whole].view(-1, form.values).split(step), rows.split(step), strict=False):
        _encode_into(blocks, out[: len(blocks)], form)
    if whole < tensor.numel():
        _encode_into(padded(tensor[whole:], form.values).view(1, form.values), rows[-1:], form)
    return rows.view(-1)


def _encode_into(blocks: torch.Tensor, rows: torch.Tensor, form: Blocks) -> None:
    if form.sparse:
        places = blocks.abs().topk(form.sent, 1, sorted=False).indices
        blocks = blocks.gather(1, places)
    scale, integers = _ternary(blocks) if form.bits == 2 else _even_steps(blocks, 2 ** (form.bits - 1) - 1)
    rows[:, :SCALE_BYTES].view(torch.float32).copy_(scale)
    if form.sparse:
        rows[:, SCALE_BYTES:][:, : form.place_bytes] = _packed_places(places.where(scale != 0, 0))
    rows[:, SCALE_BYTES + form.place_bytes :] = _packed(integers, form.bits)


def _decode_blocks(data: torch.Tensor, form: Blocks) -> torch.Tensor:
    scale = data[:, :SCALE_BYTES].view(torch.float32)
    values = _unpacked(data[:, SCALE_BYTES + form.place_bytes :].view(torch.int8), form.bits)
    # An infinite scale times 127 would be infinite, times 0 nan: one kind of damage is easier to find.
    values.mul_(torch.where(scale.isfinite(), scale, torch.nan))
    if form.sparse:
        places = _unpacked_places(data[:, SCALE_BYTES:][:, : form.place_bytes])
        values = torch.zeros(len(data), form.values, device=data.device).scatter_(1, places, values)
    return values.view(-1)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    # Two passes, yet several times faster than `aminmax` along a dimension, and without the copy of `abs`.
    largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    return largest.abs_()  # without the sign of a -0.0


def _even_steps(blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale of each block, which its largest value has `most` times, and how often each value has it."""
    scale = _largest(blocks) / most
    # A scale that is not finite makes the block nan in `decode`, whatever integers stand beside it.
    divisor = torch.where(scale > 0, scale, 1.0)
    return scale, (blocks / divisor).round_().nan_to_num_(nan=0.0).clamp_(-most, most)


def _ternary(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean size of each block's values that are not small, and the signs of these: the nearest to the block that
    one scale allows. What is small by the mean instead would leave a few large values waiting ever longer."""
    large = blocks.abs().ge_(SMALL * _largest(blocks))
    signs = blocks.sign().mul_(large)
    scale = (blocks * (signs / large.sum(1, keepdim=True))).sum(1, keepdim=True)  # a sum of sizes may be infinite
    return scale, signs.nan_to_num_(nan=0.0)


def _packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes of as many parts of a block as they have room for, the first part in the lowest bits."""
    values = integers.to(torch.int8).view(torch.uint8)
    if bits == 8:
        return values
    first, *others = (values & (2**bits - 1)).chunk(8 // bits, 1)
    for number, part in enumerate(others, start=1):
        first = first | part << (bits * number)
    return first


def _unpacked(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Float32 of bytes that `_packed` made; shifts of signed bytes carry the sign."""
    if bits == 8:
        return data.to(torch.float32)
    parts = [(data << (8 - bits * (number + 1))) >> (8 - bits) for number in range(8 // bits)]
    return torch.cat(parts, 1).to(torch.float32)


def _packed_places(places: torch.Tensor) -> torch.Tensor:
    """Two places of 12 bits in three bytes."""
    low, high = places.to(torch.int32).chunk(2, 1)
    return torch.cat([low & 255, low >> 8 | (high & 15) << 4, high >> 4], 1).to(torch.uint8)


def _unpacked_places(data: torch.Tensor) -> torch.Tensor:
    first, second, third = data.to(torch.int64).chunk(3, 1)
    return torch.cat([first | (second & 15) << 8, second >> 4 | third << 4], 1)
