"""Sums by torch.distributed: Gloo for CPU tensors, NCCL for CUDA tensors where every rank has a device of its own.

Groups are made here, not by `init_process_group`: a script may have a default group of its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetsync.config.schema import WireFormat
from hetsync.errors import INTERNAL_ERROR, OwnMistakeError, cause
from hetsync.plane.base import Handle, LostError, PlaneError, Residual, Sums, wait_limit
from hetsync.plane.blocking import wait_until
from hetsync.plane.ending import leave, within
from hetsync.plane.polled import Lane, PolledSums, Post, Waiting
from hetsync.plane.rendezvous import ENDLESS
from hetsync.plane.shared_memory import SharedMemory
from hetsync.plane.shared_sums import SharedSums
from hetsync.plane.staging import Test
from hetsync.shortage import shortage

UNSENT = 1  # the first of the tags under which nobody sends; that of channels is another


class GlooGroup:
    """A group of Gloo's that can be given up, which `ProcessGroupGloo.abort` of torch 2.13 does not."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort(self) -> None:
        """The last call. What is pending fails, also where it waits for ranks that live, unless its message is on its
        way already: Gloo leaves such a one as it is."""
        held, self._group = [self._group], None
        # Gloo gives a connection up, and all others to the group over the same device, where a call is late.
        for tag in range(UNSENT, UNSENT + len(held[0].options._devices)):  # which take turns by tags
            for other in range(held[0].size()):
                if other != held[0].rank():
                    with suppress(RuntimeError):
                        held[0].recv([torch.empty(1)], other, tag).wait(timedelta(milliseconds=1))
        # Its destructor waits for what is still pending, in whichever thread has the last reference.
        threading.Thread(None, held.clear, "hetsync-aborting", daemon=True).start()


def open_gloo(
    store: dist.Store, name: str, rank: int, size: int, timeout_seconds: float, address: str = ""
) -> GlooGroup:
    """Collective: a group of all ranks; `name` is its own. `address`: at which others reach this one, as in a
    `Rendezvous`. UserError where they do not reach each other in time."""
    timeout = timedelta(seconds=timeout_seconds)
    try:
        how: Any = timeout if not address else _options_at(address, timeout)
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, how)
    except RuntimeError as error:
        unconnected = (
            f"Gloo does not connect the ranks ({cause(error)}): set GLOO_SOCKET_IFNAME to the network interface that"
            " reaches all hosts"
        )
        raise OwnMistakeError(f"rank {rank}: {shortage(error) or unconnected}") from error
    group._set_default_timeout(ENDLESS)
    return GlooGroup(group)


def _options_at(address: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return options


class Watch:
    """Over the ranks of groups: this one knows nothing but their libraries' errors."""

    def look(self) -> None:
        """Raise where one of them has gone."""

    def failure(self, error: RuntimeError) -> LostError:
        """What an error of a library means."""
        return LostError(f"lost another rank, which has most likely ended ({cause(error)})")


UNWATCHED = Watch()


def completion_of(work: dist.Work, watch: Watch = UNWATCHED) -> Test:
    """Whether it has come to its end; `LostError` where it has failed, or will not."""

    def test() -> bool:
        watch.look()
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise watch.failure(error) from error
        return True

    return test


class GroupLane(Lane):
    """The collectives of one group of torch.distributed."""

    reads: torch.device | None = None  # as in `PolledSums`

    def __init__(self, group: Any, watch: Watch = UNWATCHED) -> None:
        super().__init__()
        self.group = group
        self._watch = watch

    def sum_in_place(self, values: torch.Tensor) -> Post:
        return self._post(lambda: self.group.allreduce([values]))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        return self._post(lambda: self.group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()))

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        return self._post(lambda: self.group._allgather_base(all_ranks, own))

    def broadcast(self, values: torch.Tensor) -> Post:
        """Of the group's first rank."""
        return self._post(lambda: self.group.broadcast([values], dist.BroadcastOptions()))

    def close(self) -> None:
        """Only after everything has come to its end."""

    def abort(self) -> None:
        """In place of `close`, where something will not."""
        with suppress(RuntimeError):
            self.group.abort()

    def _post(self, begin: Callable[[], dist.Work]) -> Post:
        return lambda: completion_of(begin(), self._watch)


