"""What all sums promise (`hetsync/plane/base.py`), at any world size.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from planes import BACKENDS, Finish, addend, addends, assert_same_bits

from hetsync.config.schema import WireFormat
from hetsync.plane.base import Plane, PlaneError, Residual
from hetsync.plane.wire import WIRE_FORMATS, round_trip

pytestmark = pytest.mark.mpi

LOW_PRECISION = WIRE_FORMATS[1:]
BLOCK, LARGEST_BLOCK = 1024, 4096


@pytest.fixture(scope="module", params=list(BACKENDS))  # to open one takes a second and more
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    plane = BACKENDS[request.param]()
    yield plane
    plane.close()


def test_whole_numbers_sum_exactly(plane: Plane, finish: Finish) -> None:
    tensor = torch.arange(5000.0) + plane.rank
    finish(plane.allreduce(tensor), name="float32 sum")
    assert torch.equal(tensor, plane.size * torch.arange(5000.0) + sum(range(plane.size)))


@pytest.mark.parametrize("n", [1, 7, BLOCK, 3 * BLOCK + 5, 100_003])
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_all_ranks_hold_the_same_bits(plane: Plane, finish: Finish, wire: WireFormat, n: int) -> None:
    tensor = addend(plane.rank, n)
    finish(plane.allreduce(tensor, wire), name=f"{wire} sum of {n}")
    assert_same_bits(plane, tensor)


@pytest.mark.parametrize("n", [1, 7, 3 * BLOCK + 5, 100_003])
@pytest.mark.parametrize("wire", LOW_PRECISION)
def test_low_precision_rounds_each_addend_and_the_sum(plane: Plane, finish: Finish, wire: WireFormat, n: int) -> None:
    tensor = addend(plane.rank, n)
    finish(plane.allreduce(tensor, wire), name=f"{wire} sum of {n}")
    seen = torch.stack([round_trip(x, wire) for x in addends(plane, n)])
    torch.testing.assert_close(tensor, round_trip(seen.sum(0), wire))


@pytest.mark.each_value
@pytest.mark.parametrize("wire", LOW_PRECISION)
def test_what_rounding_takes_from_sums_comes_with_later_ones(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    """In float32 the last of it."""
    n, residual = 2 * BLOCK + 5, Residual()
    meant, arrived, lost = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for seed in range(20):
        seen = [round_trip(x, wire) for x in addends(plane, n, seed)]
        tensor = seen[plane.rank].clone()
        finish(plane.allreduce(tensor, wire, residual), name=f"{wire} sum")
        total = torch.stack(seen).sum(0)
        meant, arrived, lost = meant + total, arrived + tensor, lost + total - round_trip(total, wire)
    rest = torch.zeros(n)
    finish(plane.allreduce(rest, "float32", residual), name="float32 sum")
    torch.testing.assert_close(arrived + rest, meant, rtol=1e-5, atol=1e-4)
    assert plane.size == 1 or lost.abs().max() > 1e-3, "without it, more would be missing: the test can fail"
    again = torch.zeros(n)
    finish(plane.allreduce(again, "float32", residual), name="float32 sum")
    assert not again.any(), "it comes once"
    assert_same_bits(plane, arrived, rest)


def test_it_comes_whatever_wires_follow_each_other(plane: Plane, finish: Finish) -> None:
    """Whose shards are of different sizes."""
    n, residual = 3 * LARGEST_BLOCK + 5, Residual()
    given, summed = torch.zeros(n), torch.zeros(n)
    for number, wire in enumerate(("top64", "int8", "top64", "bfloat16", "float32")):
        tensor = addend(plane.rank, n) * (number + 1)
        given += sum(round_trip(x * (number + 1), wire) for x in addends(plane, n))
        finish(plane.allreduce(tensor, wire, residual), name=f"{wire} sum")
        summed += tensor
    torch.testing.assert_close(summed, given, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_reaches_everybody(plane: Plane, finish: Finish, wire: WireFormat, bad: float) -> None:
    tensor = torch.ones(2 * LARGEST_BLOCK)
    if plane.rank == plane.size - 1:
        tensor[5] = bad
    finish(plane.allreduce(tensor, wire), name=f"{wire} sum with {bad}")
    assert not tensor[5].isfinite()
    assert tensor[LARGEST_BLOCK:].isfinite().all()


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_nothing_can_be_summed(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    tensor = torch.empty(0)
    finish(plane.allreduce(tensor, wire), name="sum of nothing")
    assert tensor.shape == (0,)


@pytest.mark.each_value
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_large_tensor(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    tensor = torch.full((4_000_000,), float(plane.rank + 1))
    finish(plane.allreduce(tensor, wire), name="large sum")
    expected = round_trip(torch.ones_like(tensor), wire) * sum(range(1, plane.size + 1))
    torch.testing.assert_close(tensor, expected, rtol=1e-2 if wire != "float32" else 0, atol=0)


@pytest.mark.each_value
@pytest.mark.parametrize("n", [1, 7, 100_003, 2_000_003])
def test_float64_is_summed_in_its_own_precision(plane: Plane, finish: Finish, n: int) -> None:
    """With others under way, of which some are in float32; from any place in memory, that of sums among them."""
    memory = plane.allocate(2 * n + 2, torch.device("cpu")).view(torch.float64)
    everyones = [each.double() / 3 for each in addends(plane, n)]
    there, elsewhere, single = memory[1:], everyones[plane.rank].clone(), addend(plane.rank, n)
    there[:] = everyones[plane.rank]
    finish(*map(plane.allreduce, (there, single, elsewhere)), name=f"float64 sum of {n}")
    expected = torch.stack(everyones).sum(0)
    scale = torch.stack(everyones).abs().sum(0)
    assert float(((there - expected).abs() / scale).max()) < 1e-15
    assert float(((elsewhere - expected).abs() / scale).max()) < 1e-15
    torch.testing.assert_close(single, torch.stack(addends(plane, n)).sum(0))
    assert_same_bits(plane, there, elsewhere, single)


@pytest.mark.parametrize("wire", LOW_PRECISION)
def test_low_precision_rounds_float64_as_it_does_float32(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    n, residual = 3 * BLOCK + 5, Residual()
    tensor = addend(plane.rank, n).double()
    finish(plane.allreduce(tensor, wire, residual), name=f"{wire} sum of float64")
    seen = torch.stack([round_trip(x.double(), wire) for x in addends(plane, n)]).sum(0)
    torch.testing.assert_close(tensor, round_trip(seen, wire))
    rest = torch.zeros(n, dtype=torch.float64)
    finish(plane.allreduce(rest, residual=residual), name="float64 sum")
    torch.testing.assert_close(tensor + rest, seen, rtol=1e-5, atol=1e-5)
    assert_same_bits(plane, tensor, rest)


@pytest.mark.parametrize("whose", ["everybody's", "the first's", "nobody's"])
def test_tensors_in_the_memory_of_sums(plane: Plane, finish: Finish, whose: str) -> None:
    """They are their ranks' own again afterwards."""
    n, there = 700_003, whose == "everybody's" or (whose == "the first's" and plane.rank == 0)
    tensor = plane.allocate(n, torch.device("cpu")) if there else torch.empty(n)
    tensor[:] = addend(plane.rank, n)
    finish(plane.allreduce(tensor[:300_001]), plane.allreduce(tensor[300_001:]), name=f"sums in {whose} memory")
    torch.testing.assert_close(tensor, torch.stack(addends(plane, n)).sum(0))
    assert_same_bits(plane, tensor)
    tensor[:] = plane.rank
    plane.barrier()
    assert tensor.eq(plane.rank).all()
    other = plane.allocate(n, torch.device("cpu")).fill_(-1)
    plane.barrier()
    assert tensor.eq(plane.rank).all()
    finish(plane.allreduce(other, "int8"), name="int8 sum there")
    torch.testing.assert_close(other, torch.full((n,), -float(plane.size)), rtol=1e-2, atol=0)


