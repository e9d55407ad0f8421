"""The planes that the contract suites run over, and what they look at."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mpi4py import MPI

from hetsync.emulation.link import EmulatedLink
from hetsync.plane.base import Messages, Plane, Sums
from hetsync.plane.choice import hierarchical_sums, torch_sums
from hetsync.plane.faulty import FaultyPlane
from hetsync.plane.groups import GatedLane, open_gloo
from hetsync.plane.local import LocalPlane
from hetsync.plane.mpi import MpiMessages, MpiPlane, MpiSums
from hetsync.plane.mpi_lane import Algorithm, algorithm_for
from hetsync.plane.polled import PolledSums
from hetsync.plane.rendezvous import rendezvous_by_messages
from hetsync.plane.shared_sums import SharedSums
from hetsync.plane.store import StoreMessages

Finish = Callable[..., None]


def torch_plane() -> Plane:
    """Sums by Gloo, messages by MPI."""
    messages = MpiMessages()
    return Plane(messages, gloo_sums(messages))


def gloo_sums(messages: Messages) -> Sums:
    return torch_sums(messages, rendezvous_by_messages(messages, 30))


def store_plane() -> Plane:
    """Messages by the store, and sums by Gloo in the way of NCCL's: each posted once all ranks have come."""
    world = MpiMessages()
    rendezvous = rendezvous_by_messages(world, 30)
    messages, store = StoreMessages(rendezvous), rendezvous.connect()
    world.close()
    groups = [open_gloo(store, name, messages.rank, messages.size, 30) for name in ("sums", "gate")]
    lane = GatedLane(*groups)
    return Plane(messages, PolledSums("gated Gloo", messages.rank, messages.size, lane, lane))


def horovod_plane() -> Plane:
    """Sums by Horovod, messages by MPI."""
    pytest.importorskip("horovod.torch", reason="needs Horovod, which launch/horovod builds", exc_type=ImportError)
    from hetsync.plane.horovod import HorovodSums

    messages = MpiMessages()
    return Plane(messages, HorovodSums(messages))


def mixed_plane(flat_sums: Callable[[MpiMessages], Sums]) -> Plane:
    """Two kinds of ranks, even and odd, joined by Gloo where devices would be by NCCL."""
    messages = MpiMessages()
    ranks = range(messages.size)
    kinds = [ranks[0::2], ranks[1::2]]
    sums = hierarchical_sums(
        "Gloo within kinds, another between",
        messages,
        flat_sums(messages),
        rendezvous_by_messages(messages, 30),
        [kind for kind in kinds if kind],
        torch.device("cpu"),
    )
    return Plane(messages, sums)


def mpi_plane_between_hosts() -> Plane:
    """As if each rank were on a host of its own."""
    with patch("hetsync.plane.mpi.ranks_here", lambda among: 1):
        plane = MpiPlane()
    assert plane.sums._first.algorithm == algorithm_for(plane.size, most_on_a_host=1, told_of_deaths=False)
    return plane


def mpi_plane_without_shared_memory() -> Plane:
    """As one rank does not see another's."""
    sees = MPI.COMM_WORLD.Get_rank() > 0
    with nullcontext() if sees else patch("hetsync.plane.shared_memory.opened", side_effect=PermissionError):
        plane = MpiPlane()
    assert plane.sums.shared_memory is None
    return plane


def mpi_plane_that_sums_by(algorithm: Algorithm) -> Plane:
    with patch("hetsync.plane.mpi.algorithm_for", lambda *among: algorithm), patch.object(SharedSums, "open", unshared):
        return MpiPlane()


def unshared(*among: object) -> None:
    """In place of `SharedSums.open`, on all ranks."""


BACKENDS: dict[str, Callable[[], Plane]] = {
    "mpi": MpiPlane,
    "mpi between hosts": mpi_plane_between_hosts,
    "mpi without shared memory": mpi_plane_without_shared_memory,
    "torch": torch_plane,
    "horovod": horovod_plane,
    "store": store_plane,
    "emulated-link": lambda: EmulatedLink(MpiPlane(), latency_seconds=1e-3, bytes_per_second=1e10),
    "emulated-link around torch": lambda: EmulatedLink(torch_plane(), latency_seconds=1e-3, bytes_per_second=1e10),
    "faulty": lambda: FaultyPlane(MpiPlane(), ()),
    **(
        {"local": LocalPlane}
        if MPI.COMM_WORLD.Get_size() == 1
        else {"mixed": lambda: mixed_plane(lambda world: MpiSums(world.mpi))}
    ),
}


def addend(rank: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + rank))


def addends(plane: Plane, n: int, seed: int = 0) -> list[torch.Tensor]:
    return [addend(rank, n, seed) for rank in range(plane.size)]


def assert_same_bits(plane: Plane, *tensors: torch.Tensor) -> None:
    bits = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]
    assert plane.gather_objects(bits) == [bits] * plane.size


def receive(plane: Messages, count: int, seconds: float = 20.0) -> list[tuple[int, Any]]:
    messages: list[tuple[int, Any]] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count:
        messages += plane.receive()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(messages)} of {count} messages after {seconds} s")
        time.sleep(1e-4)
    return messages
