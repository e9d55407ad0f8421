"""Planes over MPI in particular.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from mpi4py import MPI
from planes import (
    Finish,
    mpi_plane_between_hosts,
    mpi_plane_that_sums_by,
    mpi_plane_without_shared_memory,
    torch_plane,
)
from test_sums_contract import test_many_in_flight_polled_in_any_order as many_in_flight
from training import train

from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError
from hetsync.plane.base import Plane, PlaneError
from hetsync.plane.mpi import MpiPlane
from hetsync.plane.mpi_lane import LEAST_VALUES, MESSAGE_VALUES, Algorithm, MpiLane, algorithm_for
from hetsync.plane.polled import SEGMENTS_IN_FLIGHT
from hetsync.plane.shared_sums import MOST_VALUES_PER_RANK, SharedSums
from hetsync.plane.staging import HostStaging, Test

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

HOSTS = pytest.mark.parametrize(
    "open_plane",
    [MpiPlane, mpi_plane_between_hosts, mpi_plane_without_shared_memory],
    ids=["one host", "hosts", "no shared memory"],
)
DIRECT = algorithm_for(2, most_on_a_host=1, told_of_deaths=False)
ALGORITHMS = pytest.mark.parametrize(
    "algorithm",
    [
        algorithm_for(2, most_on_a_host=2, told_of_deaths=False),
        algorithm_for(2, most_on_a_host=1, told_of_deaths=True),
        algorithm_for(4, most_on_a_host=1, told_of_deaths=False),
        DIRECT,
    ],
    ids=lambda algorithm: f"{algorithm.in_flight} {algorithm.kind}",
)


class _SlowStaging(HostStaging):
    """Takes a different number of polls for each tensor on each rank, as copies from a device do."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        left = iter(range(self._random.randrange(20)))
        return tensor.clone(), lambda: next(left, None) is None


@HOSTS
def test_order_survives_staging_that_ends_in_another_order(finish: Finish, open_plane: Callable[[], Plane]) -> None:
    plane = open_plane()
    plane.sums._staging[torch.device("cpu")] = _SlowStaging(plane.rank)
    many_in_flight(plane, finish)
    plane.close()


@ALGORITHMS
def test_segments_of_large_sums_keep_their_places_among_small_ones(finish: Finish, algorithm: Algorithm) -> None:
    plane = mpi_plane_that_sums_by(algorithm)
    segments = 2 * algorithm.in_flight + 1
    large = (segments - 1) * algorithm.segment_values + min(LEAST_VALUES + 1, algorithm.segment_values)
    sizes = (5, large, 3, large, 1000, 4)
    each = [torch.arange(n, dtype=torch.float32) % 1009 + 2000 * place for place, n in enumerate(sizes)]
    tensors = [values + plane.rank for values in each]
    handles = [plane.allreduce(tensor) for tensor in tensors]
    random.Random(plane.rank).shuffle(handles)
    most, left = 0, list(handles)
    while left:  # ended by the time limit of all tests
        for handle in list(left):  # each call carries on with all
            if handle.done():
                left.remove(handle)
            most = max(most, *(len(requests) for requests, _ in plane.sums._first._pending.values()), 0)
        time.sleep(2e-4)
    assert most == algorithm.in_flight or plane.size == 1
    for tensor, values in zip(tensors, each, strict=True):
        assert torch.equal(tensor, plane.size * values + sum(range(plane.size)))
    assert plane.moves == 2 * segments + 4
    assert plane.sums._first._begun == (2 * segments if algorithm.kind == "direct" else 0)
    plane.close()


@ALGORITHMS
def test_scratch_memory_is_used_again(finish: Finish, algorithm: Algorithm) -> None:
    plane = mpi_plane_that_sums_by(algorithm)
    lane = plane.sums._first
    n = (3 * algorithm.in_flight + 1) * algorithm.segment_values + 7
    for dtype in (torch.float32, torch.float64, torch.float32):
        tensor = torch.arange(n, dtype=dtype) % 1009 + plane.rank
        finish(plane.allreduce(tensor), name=f"sum {algorithm.kind}")
        assert torch.equal(tensor, plane.size * (torch.arange(n) % 1009).to(dtype) + sum(range(plane.size)))
        assert (0 if algorithm.kind == "in place" else 1) <= len(lane._spare) <= algorithm.in_flight
        assert not lane._direct
    plane.close()


@ALGORITHMS
@pytest.mark.usefixtures("float64_by_default")
def test_sums_are_float32_where_float64_is_the_default(finish: Finish, algorithm: Algorithm) -> None:
    plane = mpi_plane_that_sums_by(algorithm)
    values = torch.arange(algorithm.segment_values, dtype=torch.float32) % 1009
    tensor = values + plane.rank
    finish(plane.allreduce(tensor), name=f"sum {algorithm.kind}")
    assert torch.equal(tensor, plane.size * values + sum(range(plane.size)))
    plane.close()


