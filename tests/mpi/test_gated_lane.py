"""Sums whose library spins until all ranks have come, as NCCL's kernels do: with Gloo in its place.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planes import Finish

from hetsync.plane.groups import GatedLane, open_gloo
from hetsync.plane.mpi import MpiMessages
from hetsync.plane.polled import PolledSums
from hetsync.plane.rendezvous import rendezvous_by_messages
from hetsync.plane.wire import WIRE_FORMATS, round_trip

pytestmark = pytest.mark.mpi


class Noting:
    """A group that notes what was posted."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.posted: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.posted.append(name)
        posted: Callable[..., Any] = getattr(self._group, name)
        return posted


def test_nothing_is_posted_before_all_have_come(finish: Finish) -> None:
    messages = MpiMessages()
    rendezvous = rendezvous_by_messages(messages, 30)
    store = rendezvous.connect()
    group, gate = (open_gloo(store, name, messages.rank, messages.size, 30) for name in ("sums", "gate"))
    noting = Noting(group)
    lane = GatedLane(noting, gate)
    sums = PolledSums("gated", messages.rank, messages.size, lane, lane)
    last = messages.size - 1
    for wire in WIRE_FORMATS:
        noting.posted.clear()
        tensor = torch.ones(3000)
        if messages.rank != last:
            handle = sums.allreduce(tensor, wire)
            for _ in range(50):
                assert not handle.done()
                time.sleep(1e-3)
            assert not noting.posted
        messages.barrier()
        if messages.rank == last:
            handle = sums.allreduce(tensor, wire)
        finish(handle, name=f"gated {wire} sum")
        assert noting.posted == (["allreduce"] if wire == "float32" else ["alltoall_base", "_allgather_base"])
        assert torch.equal(tensor, messages.size * round_trip(torch.ones(3000), wire))
    sums.close()
    messages.close()
