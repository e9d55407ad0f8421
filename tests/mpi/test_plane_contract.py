"""What every plane promises, messages and sums together (`hetsync/plane/base.py`), at any world size.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planes import BACKENDS, Finish, addend, receive

from hetsync.plane.base import Plane
from hetsync.plane.faulty import Corrupt, Delay, Drop, FaultyPlane, Stall
from hetsync.plane.mpi import MpiPlane
from hetsync.plane.wire import WIRE_FORMATS

pytestmark = pytest.mark.mpi


@pytest.fixture(params=list(BACKENDS))
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    plane = BACKENDS[request.param]()
    yield plane
    plane.close()


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


def test_faults_fire_where_they_are_addressed(finish: Finish) -> None:
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
