"""Messages and sums over MPI, polled, on memory that MPI reads directly.

Importing this initialises MPI.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from hetsync.errors import UserError
from hetsync.launchers import reaches_later_processes, told_of_deaths
from hetsync.plane import codec
from hetsync.plane.base import Channels, MembersLost, Messages, Plane, PlaneError, Summoned, Sums, named
from hetsync.plane.blocking import BlockingCollectives, wait_until
from hetsync.plane.ending import within
from hetsync.plane.mpi_lane import MpiLane, algorithm_for
from hetsync.plane.mpi_members import MPI, SECONDS_TO_TELL, MpiMembers, gathered, memory, ranks_here
from hetsync.plane.mpi_summoned import (
    SECONDS_TO_COME_UP,
    SECONDS_TO_ENTER,
    MpiNewcomer,
    MpiSummoned,
    die,
    leave_unneeded,
    parent,
)
from hetsync.plane.parcels import empty_parcel, packed
from hetsync.plane.polled import PolledSums
from hetsync.plane.shared_memory import SharedMemory
from hetsync.plane.shared_sums import SharedSums


class MpiSums(PolledSums):
    """Sums over all members, or over these `ranks`; building it is collective among them.

    CUDA tensors travel through host memory, whatever MPI it is: CUDA-aware ones read CUDA memory in messages and in
    blocking collectives, but Open MPI not in non-blocking ones; and what travels in messages is added up on the host.
    """

    tolerant = True

    def __init__(
        self,
        members: MpiMembers,
        timeout_seconds: float = 600.0,
        ranks: Sequence[int] | None = None,
        own: SharedMemory | None = None,
    ) -> None:
        """`own`: memory that this rank has shared with other members before."""
        self._members = members
        with members.errors("opening sums"):
            comm = members.communicator(ranks)
            rank, size = comm.Get_rank(), comm.Get_size()
            gather = partial(gathered, comm, timeout_seconds, "open their sums")
            everyones = gather((ranks_here(comm), told_of_deaths()))
            most_on_a_host, told = (max(numbers) for numbers in zip(*everyones, strict=True))
            algorithm = algorithm_for(size, most_on_a_host, bool(told))
            # Where MPI tells of deaths: no other message comes by this communicator.
            look: Callable[[], object] = comm.Iprobe if told else lambda: None
            one_host = most_on_a_host == size > 1
            shared = SharedSums.open(rank, size, gather, look, own) if one_host else None
            self._lanes = MpiLane(comm, algorithm), MpiLane(members.communicator(ranks), algorithm)
        super().__init__("MPI", rank, size, *self._lanes, shared=shared)
        self._timeout_seconds = timeout_seconds
        self._closed = False

    def among(self, messages: Messages) -> Sums:
        assert isinstance(messages, MpiMessages)
        return MpiSums(messages.mpi, self._timeout_seconds, own=self.shared_memory)

    def _failure(self, error: Exception) -> PlaneError:
        if isinstance(error, MPI.Exception):
            return self._members.failure(f"allreduce on rank {self._members.rank}", error)
        return super()._failure(error)

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        with self._members.errors(f"closing on rank {self._members.rank}"):
            for lane in self._lanes:
                barrier = lane.comm.Ibarrier()
                wait_until(barrier.Test, self._timeout_seconds, lambda: "other ranks to end")
                self._members.release(lane.comm)
        self._closed = True


class MpiMessages(Messages):
    """Among all ranks of `MPI.COMM_WORLD`; building it is collective.

    `timeout_seconds` bounds each blocking call. `tolerate`: a death is `MembersLost`, where MPI tells of it. Raises
    `UserError` where MPI was not initialised for several threads.
    """

    messages_by = "MPI"

    def __init__(self, timeout_seconds: float = 600.0, tolerate: bool = True) -> None:
        _require_threads()
        self._timeout_seconds = timeout_seconds
        self._closed = False
        self._one_call = threading.Lock()  # held by a blocking call, and while members change
        self._unheeded = False
        self._summoned: list[Summoned] = []
        newcomer = None if (started_by := parent()) is None else MpiNewcomer(started_by)
        self._meet(MpiMembers.of_world(tolerate) if newcomer is None else MpiMembers.alone(newcomer.rank))
        self.newcomer = newcomer
        self.rank, self.tolerant = self.mpi.rank, self.mpi.tolerant
        self.replaces = self.tolerant and reaches_later_processes()
        self._ranks_at_start = self.size if newcomer is None else newcomer.ranks_at_start

    @property
    def ranks_at_start(self) -> int:
        return self._ranks_at_start

    def _meet(self, members: MpiMembers) -> None:
        """Collective among them; nothing that was on its way before will arrive."""
        self.mpi, self.members = members, members.ranks
        # A communicator for each thread, so that neither can take the other's messages.
        self._control, self._main = members.communicator(), members.communicator()
        self._meeting = BlockingCollectives(self._main, members.ranks, self._timeout_seconds, members.heed_end)
        self._outgoing: deque[tuple[MPI.Request, bytes, int]] = deque()
        self._incoming: deque[tuple[int, MPI.Request, bytearray]] = deque()

    def send(self, message: Any, to: int) -> None:
        data = codec.dumps(message)
        try:
            # Synchronous, so that a send that is done has arrived, and `close` leaves nothing on the way.
            request = self._control.Issend([data, MPI.BYTE], dest=self.mpi.place(to))
            self._outgoing.append((request, data, to))
            self._reap_sends()
        except MPI.Exception as error:
            raise self.mpi.failure(f"sending from rank {self.rank} to {to}", error) from error

    def unread(self, to: int) -> bool:
        with self.mpi.errors(f"sending from rank {self.rank} to {to}"):
            return any(receiver == to and not request.Test() for request, _, receiver in self._outgoing)

    def receive(self) -> Sequence[tuple[int, Any]]:
        try:
            self.mpi.heed_end()
            self._reap_sends()
            # Mostly there is nothing: of a poll that finds its code out of the cache, whatever is not done counts.
            if not self._incoming and not self._control.Iprobe():
                return []
            return self._take_in()
        except MPI.Exception as error:
            raise self.mpi.failure(f"receiving on rank {self.rank}", error) from error

    def _take_in(self) -> list[tuple[int, Any]]:
        self._start_receives()
        arrived: list[tuple[int, Any]] = []
        # Only from the front: a small message must not overtake a large one of the same sender.
        while self._incoming and self._incoming[0][1].Test():
            sender, _, data = self._incoming.popleft()
            arrived.append((sender, codec.loads(data, sender=sender)))
        return arrived

    def _start_receives(self) -> None:
        status = MPI.Status()
        while (message := self._control.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            self._incoming.append((self.members[status.Get_source()], message.Irecv([data, MPI.BYTE]), data))

    def _reap_sends(self) -> None:
        """From the front: with many on their way, a look at each would cost more than their memory."""
        while self._outgoing and self._outgoing[0][0].Test():
            self._outgoing.popleft()

    # Blocking calls.

    @contextmanager
    def _meeting_of_all(self, what: str) -> Iterator[BlockingCollectives]:
        with self._one_call:
            if self._unheeded:
                raise MembersLost("another rank has gone")
            with self.mpi.errors(what):
                yield self._meeting

    def gather_objects(self, value: Any) -> list[Any]:
        with self._meeting_of_all(f"gathering objects on rank {self.rank}") as meeting:
            return meeting.gather(value)

    def broadcast_object(self, value: Any) -> Any:
        with self._meeting_of_all(f"broadcasting an object to rank {self.rank}") as meeting:
            return meeting.broadcast(value)

    def open_channels(self) -> Channels:
        return MpiChannels(self.mpi, self._timeout_seconds)

    def open_sums(self, ranks: Sequence[int]) -> Sums:
        return MpiSums(self.mpi, self._timeout_seconds, ranks)

    # A death.

    def mend(self) -> None:
        self.mpi.revoke()  # a call of the other thread comes to its end
        with self._one_call:
            self._unheeded = True
            self._meet(self.mpi.mended())

    def heed(self) -> None:
        self._unheeded = False

    # A replacement.

    def summon(self, rank: int, told: Any) -> Summoned:
        summoned = MpiSummoned(rank, self._ranks_at_start, told)
        self._summoned.append(summoned)
        self.mpi.before_end.append(partial(summoned.dismiss, SECONDS_TO_TELL))
        return summoned

    def admit(self, rank: int, address: str) -> None:
        with self._one_call:
            self._unheeded = True
            self._meet(self.mpi.joined_by(rank, address))

    def enter(self, members: Sequence[int], address: str) -> None:
        try:
            with within(SECONDS_TO_ENTER, leave_unneeded):
                self._meet(self.mpi.entering(members, address))
        except (MPI.Exception, PlaneError):
            die()
        self.newcomer = None

    # The end.

    def abort(self, code: int) -> NoReturn:
        if self.newcomer is not None:
            die()  # the others go on
        self.mpi.end_job(code)

    def close(self) -> None:
        if self._closed:
            return
        for summoned in self._summoned:
            summoned.dismiss(SECONDS_TO_COME_UP)
        with self.mpi.errors(f"closing on rank {self.rank}"):
            self._wait(self._drained)
            barrier = self._main.Ibarrier()
            self._wait(lambda: self._drained() and barrier.Test())
            for comm in (self._control, self._main):
                self.mpi.release(comm)
            self.mpi.close()
        self._closed = True

    def _wait(self, done: Callable[[], bool]) -> None:
        wait_until(done, self._timeout_seconds, lambda: "other ranks to end")

    def _drained(self) -> bool:
        """Drop messages that nobody asked for any more, so that their senders come to an end."""
        self.receive()
        return not self._outgoing and not self._incoming


class MpiChannels(Channels):
    """Among all members; building it is collective. `timeout_seconds` bounds each wait."""

    def __init__(self, members: MpiMembers, timeout_seconds: float = 600.0) -> None:
        self._members = members
        self._comm = members.communicator()
        self._rank = members.rank
        self._timeout_seconds = timeout_seconds
        self._sending: deque[tuple[MPI.Request, torch.Tensor, int]] = deque()
        self._closed = False

    def send(self, note: Any, tensors: Sequence[torch.Tensor], to: int) -> None:
        with self._members.errors(f"sending from rank {self._rank} to {to}"):
            place = self._members.place(to)
            for part in packed(note, tensors):
                # Synchronous, so that what is done has been received.
                self._sending.append((self._comm.Issend([memory(part), MPI.BYTE], place), part, to))
            self._reap()

    def receive(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        with self._members.errors(f"receiving on rank {self._rank} from {source}"):
            note, tensors, parts = empty_parcel(self._header(source))
            place = self._members.place(source)
            requests = [self._comm.Irecv([memory(part), MPI.BYTE], place) for part in parts]
            self._wait(lambda: all(request.Test() for request in requests), source)
        return note, tensors

    def flush(self) -> None:
        with self._members.errors(f"sending from rank {self._rank}"):
            while self._sending:
                self._wait(self._sending[0][0].Test, self._sending[0][2])
                self._sending.popleft()

    def close(self) -> None:
        if self._closed:
            return
        self.flush()
        with self._members.errors(f"closing on rank {self._rank}"):
            wait_until(self._comm.Ibarrier().Test, self._timeout_seconds, lambda: "other ranks to end")
            self._members.release(self._comm)
        self._closed = True

    def _header(self, source: int) -> torch.Tensor:
        status, found = MPI.Status(), list[MPI.Message]()

        def arrived() -> bool:
            message = self._comm.Improbe(self._members.place(source), MPI.ANY_TAG, status)
            found.extend([] if message is None else [message])
            return message is not None

        self._wait(arrived, source)
        header = torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)
        found[0].Recv([memory(header), MPI.BYTE])
        return header

    def _reap(self) -> None:
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()

    def _wait(self, done: Callable[[], bool], rank: int) -> None:
        def looked() -> bool:
            self._members.heed_end()
            return done()

        wait_until(looked, self._timeout_seconds, lambda: named([rank]))


class MpiPlane(Plane):
    """Messages and sums over MPI, among all ranks of `MPI.COMM_WORLD`; building one is collective.

    `timeout_seconds` as in `MpiMessages`.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        messages = MpiMessages(timeout_seconds)
        super().__init__(messages, MpiSums(messages.mpi, timeout_seconds))


def _require_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "MPI runs without MPI_THREAD_MULTIPLE, which HetSync needs: use an MPI built with it, and let"
            " nothing initialise MPI, or set mpi4py.rc.thread_level, before HetSync"
        )
