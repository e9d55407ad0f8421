from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hetsync.plane.base import PlaneError, WireFormat
from hetsync.plane.wire import BLOCK, WIRE_FORMATS, decode, encode, encoded_bytes, padded, round_trip, shard_values

wires = st.sampled_from(WIRE_FORMATS)
# Close to the largest float32, bfloat16 rounds to infinity, as it must.
finite = st.floats(-(2.0**126), 2.0**126, width=32)
lengths = st.one_of(
    st.integers(0, 40),
    st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, 257 * BLOCK, 300 * BLOCK + 1]),
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
    largest = torch.cat([block.abs().max().expand(len(block)) for block in x.split(BLOCK)])
    return largest / 254 * (1 + 1e-5) + 1e-42


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


@settings(deadline=None)
@given(tensors(), wires)
def test_sizes(x: torch.Tensor, wire: WireFormat) -> None:
    data = encode(x, wire)
    assert data.dtype is torch.uint8
    assert data.shape == (encoded_bytes(len(x), wire),)
    with pytest.raises(PlaneError, match="bytes"):
        decode(data, len(x) + BLOCK, wire)


@settings(deadline=None)
@given(tensors().filter(len), wires, st.sampled_from([math.inf, -math.inf, math.nan]), st.data())
def test_non_finite_stays_non_finite(x: torch.Tensor, wire: WireFormat, bad: float, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(x) - 1))
    x[at] = bad
    seen = round_trip(x, wire)
    assert not seen[at].isfinite()
    elsewhere = torch.ones(len(x), dtype=torch.bool)
    elsewhere[at // BLOCK * BLOCK : (at // BLOCK + 1) * BLOCK] = False
    assert seen[elsewhere].isfinite().all()


@settings(deadline=None)
@given(lengths, st.integers(1, 9), wires)
def test_shards_hold_everything_and_are_slices_of_the_whole(n: int, size: int, wire: WireFormat) -> None:
    shard = shard_values(n, size, wire)
    assert n <= shard * size < n + size * BLOCK
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


def test_error_feedback_loses_nothing_in_the_long_run() -> None:
    meant, residual, seen = torch.randn(2000), torch.zeros(2000), torch.zeros(2000)
    for _ in range(200):
        addend = meant + residual
        rounded = round_trip(addend, "int8")
        residual = addend - rounded
        seen += rounded
    assert torch.allclose(seen / 200, meant, atol=1e-3)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
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
