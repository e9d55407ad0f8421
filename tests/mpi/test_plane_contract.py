"""What every plane promises (`hetsync/plane/base.py`), at any world size.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import gc
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hetsync.emulation.link import EmulatedLink
from hetsync.errors import UserError
from hetsync.plane.base import Plane, PlaneError, Residual, WireFormat
from hetsync.plane.faulty import Corrupt, Delay, Drop, FaultyPlane, Stall
from hetsync.plane.local import LocalPlane
from hetsync.plane.staging import HostStaging, Waiting
from hetsync.plane.wire import BLOCK, WIRE_FORMATS, round_trip

pytestmark = pytest.mark.mpi

Finish = Callable[..., None]
LOW_PRECISION: tuple[WireFormat, ...] = ("bfloat16", "int8")


def _mpi() -> Plane:
    from hetsync.plane.mpi import MpiPlane

    return MpiPlane()


BACKENDS: dict[str, Callable[[], Plane]] = {
    "mpi": _mpi,
    "local": LocalPlane,
    "emulated-link": lambda: EmulatedLink(_mpi(), latency_seconds=1e-3, bytes_per_second=1e10),
    "faulty": lambda: FaultyPlane(_mpi(), ()),
}


@pytest.fixture(params=list(BACKENDS))
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    from mpi4py import MPI

    if request.param == "local" and MPI.COMM_WORLD.Get_size() > 1:
        pytest.skip("one rank only")
    plane = BACKENDS[request.param]()
    yield plane
    plane.close()


def addend(rank: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + rank))


def addends(plane: Plane, n: int, seed: int = 0) -> list[torch.Tensor]:
    return [addend(rank, n, seed) for rank in range(plane.size)]


def assert_same_bits(plane: Plane, *tensors: torch.Tensor) -> None:
    bits = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]
    assert plane.gather_objects(bits) == [bits] * plane.size


def receive(plane: Plane, count: int, seconds: float = 20.0) -> list[tuple[int, Any]]:
    messages: list[tuple[int, Any]] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count:
        messages += plane.receive()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(messages)} of {count} messages after {seconds} s")
        time.sleep(1e-4)
    return messages


# Collectives.


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


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_reaches_everybody(plane: Plane, finish: Finish, wire: WireFormat, bad: float) -> None:
    tensor = torch.ones(2 * BLOCK)
    if plane.rank == plane.size - 1:
        tensor[5] = bad
    finish(plane.allreduce(tensor, wire), name=f"{wire} sum with {bad}")
    assert not tensor[5].isfinite()
    assert tensor[BLOCK:].isfinite().all()


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_nothing_can_be_summed(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    tensor = torch.empty(0)
    finish(plane.allreduce(tensor, wire), name="sum of nothing")
    assert tensor.shape == (0,)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_large_tensor(plane: Plane, finish: Finish, wire: WireFormat) -> None:
    tensor = torch.full((4_000_000,), float(plane.rank + 1))
    finish(plane.allreduce(tensor, wire), name="large sum")
    expected = torch.full_like(tensor, sum(range(1, plane.size + 1)))
    torch.testing.assert_close(tensor, expected, rtol=1e-2 if wire != "float32" else 0, atol=0)


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


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)])
def test_unfit_tensors_are_refused_and_harm_nothing(plane: Plane, finish: Finish, tensor: torch.Tensor) -> None:
    with pytest.raises(PlaneError, match="flat, contiguous float32"):
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


# Messages and blocking calls.


def test_messages_arrive_in_order_whatever_their_size(plane: Plane) -> None:
    for number in range(30):
        for to in range(plane.size):
            plane.send((number, b"x" * (100_000 if number % 3 == 0 else number)), to)
    messages = receive(plane, 30 * plane.size)
    for sender in range(plane.size):
        assert [message[0] for origin, message in messages if origin == sender] == list(range(30))
    assert plane.receive() == []
    plane.barrier()


def test_a_message_is_unread_until_its_receiver_looks(plane: Plane) -> None:
    to = (plane.rank + 1) % plane.size
    assert not plane.unread(to)
    plane.send("news", to)
    assert plane.unread(to)
    plane.barrier()
    assert [message for _, message in receive(plane, 1)] == ["news"]
    deadline = time.monotonic() + 20
    while plane.unread(to):
        assert time.monotonic() < deadline
    plane.barrier()


def test_sent_message_may_be_changed(plane: Plane) -> None:
    message = [plane.rank]
    plane.send(message, to=(plane.rank + 1) % plane.size)
    message.append(99)
    left = (plane.rank - 1) % plane.size
    assert receive(plane, 1) == [(left, [left])]


def test_unread_messages_do_not_hinder_close(plane: Plane) -> None:
    for to in range(plane.size if plane.rank == 0 else 0):
        plane.send(b"x" * 1_000_000, to)


def test_objects_are_gathered_in_rank_order(plane: Plane) -> None:
    values = [{"rank": rank, "text": "x" * (rank * 100_000)} for rank in range(plane.size)]
    assert plane.gather_objects(values[plane.rank]) == values


def test_rank_0_broadcasts(plane: Plane) -> None:
    assert plane.broadcast_object(("rank", plane.rank)) == ("rank", 0)
    assert plane.broadcast_object(None) is None


def test_barrier_waits_for_the_last(plane: Plane) -> None:
    if plane.rank == plane.size - 1:
        time.sleep(0.2)
    entered = time.monotonic()  # one clock for all processes of a host
    plane.barrier()
    left = time.monotonic()
    assert left >= max(plane.gather_objects(entered))


def test_waiting_burns_no_core(plane: Plane) -> None:
    plane.barrier()
    used = time.process_time()
    if plane.rank == 0:
        time.sleep(0.5)
    plane.barrier()
    assert time.process_time() - used < 0.25


def test_main_thread_gathers_while_another_thread_communicates(plane: Plane, finish: Finish) -> None:
    errors: list[BaseException] = []

    def communicate() -> None:
        arrived: list[tuple[int, Any]] = []
        try:
            for seed in range(40):
                tensor = addend(plane.rank, 5000, seed)
                plane.send(seed, to=(plane.rank + 1) % plane.size)
                finish(plane.allreduce(tensor, WIRE_FORMATS[seed % 3]), name="sum beside gather")
                arrived += plane.receive()
            arrived += receive(plane, 40 - len(arrived))
            assert [message for _, message in arrived] == list(range(40))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=communicate, daemon=True)
    thread.start()
    for number in range(40):
        assert plane.gather_objects((plane.rank, number)) == [(rank, number) for rank in range(plane.size)]
        assert plane.broadcast_object(number) == number
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert errors == []


# The MPI plane in particular.


class _SlowStaging(HostStaging):
    """Takes a different number of polls for each tensor on each rank, as copies from a device do."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def fetch(self, tensor: torch.Tensor) -> Waiting[torch.Tensor]:
        for _ in range(self._random.randrange(20)):
            yield
        return tensor.clone()


