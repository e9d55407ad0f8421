"""Sums of one process: NCCL's lane where there is a GPU, and tensors of a GPU through the host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
import torch.distributed as dist
from ranks import busy

from hetsync.plane.groups import GatedLane, NcclLane, open_gloo, sum_one
from hetsync.plane.polled import PolledSums

WIRES = ("float32", "bfloat16", "int8")
VALUES = 100_003
NUMBERS = count()


@pytest.fixture
def lane(device: str) -> Iterator[GatedLane]:
    store, name = dist.HashStore(), f"lane {next(NUMBERS)}"
    if device == "cuda":
        opened: GatedLane = NcclLane(store, name, 0, 1, torch.device("cuda", 0), 60.0)
    else:
        sums, gate = (open_gloo(store, f"{name} {which}", 0, 1, 60.0) for which in ("sums", "gate"))
        opened = GatedLane(sums, gate)
    yield opened
    opened.close()


@pytest.fixture
def through_host(device: str) -> GatedLane:
    store, name = dist.HashStore(), f"host {next(NUMBERS)}"
    return GatedLane(open_gloo(store, name, 0, 1, 60.0), open_gloo(store, f"{name} gate", 0, 1, 60.0))


def sums_of(lane: GatedLane) -> PolledSums:
    return PolledSums("this lane", 0, 1, lane, lane, lane.reads)


def wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until, "a sum has not come in 20 s"
        time.sleep(1e-4)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", ["lane", "through_host"])
def test_it_sums_what_the_device_is_still_working_on(
    way: str, wire: str, device: str, request: pytest.FixtureRequest
) -> None:
    sums, tensors = sums_of(request.getfixturevalue(way)), []
    for number in range(4):
        busy(device)
        tensors.append(torch.full((VALUES,), number + 1.0, device=device))
    handles = [sums.allreduce(tensor, wire) for tensor in tensors]  # type: ignore[arg-type]
    wait(lambda: all([handle.done() for handle in handles]))
    for number, tensor in enumerate(tensors):
        assert float((tensor - (number + 1)).abs().max()) <= (0 if wire == "float32" else 0.02 * (number + 1))


def test_the_first_sum_of_a_job(lane: GatedLane, device: str) -> None:
    sum_one(lane, torch.device(device), 20.0)


def test_the_device_computes_while_a_sum_goes_through_the_host(cuda: torch.device, through_host: GatedLane) -> None:
    """The copies have a stream of their own: what the main thread queues meanwhile does not hold them back."""
    values = torch.ones(VALUES, device=cuda)
    handle = sums_of(through_host).allreduce(values)
    torch.cuda._sleep(2_000_000_000)  # about a second
    behind = torch.cuda.current_stream().record_event()
    wait(handle.done)
    assert not behind.query()
    torch.cuda.synchronize()