class GatedLane(GroupLane):
    """For libraries that spin on the device until all ranks have come, as NCCL does: each collective is posted once
    all ranks have come to it and are ready, which a small collective of `gate`'s, a Gloo group, tells.

    `context`: entered to post; on CUDA, a stream that waits for nothing else.
    """

    def __init__(
        self, group: Any, gate: Any, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        super().__init__(group)
        self._gate = gate
        self._context = context

    def all_here(self) -> Waiting[None]:
        come = completion_of(self._gate.allreduce([torch.zeros(1, dtype=torch.float32)]))
        while not come():
            yield

    def abort(self) -> None:
        super().abort()
        self._gate.abort()

    def _post(self, begin: Callable[[], dist.Work]) -> Post:
        def post() -> Test:
            with self._context():
                return completion_of(begin())

        return post


# Torch's own threads end a process whose collective fails or hangs, with a dump of stacks and before a sentence is
# said; whoever polls sees it, too.
WATCHDOGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


@contextmanager
def _unwatched() -> Iterator[None]:
    """A group of NCCL's that is made inside has no such threads, unless the environment asks for them. Others, of a
    script's own, keep theirs."""
    mine = {name: value for name, value in WATCHDOGS.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


class NcclLane(GatedLane):
    """The collectives of ranks that have a CUDA `device` each; building it is collective among them.

    One for all: two groups' kernels on one device could each wait for what the other holds.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout_seconds: float,
        address: str = "",
    ) -> None:
        # Before the blocks of a slice that wait for multiprocessors.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = ENDLESS
        with _unwatched():
            group = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)
        stream = torch.cuda.Stream(device)
        gate = open_gloo(store, f"{name} gate", rank, size, timeout_seconds, address)
        super().__init__(group, gate, lambda: torch.cuda.stream(stream))
        self.reads = device

    def close(self) -> None:
        self.group.shutdown()


def sum_one(lane: GroupLane, device: torch.device, seconds: float) -> None:
    """Collective, in the main thread: one value. RuntimeError where the lane does not sum it within `seconds`; where
    its library does not come back for twice as long this process ends."""
    size = lane.group.size()
    sums, value = PolledSums("a trial", 0, size, lane, lane, lane.reads), torch.ones(1, device=device)
    late = (
        f"{device} of {socket.gethostname()} has waited {2 * seconds:.0f} s to be joined to others: NCCL_DEBUG=INFO"
        " tells more, and NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 may help"
    )
    with within(2 * seconds, lambda: leave(INTERNAL_ERROR, late)):
        wait_until(sums.allreduce(value).done, seconds, lambda: "its first sum")
        total = float(value)
    if total != size:
        raise PlaneError(f"its first sum is {total:g} in place of {size}")


class TorchSums(Sums):
    """Sums over ranks that have come to a store, by these sums of `gloo`, until others are chosen. `rank` and `size`
    are those of groups, `address` as in `open_gloo`.

    `server`: of the store, where this rank holds it; kept as long as the sums.
    """

    def __init__(
        self,
        gloo: PolledSums,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float = 600.0,
        server: Any = None,
        address: str = "",
    ) -> None:
        self._rank, self._size = rank, size
        self._timeout_seconds = timeout_seconds
        self._store, self._server, self._address = store, server, address
        self._nccl: NcclLane | None = None
        self._gloo = self._of_cuda = gloo

    @property
    def by_nccl(self) -> bool:
        return self._nccl is not None

    def open_nccl(self, device: torch.device) -> NcclLane:
        """Collective: a lane for `use_nccl`. Every rank has a `device` of its own."""
        place = self._rank, self._size, device, self._timeout_seconds, self._address
        return NcclLane(self._store, "nccl", *place)

    def use_nccl(self, lane: NcclLane) -> None:
        """Sums of CUDA tensors by NCCL from now on."""
        self.tolerant = False  # its kernels cannot be given up
        self._nccl = lane
        self._of_cuda = PolledSums("NCCL", self._rank, self._size, lane, lane, lane.reads)

    @property
    def sums_by(self) -> str:
        return self._of_cuda.sums_by

    @property
    def moves(self) -> int:
        return sum(sums.moves for sums in {self._gloo, self._of_cuda})

    @property
    def failed(self) -> bool:
        return self._gloo.failed or self._of_cuda.failed

    @property
    def shared_memory(self) -> SharedMemory | None:
        return self._gloo.shared_memory

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        return self._gloo.allocate(count, device)

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        return (self._of_cuda if tensor.is_cuda else self._gloo).allreduce(tensor, wire, residual)

    def close(self) -> None:
        for sums in (self._gloo, self._of_cuda):
            sums.close()
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None


def gloo_sums(
    open_group: Callable[[str], Any],
    rank: int,
    size: int,
    timeout_seconds: float,
    watch: Watch = UNWATCHED,
    own: SharedMemory | None = None,
) -> PolledSums:
    """Collective. `open_group` opens a group of these ranks under a name of its own; `rank` is this one's in it. `own`:
    memory that this rank has shared with other members before."""
    first, second = (GroupLane(open_group(lane), watch) for lane in ("first", "second"))

    def gather(numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        mine, everyones = torch.tensor(numbers), torch.empty(size * len(numbers), dtype=torch.int64)
        completed = completion_of(first.group._allgather_base(everyones, mine), watch)
        wait_until(completed, wait_limit(rank, timeout_seconds), lambda: "other ranks to open their sums")
        found: list[list[int]] = everyones.view(size, -1).tolist()
        return found

    shared = SharedSums.open(rank, size, gather, watch.look, own) if size > 1 else None
    return PolledSums("Gloo", rank, size, first, second, shared=shared)