def test_order_survives_staging_that_ends_in_another_order(finish: Finish) -> None:
    from hetsync.plane.mpi import MpiPlane

    plane = MpiPlane()
    plane._staging[torch.device("cpu")] = _SlowStaging(plane.rank)
    test_many_in_flight_polled_in_any_order(plane, finish)
    plane.close()


def test_segments_of_large_sums_keep_their_places_among_small_ones(finish: Finish) -> None:
    from hetsync.plane.mpi import SEGMENT_VALUES_PER_RANK, SEGMENTS_IN_FLIGHT, MpiPlane

    plane = MpiPlane()
    segments = 2 * SEGMENTS_IN_FLIGHT + 1
    large = (segments - 1) * SEGMENT_VALUES_PER_RANK * plane.size + 7
    tensors = [torch.arange(n, dtype=torch.float32) % 1009 + plane.rank for n in (5, large, 3, large, 4)]
    handles = [plane.allreduce(tensor) for tensor in tensors]
    random.Random(plane.rank).shuffle(handles)
    while not all([handle.done() for handle in handles]):  # ended by the time limit of all tests
        assert all(len(requests) <= SEGMENTS_IN_FLIGHT for requests, _ in plane._first._pending.values())
        time.sleep(2e-4)
    for tensor in tensors:
        each = torch.arange(tensor.numel(), dtype=torch.float32) % 1009
        assert torch.equal(tensor, plane.size * each + sum(range(plane.size)))
    assert plane.moves == 2 * segments + 3
    plane.close()


def test_single_threaded_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    from hetsync.plane.mpi import MpiPlane

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(UserError, match="MPI_THREAD_MULTIPLE"):
        MpiPlane()


def test_failure_is_latched(monkeypatch: pytest.MonkeyPatch, finish: Finish) -> None:
    from mpi4py import MPI

    from hetsync.plane.mpi import MpiPlane

    class BrokenRequest:
        def Test(self) -> bool:
            raise MPI.Exception(MPI.ERR_OTHER)

    plane = MpiPlane()
    finished = plane.allreduce(torch.zeros(4))
    finish(finished, name="sum before the failure")
    monkeypatch.setattr(plane._first, "comm", type("Comm", (), {"Iallreduce": lambda *_: BrokenRequest()})())
    with pytest.raises(PlaneError, match="failed"):
        plane.allreduce(torch.zeros(4))
    with pytest.raises(PlaneError, match="failed before"):
        plane.allreduce(torch.zeros(4))
    assert finished.done()
    plane.close()  # must not wait for ranks that may be dead


def test_close_refuses_while_collectives_are_under_way(finish: Finish) -> None:
    from hetsync.plane.mpi import MpiPlane

    plane = MpiPlane()
    plane._staging[torch.device("cpu")] = staging = _SlowStaging(plane.rank)
    staging._random.randrange = lambda _: 5  # type: ignore[method-assign, assignment]
    handle = plane.allreduce(torch.zeros(4))
    with pytest.raises(PlaneError, match="1 collectives under way"):
        plane.close()
    finish(handle, name="sum before close")
    plane.close()


# Faults.


def test_faults_fire_where_they_are_addressed(finish: Finish) -> None:
    from hetsync.plane.mpi import MpiPlane

    last = MpiPlane().size - 1
    faults = [Delay(0, 0, seconds=0.3), Corrupt(last, 1), Stall(last, 2), Drop(0, 1)]
    plane = FaultyPlane(MpiPlane(), faults)
    mine = [fault for fault in faults if fault.rank == plane.rank]

    started = time.monotonic()
    finish(plane.allreduce(torch.ones(4)), name="delayed sum")
    assert time.monotonic() - started > (0.29 if plane.rank == 0 else -1)

    tensor = torch.ones(4)
    finish(plane.allreduce(tensor), name="corrupted sum")
    assert tensor[0].isnan()
    assert torch.equal(tensor[1:], torch.full((3,), float(plane.size)))

    stalled = plane.allreduce(torch.ones(4))
    if plane.rank == last:
        with pytest.raises(TimeoutError, match="stalled sum"):
            finish(stalled, name="stalled sum", seconds=0.3)
    else:
        finish(stalled, name="sum that the last rank never sees")

    if plane.rank == 0:
        for number in range(3):
            plane.send(number, to=last)
    if plane.rank == last:
        assert [message for _, message in receive(plane, 2)] == [0, 2]
    assert plane.fired == mine
    plane.close()
