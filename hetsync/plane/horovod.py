"""Sums by Horovod over MPI, which is beside messages by MPI: `launch/horovod` builds it.

Horovod has one background thread a process. Ranks post collectives under names, and a collective begins once all
ranks have posted its name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch

from hetsync.errors import UserError, cause
from hetsync.plane.base import LostError, Messages
from hetsync.plane.polled import Lane, PolledSums, Post
from hetsync.plane.staging import Test

try:
    import horovod.torch as hvd
except (ImportError, OSError, RuntimeError) as error:
    raise UserError(
        f"run.plane is horovod, but Horovod cannot be loaded here ({cause(error)}): build it by launch/horovod, which"
        " pip alone cannot, or use run.plane auto"
    ) from error

SETTINGS = {
    # Milliseconds between looks at what was posted, for which ranks wait for each other in a loop, also where nobody
    # has posted anything: at Horovod's own 1 ms that takes a part of a core that one notices.
    "HOROVOD_CYCLE_TIME": "5",
    # What is fused depends on when each sum was posted, and so would the last bits of sums, run by run.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Of ranks that are late for a minute: HetSync itself says who, by run.timeout_seconds.
    "HOROVOD_STALL_CHECK_DISABLE": "1",
}


class HorovodLane(Lane):
    """Collectives of all ranks, under names that begin with the lane's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        # A lane posts in the same order on all ranks, so numbers make names that are equal there.
        self._names = (f"{name} {number}" for number in itertools.count())

    def sum_in_place(self, values: torch.Tensor) -> Post:
        return self._post(lambda name: hvd.allreduce_async_(values, name=name, op=hvd.Sum))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        return self._post(
            lambda name: hvd.alltoall_async(sent, name=name),
            lambda result: received.copy_(result[0]),  # beside it, how much came from whom
        )

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        return self._post(lambda name: hvd.allgather_async(own, name=name), all_ranks.copy_)

    def _post(self, begin: Callable[[str], int], take: Callable[[Any], object] = lambda result: None) -> Post:
        def post() -> Test:
            handle = begin(next(self._names))

            def test() -> bool:
                if not hvd.poll(handle):
                    return False
                take(_result_of(handle))
                return True

            return test

        return post


def _result_of(handle: int) -> Any:
    try:
        return hvd.synchronize(handle)
    except RuntimeError as error:
        raise LostError(f"Horovod has lost another rank, which has most likely ended ({cause(error)})") from error


class HorovodSums(PolledSums):
    """Sums over all ranks of `messages`, which go by MPI; building it is collective, and no two are open at a time."""

    def __init__(self, messages: Messages) -> None:
        _start()
        if (hvd.rank(), hvd.size()) != (messages.rank, messages.size):
            raise UserError(
                f"run.plane is horovod, but Horovod sees {hvd.size()} ranks where MPI sees {messages.size}: build it"
                " by launch/horovod against the MPI that mpi4py loads"
            )
        super().__init__("Horovod", messages.rank, messages.size, HorovodLane("first"), HorovodLane("second"))


def _start() -> None:
    """Once a process: Horovod 0.28.1 crashes where it begins anew with such settings. It ends itself, at exit."""
    if not hvd.is_initialized():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        hvd.init()
