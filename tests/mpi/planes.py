"""The planes that the contract suites run over, and what they look at."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hetsync.emulation.link import EmulatedLink
from hetsync.plane.base import Messages, Plane
from hetsync.plane.faulty import FaultyPlane
from hetsync.plane.local import LocalPlane
from hetsync.plane.mpi import MpiPlane

Finish = Callable[..., None]

BACKENDS: dict[str, Callable[[], Plane]] = {
    "mpi": MpiPlane,
    "emulated-link": lambda: EmulatedLink(MpiPlane(), latency_seconds=1e-3, bytes_per_second=1e10),
    "faulty": lambda: FaultyPlane(MpiPlane(), ()),
    **({"local": LocalPlane} if MPI.COMM_WORLD.Get_size() == 1 else {}),
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
