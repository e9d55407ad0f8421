"""Planes over MPI in particular.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import random
import sys
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
from hetsync.plane.mpi_lane import LEAST_EXCHANGED, SEGMENT_VALUES_PER_RANK, MpiLane
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
    segments, fewer = 2 * SEGMENTS_IN_FLIGHT + 1, SEGMENTS_IN_FLIGHT
    large, less = ((n - 1) * SEGMENT_VALUES_PER_RANK * plane.size + 7 for n in (segments, fewer))
    sizes = (5, large, less, 3, large, LEAST_EXCHANGED + 1, less, 4)
    tensors = [torch.arange(n, dtype=torch.float32) % 1009 + plane.rank for n in sizes]
    handles = [plane.allreduce(tensor) for tensor in tensors]
    random.Random(plane.rank).shuffle(handles)
    while not all([handle.done() for handle in handles]):  # ended by the time limit of all tests
        assert all(len(requests) <= SEGMENTS_IN_FLIGHT for requests, _ in plane.sums._first._pending.values())
        time.sleep(2e-4)
    for tensor in tensors:
        each = torch.arange(tensor.numel(), dtype=torch.float32) % 1009
        assert torch.equal(tensor, plane.size * each + sum(range(plane.size)))
    assert plane.moves == 2 * (segments + fewer) + 4
    plane.close()


@pytest.mark.parametrize("most_exchanged", [0, sys.maxsize], ids=["copied", "exchanged"])
def test_between_hosts_sums_are_the_same_and_use_their_memory_again(finish: Finish, most_exchanged: int) -> None:
    plane = mpi_plane_between_hosts()
    lane = plane.sums._first
    lane._copies, lane._most_exchanged = True, most_exchanged  # whatever the number of ranks
    n = (3 * SEGMENTS_IN_FLIGHT + 1) * SEGMENT_VALUES_PER_RANK * plane.size + 7
    for _ in range(2):
        tensor = torch.arange(n, dtype=torch.float32) % 1009 + plane.rank
        finish(plane.allreduce(tensor), name="sum between hosts")
        assert torch.equal(tensor, plane.size * (torch.arange(n) % 1009).float() + sum(range(plane.size)))
        assert len(lane._spare) == len(lane._scratch) == SEGMENTS_IN_FLIGHT
    plane.close()


@pytest.mark.parametrize(
    ("on_host", "ranks", "copies", "most"),
    [
        (1, 1, False, 0),
        (2, 2, False, 0),  # in shared memory
        (4, 4, False, 0),
        (1, 3, True, sys.maxsize),
        (1, 4, True, 4 * 4 * SEGMENT_VALUES_PER_RANK),
        (1, 17, True, 0),
        (2, 4, True, 0),  # a host's link would carry what both of its ranks send
    ],
)
def test_which_way_segments_go(on_host: int, ranks: int, copies: bool, most: int) -> None:
    lane = MpiLane(type("Comm", (), {"Get_size": lambda _: ranks})(), on_host)
    assert (lane._copies, lane._most_exchanged) == (copies, most)


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
