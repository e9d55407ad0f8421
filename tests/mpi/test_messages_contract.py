"""What all messages promise (`hetsync/plane/base.py`), at any world size.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from planes import BACKENDS, receive

from hetsync.plane.base import Plane

pytestmark = pytest.mark.mpi


@pytest.fixture(params=list(BACKENDS))
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    plane = BACKENDS[request.param]()
    yield plane
    plane.close()


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


class Metric:
    """Of a user's own, with a function of its module's."""

    def __init__(self, values: list[int]) -> None:
        self.values, self.merge = values, doubled


def doubled(values: list[int]) -> list[int]:
    return values * 2


def test_objects_of_a_class_that_all_ranks_give_are_gathered(plane: Plane) -> None:
    told = [each["metric"] for each in plane.gather_objects({"metric": Metric([plane.rank])})]
    assert [metric.merge(metric.values) for metric in told] == [[rank, rank] for rank in range(plane.size)]


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


@pytest.mark.each_value(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("plane", ["mpi", "store"], indirect=True)  # the others have messages of one of them
def test_waiting_burns_no_core(plane: Plane) -> None:
    waited = 1.5
    # Horovod's own thread, once started, takes up to a whole core whatever we do.
    cpu_seconds = time.thread_time if "horovod" in sys.modules else time.process_time
    plane.barrier()
    used = cpu_seconds()
    if plane.rank == 0:
        time.sleep(waited)
    plane.barrier()
    assert cpu_seconds() - used < waited / 2  # a busy machine makes each look at it dearer
