"""What all channels promise (`hetsync/plane/base.py`).

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from planes import BACKENDS

from hetsync.errors import UserError
from hetsync.plane.base import Channels, LateError, Plane, Sums
from hetsync.plane.gloo_channels import GlooChannels
from hetsync.plane.groups import open_gloo
from hetsync.plane.mpi import MpiChannels, MpiMessages
from hetsync.plane.rendezvous import rendezvous_by_messages

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


@pytest.fixture(params=["mpi", "store"])
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    plane = BACKENDS[request.param]()
    yield plane
    plane.close()


@pytest.fixture
def channels(plane: Plane) -> Iterator[Channels]:
    channels = plane.open_channels()
    yield channels
    channels.close()


def sent_by(rank: int, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return [
        torch.randn(3, 1 + number, generator=generator),
        torch.randn(100_000 * number, generator=generator).bfloat16(),
        torch.randn(4, 5, generator=generator).t(),
        torch.tensor([True, False]),
        torch.tensor(7 * rank),
        torch.empty(0, 3, dtype=torch.long),
    ]


def test_tensors_arrive_in_order_with_shapes_and_types(plane: Plane, channels: Channels) -> None:
    others = [rank for rank in range(plane.size) if rank != plane.rank]
    for number in range(4):
        for to in others:
            channels.send({"from": plane.rank, "number": number}, sent_by(plane.rank, number), to)
    for number in range(4):
        for source in reversed(others):
            note, tensors = channels.receive(source)
            assert note == {"from": source, "number": number}
            for tensor, expected in zip(tensors, sent_by(source, number), strict=True):
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
    channels.flush()


def test_channels_are_apart_from_messages_and_from_each_other(plane: Plane, channels: Channels) -> None:
    second = plane.open_channels()
    to, source = (plane.rank + 1) % plane.size, (plane.rank - 1) % plane.size
    second.send("second", [], to)
    plane.send("message", to)
    channels.send("first", [], to)
    assert channels.receive(source)[0] == "first"
    assert second.receive(source)[0] == "second"
    assert plane.gather_objects(plane.rank) == list(range(plane.size))
    second.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_a_rank_that_sends_nothing_is_named(kind: str) -> None:
    messages = MpiMessages()
    rendezvous = rendezvous_by_messages(messages, 30)
    group = open_gloo(rendezvous.connect(), "late", messages.rank, messages.size, 30)
    late = MpiChannels(messages.mpi, 0.2) if kind == "mpi" else GlooChannels(group, 0.2)
    if messages.rank == 0:
        with pytest.raises(LateError, match="for rank 1"):
            late.receive(1)
    messages.barrier()
    messages.close()


def test_an_emulated_link_refuses_what_it_cannot_slow() -> None:
    plane = BACKENDS["emulated-link"]()
    with pytest.raises(UserError, match="cannot be slowed to an emulated link"):
        plane.open_channels()
    plane.close()


def sum_up(plane: Plane, groups: Sequence[tuple[int, ...]], opened: Sequence[Sums]) -> None:
    """Each to its own in the same order, all at once."""
    tensors = [torch.full((70_000,), float(plane.rank + 1)) for _ in groups]
    handles = [sums.allreduce(tensor) for sums, tensor in zip(opened, tensors, strict=True)]
    deadline = time.monotonic() + 20
    while not all([handle.done() for handle in handles]):
        assert time.monotonic() < deadline
    for group, tensor in zip(groups, tensors, strict=True):
        assert torch.equal(tensor, torch.full((70_000,), float(sum(rank + 1 for rank in group))))
    for sums in opened:
        sums.close()


def test_some_ranks_sum_beside_the_others(plane: Plane) -> None:
    """A rank may be among several."""
    groups = [group for group in ((0, 1), (plane.size - 1, 0), tuple(range(plane.size))) if plane.rank in group]
    sum_up(plane, groups, [plane.open_sums(group) for group in groups])


def test_the_same_ranks_may_sum_in_several(plane: Plane) -> None:
    """One is late, so that the others could meet what it has left for the one before."""
    groups, opened = [tuple(range(plane.size))] * 3, []
    for group in groups:
        if plane.rank == plane.size - 1:
            time.sleep(0.3)
        opened.append(plane.open_sums(group))
    sum_up(plane, groups, opened)
