from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hetsync.config.schema import WireFormat
from hetsync.plane.base import PlaneError
from hetsync.plane.wire import (
    WIRE_FORMATS,
    block_values,
    decode,
    encode,
    encoded_bytes,
    of_gradients,
    padded,
    round_trip,
    shard_values,
)

BLOCK = 1024
DENSE = {"int8": 254, "int4": 14}  # formats of even steps, of which a block's largest value has half as many
wires = st.sampled_from(WIRE_FORMATS)
# Close to the largest float32, bfloat16 rounds to infinity, as it must.
finite = st.floats(-(2.0**126), 2.0**126, width=32)
lengths = st.one_of(
    st.integers(0, 40),
    st.sampled_from([n * BLOCK + more for n, more in ((1, -1), (1, 0), (1, 1), (5, 7), (257, 0), (300, 1))]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any length, magnitudes from block to block, and some values that hypothesis chooses."""
    n = draw(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(n, generator=generator) * 10 ** (20 * torch.rand(n, generator=generator) - 10)
    for value in draw(st.lists(finite, max_size=min(n, 8))):
        values[draw(st.integers(0, n - 1))] = value
    return values


def allowed_error(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    if wire == "float32":
        return torch.zeros_like(x)
    if wire == "bfloat16":
        return x.abs() * 2**-8 + 1e-40
    largest = blocks_of(x, wire).abs().amax(1).repeat_interleave(block_values(wire))[: len(x)]
    return largest / DENSE.get(wire, 1) * (1 + 1e-5) + 1e-42


@settings(deadline=None)
@given(tensors(), wires)
def test_error_bounds(x: torch.Tensor, wire: WireFormat) -> None:
    before = x.clone()
    seen = round_trip(x, wire)
    assert torch.equal(x, before)
    assert seen.shape == x.shape
    assert seen.dtype is torch.float32
    if len(x):
        assert ((seen - x).abs() <= allowed_error(x, wire)).all()


def blocks_of(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    size = block_values(wire)
    return padded(x, -(-len(x) // size) * size).view(-1, size)


@settings(deadline=None)
@given(tensors(), wires)
def test_a_rounding_takes_away_from_each_block_some_of_its_length(x: torch.Tensor, wire: WireFormat) -> None:
    """Then what error feedback keeps has a bound (Karimireddy et al. 2019). At least the largest value is sent, or, in
    2 bits, those of a fifth of it: of 1024 others, 0.04 each, are left."""
    before, left = (blocks_of(part, wire).double().square().sum(1) for part in (x, x - round_trip(x, wire)))
    assert (left <= before * (1 - 1 / 65) + 1e-80).all()


@settings(deadline=None)
@given(tensors())
def test_the_largest_of_a_sparse_block_are_sent(x: torch.Tensor) -> None:
    before, sent = blocks_of(x, "top64"), blocks_of(round_trip(x, "top64"), "top64")
    assert ((sent != 0).sum(1) <= 64).all()
    sizes = before.abs().topk(64).values
    missing = before.abs().where(sent == 0, 0.0).amax(1)
    # One that is sent may come to 0 there, where it is less than half a step of 1/7 of the largest.
    assert (missing <= torch.maximum(sizes[:, -1], sizes[:, 0] / 14 * (1 + 1e-5)) + 1e-42).all()


@settings(deadline=None)
@given(tensors(), wires)
def test_sizes(x: torch.Tensor, wire: WireFormat) -> None:
    data = encode(x, wire)
    assert data.dtype is torch.uint8
    assert data.shape == (encoded_bytes(len(x), wire),)
    with pytest.raises(PlaneError, match="bytes"):
        decode(data, len(x) + 4096, wire)


@settings(deadline=None)
@given(tensors().filter(len), wires, st.sampled_from([math.inf, -math.inf, math.nan]), st.data())
def test_non_finite_stays_non_finite(x: torch.Tensor, wire: WireFormat, bad: float, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(x) - 1))
    x[at] = bad
    seen = round_trip(x, wire)
    assert not seen[at].isfinite()
    elsewhere = torch.ones(len(x), dtype=torch.bool)
    block = block_values(wire)
    elsewhere[at // block * block : (at // block + 1) * block] = False
    assert seen[elsewhere].isfinite().all()


@settings(deadline=None)
@given(lengths, st.integers(1, 9), wires)
def test_shards_hold_everything_and_are_slices_of_the_whole(n: int, size: int, wire: WireFormat) -> None:
    shard = shard_values(n, size, wire)
    assert n <= shard * size < n + size * block_values(wire)
    x = torch.randn(n)
    pieces = [encode(piece, wire) for piece in padded(x, shard * size).view(size, shard)]
    assert torch.equal(torch.cat(pieces), padded(encode(x, wire), encoded_bytes(shard * size, wire)))


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_zeros_stay_zeros(wire: WireFormat) -> None:
    assert torch.equal(round_trip(torch.zeros(3000), wire), torch.zeros(3000))


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_encoding_is_new_memory(wire: WireFormat) -> None:
    x = torch.randn(10)
    data = encode(x, wire)
    seen = decode(data, 10, wire)
    kept = seen.clone()
    x.zero_()
    data.zero_()
    assert torch.equal(seen, kept)


@pytest.mark.parametrize(
    ("wire", "off"), [("bfloat16", 1e-3), ("int8", 1e-3), ("int4", 1e-3), ("int2", 0.05), ("top64", 0.2)]
)
def test_error_feedback_loses_nothing_in_the_long_run(wire: WireFormat, off: float) -> None:
    generator = torch.Generator().manual_seed(0)
    meant, residual, seen = torch.randn(2000, generator=generator), torch.zeros(2000), torch.zeros(2000)
    for _ in range(400):
        addend = meant + residual
        rounded = round_trip(addend, wire)
        residual = addend - rounded
        seen += rounded
    assert torch.allclose(seen + residual, 400 * meant, rtol=1e-3, atol=1e-2)
    assert torch.allclose(seen / 400, meant, atol=off)


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_float64_is_rounded_as_float32_is(wire: WireFormat) -> None:
    tensor = torch.randn(3 * BLOCK + 5)
    found = round_trip(tensor.double(), wire)
    assert found.dtype is torch.float64
    assert torch.equal(found, round_trip(tensor, wire).double())


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(4, dtype=torch.float16)],
    ids=["matrix", "strided", "float16"],
)
def test_other_tensors_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(PlaneError, match="flat, contiguous tensors of float32 or float64"):
        encode(tensor, "float32")


def test_unknown_format_is_named() -> None:
    with pytest.raises(PlaneError, match="float16"):
        encoded_bytes(4, "float16")  # type: ignore[arg-type]


def test_gradients_travel_in_eight_bits_at_least() -> None:
    assert [of_gradients(wire) for wire in WIRE_FORMATS] == ["float32", "bfloat16", "int8", "int8", "int8", "int8"]