def test_memory_of_sums_is_where_the_tensor_is_to_be(plane: Plane) -> None:
    assert plane.allocate(5, torch.device("meta")).device.type == "meta"
    assert plane.allocate(0, torch.device("cpu")).shape == (0,)


def test_many_in_flight_polled_in_any_order(plane: Plane, finish: Finish) -> None:
    kinds = [(wire, n) for n in (3, 20_000, 0, BLOCK) for wire in WIRE_FORMATS]
    tensors = [addend(plane.rank, n, seed) for seed, (_, n) in enumerate(kinds)]
    handles = [plane.allreduce(tensor, wire) for tensor, (wire, _) in zip(tensors, kinds, strict=True)]
    # Each rank polls one at a time, in an order of its own: the second stages must not get mixed up.
    random.Random(plane.rank).shuffle(handles)
    for handle in handles:
        finish(handle, name="one of many")
    for seed, (tensor, (wire, n)) in enumerate(zip(tensors, kinds, strict=True)):
        seen = torch.stack([round_trip(x, wire) for x in addends(plane, n, seed)])
        torch.testing.assert_close(tensor, round_trip(seen.sum(0), wire))
    assert_same_bits(plane, *tensors)


@pytest.mark.each_value(3)
def test_handle_owns_its_buffers(plane: Plane, finish: Finish) -> None:
    memory = torch.ones(50_000)
    handles = [plane.allreduce(memory[:20_000]), plane.allreduce(memory[20_000:].clone(), "int8")]
    gc.collect()
    litter = [torch.full((20_000,), 99.0) for _ in range(20)]
    finish(*handles, name="sum of dropped tensors")
    assert torch.equal(memory[:20_000], torch.full((20_000,), float(plane.size)))
    assert torch.equal(memory[20_000:], torch.ones(30_000))
    assert all(torch.equal(tensor, litter[0]) for tensor in litter)


def test_parameters_are_summed_outside_autograd(plane: Plane, finish: Finish) -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    finish(plane.allreduce(parameter, "bfloat16"), name="sum of a parameter")
    assert torch.equal(parameter.detach(), torch.full((10,), float(plane.size)))


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float16)])
def test_unfit_tensors_are_refused_and_harm_nothing(plane: Plane, finish: Finish, tensor: torch.Tensor) -> None:
    with pytest.raises(PlaneError, match="flat, contiguous tensors of float32 or float64"):
        plane.allreduce(tensor)
    with pytest.raises(PlaneError, match="float16"):
        plane.allreduce(torch.zeros(4), "float16")  # type: ignore[arg-type]
    finish(plane.allreduce(torch.zeros(4)), name="sum after refusals")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_cuda_tensors(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    on_cpu, on_cuda = addend(plane.rank, 100_003), addend(plane.rank, 100_003).cuda()
    for _ in range(20):  # work still queued when the collective is posted
        on_cuda = -on_cuda
    finish(plane.allreduce(on_cpu, wire), plane.allreduce(on_cuda, wire), name=f"{wire} sum on CUDA")
    torch.testing.assert_close(on_cuda.cpu(), on_cpu)
    assert_same_bits(plane, on_cuda.cpu())
