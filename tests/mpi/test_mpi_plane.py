"""Planes over MPI in particular.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from planes import Finish, mpi_plane_between_hosts
from test_sums_contract import test_many_in_flight_polled_in_any_order as many_in_flight

from hetsync.errors import UserError
from hetsync.plane.base import Plane, PlaneError
from hetsync.plane.mpi import MpiPlane
from hetsync.plane.mpi_lane import LEAST_CUT_VALUES, SEGMENT_VALUES_PER_RANK, MpiLane
from hetsync.plane.polled import SEGMENTS_IN_FLIGHT
from hetsync.plane.staging import HostStaging, Test

pytestmark = pytest.mark.mpi

HOSTS = pytest.mark.parametrize("open_plane", [MpiPlane, mpi_plane_between_hosts], ids=["one host", "hosts"])


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


@HOSTS
def test_segments_of_large_sums_keep_their_places_among_small_ones(
    finish: Finish, open_plane: Callable[[], Plane]
) -> None:
    plane = open_plane()
    segments = 2 * SEGMENTS_IN_FLIGHT + 1
    large = (segments - 1) * SEGMENT_VALUES_PER_RANK * plane.size + LEAST_CUT_VALUES + 1
    sizes = (5, large, 3, large, LEAST_CUT_VALUES, 4)
    each = [torch.arange(n, dtype=torch.float32) % 1009 + 2000 * place for place, n in enumerate(sizes)]
    tensors = [values + plane.rank for values in each]
    handles = [plane.allreduce(tensor) for tensor in tensors]
    random.Random(plane.rank).shuffle(handles)
    while not all([handle.done() for handle in handles]):  # ended by the time limit of all tests
        assert all(len(requests) <= SEGMENTS_IN_FLIGHT for requests, _ in plane.sums._first._pending.values())
        time.sleep(2e-4)
    for tensor, values in zip(tensors, each, strict=True):
        assert torch.equal(tensor, plane.size * values + sum(range(plane.size)))
    assert plane.moves == 2 * segments + 4
    assert plane.sums._first._numbered == (2 * segments + 1 if plane.sums._first.in_two_steps else 0)
    plane.close()


@pytest.mark.parametrize("way", ["in_two_steps", "copies"])
def test_between_hosts_sums_are_the_same_and_use_their_memory_again(finish: Finish, way: str) -> None:
    plane = MpiPlane()
    lane = plane.sums._first
    assert (lane.in_two_steps, lane.copies) == (False, False), "on one host either only costs"
    setattr(lane, way, True)
    n = (3 * SEGMENTS_IN_FLIGHT + 1) * SEGMENT_VALUES_PER_RANK * plane.size + 7
    for _ in range(2):
        tensor = torch.arange(n, dtype=torch.float32) % 1009 + plane.rank
        finish(plane.allreduce(tensor), name="sum between hosts")
        assert torch.equal(tensor, plane.size * (torch.arange(n) % 1009).float() + sum(range(plane.size)))
        assert 0 < len(lane._spare) == len(lane._scratch) <= SEGMENTS_IN_FLIGHT
        assert not lane._sums
    plane.close()


def test_many_sums_of_several_segments_at_once(finish: Finish) -> None:
    """As buckets of gradients are."""
    plane = mpi_plane_between_hosts()
    n = 2 * SEGMENT_VALUES_PER_RANK * plane.size + LEAST_CUT_VALUES
    each = [torch.arange(n, dtype=torch.float32) % 1009 + 2000 * place for place in range(12)]
    tensors = [values + plane.rank for values in each]
    handles = [plane.allreduce(tensor) for tensor in tensors]
    random.Random(plane.rank).shuffle(handles)
    for handle in handles:
        finish(handle, name="one of many sums")
    for tensor, values in zip(tensors, each, strict=True):
        assert torch.equal(tensor, plane.size * values + sum(range(plane.size)))
    assert not plane.sums._first._sums
    plane.close()


def test_rounds_of_tags(finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin anew now and then."""
    monkeypatch.setattr("hetsync.plane.mpi_lane.TAGS", 3)
    plane = mpi_plane_between_hosts()
    tensors = [torch.full((LEAST_CUT_VALUES,), float(place + plane.rank)) for place in range(10)]
    for one, another in zip(tensors[::2], tensors[1::2], strict=True):
        for handle in [plane.allreduce(one), plane.allreduce(another)]:
            finish(handle, name="sum")
    wanted = [plane.size * place + sum(range(plane.size)) for place in range(10)]
    assert [(tensor.min(), tensor.max()) for tensor in tensors] == [(value, value) for value in wanted]
    plane.close()


@pytest.mark.parametrize(
    ("on_host", "ranks", "way"),
    [
        (1, 1, "in place"),
        (1, 2, "in two steps"),
        (1, 16, "in two steps"),
        (1, 17, "of copies"),
        (2, 4, "of copies"),  # a host's link would carry what both of its ranks send
        (2, 3, "in place"),  # where copies change nothing
        (2, 2, "in place"),  # in shared memory
        (4, 4, "in place"),
    ],
)
@pytest.mark.parametrize("values", [LEAST_CUT_VALUES - 1, LEAST_CUT_VALUES])
def test_the_way_of_a_segment(on_host: int, ranks: int, way: str, values: int) -> None:
    posted: list[str] = []

    class PlayedComm:
        def Get_size(self) -> int:
            return ranks

        def Get_rank(self) -> int:
            return 0

        def Iallreduce(self, addend: object, total: object) -> MPI.Request:
            posted.append("in place" if addend is MPI.IN_PLACE else "of copies")
            return MPI.REQUEST_NULL

        def Irecv(self, into: object, rank: int, tag: int) -> MPI.Request:
            posted.append("in two steps")
            return MPI.REQUEST_NULL

        def Isend(self, part: object, rank: int, tag: int) -> MPI.Request:
            return MPI.REQUEST_NULL

    assert MpiLane(PlayedComm(), on_host, told_of_deaths=False).sum_in_place(torch.zeros(values))()()
    assert set(posted) == {way if values == LEAST_CUT_VALUES else "in place"}
    assert not MpiLane(PlayedComm(), on_host, told_of_deaths=True).in_two_steps


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