def assert_summed_in_any_order(
    plane: Plane, finish: Finish, tensors: Sequence[torch.Tensor], each: Sequence[torch.Tensor]
) -> None:
    """Every rank adds its number to each of the values, in these tensors."""
    for tensor, values in zip(tensors, each, strict=True):
        tensor[:] = values + plane.rank
    handles = [plane.allreduce(tensor) for tensor in tensors]
    random.Random(plane.rank).shuffle(handles)
    for handle in handles:
        finish(handle, name="one of many sums")
    for tensor, values in zip(tensors, each, strict=True):
        assert torch.equal(tensor, plane.size * values + sum(range(plane.size)))


@ALGORITHMS
def test_many_sums_of_several_segments_at_once(finish: Finish, algorithm: Algorithm) -> None:
    """As buckets of gradients are."""
    plane = mpi_plane_that_sums_by(algorithm)
    n = 2 * algorithm.segment_values + LEAST_VALUES
    each = [torch.arange(n, dtype=torch.float32) % 1009 + 2000 * place for place in range(12)]
    tensors = [torch.empty(n) for _ in each]
    assert_summed_in_any_order(plane, finish, tensors, each)
    assert not plane.sums._first._direct
    plane.close()


class PlayedComm:
    """Of rank 0; whatever is posted has ended."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.sums: list[str] = []  # by MPI
        self.tags: list[int] = []  # of what was sent
        self.sent_bytes: list[int] = []

    def Get_size(self) -> int:
        return self._ranks

    def Get_rank(self) -> int:
        return 0

    def Iallreduce(self, addend: object, total: object) -> MPI.Request:
        self.sums.append("in place" if addend is MPI.IN_PLACE else "out of place")
        return MPI.REQUEST_NULL

    def Irecv(self, into: object, rank: int, tag: int) -> MPI.Request:
        return MPI.REQUEST_NULL

    def Isend(self, part: list[MPI.buffer], rank: int, tag: int) -> MPI.Request:
        self.tags.append(tag)
        self.sent_bytes.append(part[0].nbytes)
        return MPI.REQUEST_NULL


@pytest.mark.parametrize(
    ("ranks", "most_on_a_host", "told_of_deaths", "kind", "small"),
    [
        (1, 1, False, "in place", False),
        (2, 1, False, "direct", False),
        (3, 1, False, "direct", False),
        (4, 1, False, "out of place", True),
        (4, 1, True, "out of place", True),
        (6, 1, False, "direct", False),  # no power of two: Rabenseifner's last step would send whole segments
        (6, 1, True, "out of place", True),
        (6, 2, False, "out of place", True),
        (8, 1, False, "out of place", True),
        (12, 1, False, "direct", False),
        (13, 1, False, "out of place", True),
        (3, 1, True, "in place", True),  # where Open MPI, as it is, takes its tree in any case
        (4, 2, False, "out of place", True),
        (3, 2, False, "in place", True),
        (2, 2, False, "in place", False),
        (4, 4, True, "in place", False),
    ],
)
def test_the_algorithm_of_sums(ranks: int, most_on_a_host: int, told_of_deaths: bool, kind: str, small: bool) -> None:
    algorithm = algorithm_for(ranks, most_on_a_host, told_of_deaths)
    assert algorithm.kind == kind
    assert (algorithm.segment_values <= 2 * MESSAGE_VALUES, algorithm.in_flight > SEGMENTS_IN_FLIGHT) == (small, small)


@ALGORITHMS
def test_small_segments_are_summed_in_place(algorithm: Algorithm) -> None:
    comm = PlayedComm(ranks=4)
    lane = MpiLane(comm, algorithm)
    assert lane.sum_in_place(torch.zeros(LEAST_VALUES - 1))()()
    assert (comm.sums, comm.tags) == (["in place"], [])
    assert lane.sum_in_place(torch.zeros(LEAST_VALUES))()()
    direct = algorithm.kind == "direct"
    assert (comm.sums[1:], len(comm.tags)) == ([] if direct else [algorithm.kind], 6 if direct else 0)


@pytest.mark.parametrize("open_plane", [MpiPlane, torch_plane], ids=["MPI", "Gloo"])
def test_ranks_of_a_host_share_memory(finish: Finish, open_plane: Callable[[], Plane]) -> None:
    plane = open_plane()
    memory = plane.sums.shared_memory
    assert (memory is not None) == (plane.size > 1) == plane.sums_by.endswith("and shared memory")
    tensor = plane.allocate(SharedSums.least_values + 5, torch.device("cpu")).fill_(1)
    if memory is not None:
        assert memory.offset(tensor) is not None
    finish(plane.allreduce(tensor), name="shared sum")
    assert tensor.eq(plane.size).all()
    plane.close()
    assert tensor.fill_(3).eq(3).all(), "it is kept for as long as its owner likes"


@HOSTS
def test_many_large_sums_at_once_in_any_order(finish: Finish, open_plane: Callable[[], Plane]) -> None:
    """Of several segments each, and in whatever memory: as buckets of gradients are."""
    plane = open_plane()
    n = 3 * MOST_VALUES_PER_RANK * plane.size + SharedSums.least_values - 1
    each = [torch.arange(n, dtype=torch.float32) % 1009 + 2000 * place for place in range(6)]
    tensors = [plane.allocate(n, torch.device("cpu")) if place % 2 else torch.empty(n) for place in range(6)]
    assert_summed_in_any_order(plane, finish, tensors, each)
    plane.close()


@pytest.mark.parametrize("bound", [0, 4])
def test_training_sums_where_its_tensors_lie(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    monkeypatch.setattr(SharedSums, "least_values", 1)
    copied: dict[bool, set[int]] = {True: set(), False: set()}
    offer = SharedSums._offer

    def watched(self: SharedSums, values: torch.Tensor) -> bool:
        offered = offer(self, values)
        if offered:
            copied[self._under_way[-1].scratch is not None].add(values.numel())
        return offered

    monkeypatch.setattr(SharedSums, "_offer", watched)
    plane = MpiPlane()
    outcome = train(plane, SyncConfig(bound, 0.5), optimizer="sgd")
    if plane.size > 1:
        values = sum(weight.numel() for weight in outcome.model.parameters())
        assert any(count >= values for count in copied[False])
        assert all(count < values for count in copied[True]), "what is small"
    plane.close()


def test_direct_sums_have_tags_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsync.plane.mpi_lane.TAGS", 3)
    comm = PlayedComm(ranks=2)
    lane = MpiLane(comm, DIRECT)
    for _ in range(5):
        assert lane.sum_in_place(torch.zeros(LEAST_VALUES))()()
    assert comm.tags == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1], "the same one for both steps"


SENT_AT_ONCE_BYTES = (64 << 10) - 128  # over TCP, by Open MPI as it is, less room for its header


def test_no_message_of_a_direct_sum_waits_for_an_answer() -> None:
    comm = PlayedComm(ranks=2)
    values = torch.zeros(4 * MESSAGE_VALUES + 2)
    assert MpiLane(comm, DIRECT).sum_in_place(values)()()
    assert max(comm.sent_bytes) <= SENT_AT_ONCE_BYTES
    assert sum(comm.sent_bytes) == values.nbytes, "half of it in each step"


@pytest.mark.parametrize(("ranks", "told_of_deaths", "messages"), [(2, True, 1), (4, False, 2), (8, True, 2)])
def test_no_message_of_mpi_s_own_sums_waits_for_an_answer(ranks: int, told_of_deaths: bool, messages: int) -> None:
    algorithm = algorithm_for(ranks, most_on_a_host=1, told_of_deaths=told_of_deaths)
    assert algorithm.segment_values * 4 / messages <= SENT_AT_ONCE_BYTES
    assert algorithm.segment_values * 4 >= 1 << 16 or ranks < 4, "or Open MPI would take its tree"


def test_a_look_at_the_oldest_moves_on_as_many_as_a_sum_has_under_way() -> None:
    comm = PlayedComm(ranks=2)
    lane = MpiLane(comm, DIRECT)
    tests = [lane.sum_in_place(torch.zeros(LEAST_VALUES))() for _ in range(lane.in_flight + 2)]
    first_steps = len(comm.tags)
    assert not tests[1](), "each of many sums would look at all others"
    assert len(comm.tags) == first_steps
    assert tests[0]()
    assert len(comm.tags) == first_steps + lane.in_flight
    assert all([test() for test in tests[1:]])


def test_single_threaded_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(UserError, match="MPI_THREAD_MULTIPLE"):
        MpiPlane()


def test_failure_is_latched(monkeypatch: pytest.MonkeyPatch, finish: Finish) -> None:
    class BrokenRequest:
        def Test(self) -> bool:
            raise MPI.Exception(MPI.ERR_OTHER)

    plane = MpiPlane()
    finished = plane.allreduce(torch.zeros(4))
    finish(finished, name="sum before the failure")
    monkeypatch.setattr(
        plane.sums._first,
        "comm",
        type("Comm", (), {"Get_size": lambda _: 1, "Iallreduce": lambda *_: BrokenRequest()})(),
    )
    with pytest.raises(PlaneError, match="failed"):
        plane.allreduce(torch.zeros(4))
    with pytest.raises(PlaneError, match="failed before"):
        plane.allreduce(torch.zeros(4))
    assert finished.done()
    plane.close()  # must not wait for ranks that may be dead


def test_close_refuses_while_collectives_are_under_way(finish: Finish) -> None:
    plane = MpiPlane()
    plane.sums._staging[torch.device("cpu")] = staging = _SlowStaging(plane.rank)
    staging._random.randrange = lambda _: 5  # type: ignore[method-assign, assignment]
    handle = plane.allreduce(torch.zeros(4))
    with pytest.raises(PlaneError, match="1 collectives under way"):
        plane.close()
    finish(handle, name="sum before close")
    plane.close()
