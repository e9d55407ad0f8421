"""Messages without MPI: small ones by a store of torch, the blocking calls by Gloo.

A message is a key of the store, which its receiver deletes when it is read. A thread of each rank waits in the store
for the next one, so that nothing is polled over the network.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hetsync.errors import INTERNAL_ERROR, UserError, announce, cause
from hetsync.plane import codec
from hetsync.plane.base import (
    Channels,
    LostError,
    MembersLost,
    Messages,
    PlaneError,
    Summoned,
    Sums,
    named,
    wait_limit,
)
from hetsync.plane.blocking import wait_until
from hetsync.plane.ending import leave, within
from hetsync.plane.gloo_channels import GlooChannels
from hetsync.plane.groups import TorchSums, completion_of
from hetsync.plane.lifelines import Lifeline
from hetsync.plane.rendezvous import ADDRESS, ENDLESS, WORD, Rendezvous
from hetsync.plane.shared_memory import SharedMemory
from hetsync.plane.store_members import SECONDS_TO_ENTER, StoreMembers
from hetsync.plane.store_places import OVER, First, StoreNewcomer, StoreSummoned, leave_unneeded

RANK_BYTES = 4  # of the sender, before a message
SECONDS_TO_STOP = 0.05
STOP = b"stop"  # in place of a message, to a rank's own listener


class StoreMessages(Messages):
    """Among the ranks of a rendezvous; building it is collective.

    `tolerant`: a death is `MembersLost`, but rank 0's, which ends the job. A `newcomer` is alone until it has entered.
    """

    messages_by = "torch's store"
    outlives_first = False

    def __init__(self, rendezvous: Rendezvous, tolerant: bool = False, newcomer: StoreNewcomer | None = None) -> None:
        self.rank, self.tolerant, self.replaces = rendezvous.rank, tolerant, tolerant
        self.newcomer = newcomer
        self._ranks_at_start = rendezvous.size
        self._rendezvous = rendezvous  # its server lives as long as the messages
        self._timeout_seconds = rendezvous.timeout_seconds
        self._closed = False
        self._one_call = threading.Lock()  # held by a blocking call, and while members change
        self._unheeded = False
        self._summoned: list[StoreSummoned] = []
        self._word = secrets.token_hex()  # that this job answers at its store, and no other
        self._new = False  # it has entered, and met nobody yet
        if newcomer is None:
            self._live_by(Lifeline.of_all(rendezvous), rendezvous.connect)
            if self.leads and self.replaces:
                self.group_members.job_store.set(WORD, self._word)
                self.group_members.job_store.set(ADDRESS, rendezvous.address)
        else:
            own = dist.HashStore()
            own.set_timeout(ENDLESS)
            self._live_by(Lifeline([self.rank], None), lambda: own)

    def _live_by(self, lifeline: Lifeline, connect: Callable[[], dist.Store]) -> None:
        """Collective: meet those who are left by it."""
        self._lifeline = lifeline
        self._listening_store = connect()  # of the thread that waits in it
        told = self.rank, self._timeout_seconds, self.tolerant
        self._meet(StoreMembers(connect, lifeline, *told, address=self._rendezvous.address))

    @property
    def ranks_at_start(self) -> int:
        return self._ranks_at_start

    def _meet(self, members: StoreMembers) -> None:
        """Collective among them; nothing that was on its way before will arrive."""
        self.group_members, self.members = members, members.ranks
        self._last_sent: dict[int, str] = {}
        self._opened: Counter[str] = Counter()  # so far, by name: a group's keys in the store are its own
        self._inbox = _Inbox(members, self._listening_store)
        self._meetings = _Meetings(members)

    def send(self, message: Any, to: int) -> None:
        members = self.group_members
        members.look()
        members.require(to)
        with _store_errors(members):
            key = f"message/{to}/{members.store.add(f'sent/{to}', 1)}"
            members.store.set(key, self.rank.to_bytes(RANK_BYTES, "big") + codec.dumps(message))  # type: ignore[arg-type]
        self._last_sent[to] = key

    def unread(self, to: int) -> bool:
        members = self.group_members
        members.look()
        with _store_errors(members):
            # They are read in order.
            return to in self._last_sent and members.store.check([self._last_sent[to]])

    def receive(self) -> Sequence[tuple[int, Any]]:
        self.group_members.look()
        return self._inbox.take()

    # Blocking calls.

    @contextmanager
    def _meeting_of_all(self) -> Iterator[_Meetings]:
        with self._one_call:
            if self._unheeded:
                raise MembersLost("another rank has gone")
            yield self._meetings
            self._new = False

    def gather_objects(self, value: Any) -> list[Any]:
        with self._meeting_of_all() as meetings:
            return meetings.gather(value)

    def broadcast_object(self, value: Any) -> Any:
        with self._meeting_of_all() as meetings:
            return meetings.broadcast(value)

    def open_channels(self) -> Channels:
        return GlooChannels(self.group_members.group(self._name("channels")), self._timeout_seconds)

    def open_sums(self, ranks: Sequence[int]) -> Sums:
        return self.group_members.sums(f"{self._name(f'sums of {named(ranks)}')} ", ranks)

    def _name(self, kind: str) -> str:
        self._opened[kind] += 1
        return f"{kind} {self._opened[kind]}"

    # A death.

    def mend(self) -> None:
        self.group_members.revoke()  # a call of the other thread comes to its end
        with self._one_call:
            self._unheeded = True
            self._inbox.close()
            self._meet(self.group_members.mended())

    def heed(self) -> None:
        self._unheeded = False

    # A replacement.

    @property
    def asked_at(self) -> Mapping[str, Any] | None:
        at = self._rendezvous
        if not self.replaces:
            return None
        return {"host": at.host, "port": at.port, "prefix": at.prefix, "word": self._word}

    def summon(self, rank: int, told: Any) -> Summoned:
        door = self._lifeline.open_door(rank, self._timeout_seconds)
        first = First(rank, self._ranks_at_start, door, codec.dumps(told))
        self._summoned = [each for each in self._summoned if not each.over]
        self._summoned.append(StoreSummoned(self._rendezvous.connect(), first))
        return self._summoned[-1]

    def admit(self, rank: int, address: str) -> None:
        with self._one_call:
            self._unheeded = True
            members = self.group_members.joined_by(rank)
            self._inbox.close()
            self._meet(members)

    def enter(self, members: Sequence[int], address: str) -> None:
        assert isinstance(self.newcomer, StoreNewcomer)
        try:
            with within(SECONDS_TO_ENTER, lambda: leave_unneeded("it could not enter in time")):
                self._inbox.close()
                door = self.newcomer.door
                lifeline = Lifeline.of_newcomer(self.rank, self._rendezvous.host, door, SECONDS_TO_ENTER)
                self._live_by(lifeline, self._rendezvous.connect)
        except (LostError, UserError) as error:
            leave(INTERNAL_ERROR, f"the job has not let this process in: {error}")
        self.newcomer, self._new = None, True
        announce(f"this process is rank {self.rank} of the job from now on")

    # The end.

    def abort(self, code: int) -> NoReturn:
        if isinstance(self.newcomer, StoreNewcomer):
            self.newcomer.give_up()
        if self.newcomer is not None or self._new:
            leave(code)  # the others go on
        self._lifeline.end_job(code)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.barrier()
        for summoned in self._summoned:
            summoned.dismiss(0)
        if self.leads and self.replaces:
            self.group_members.job_store.set(OVER, "")
        self._inbox.close()
        self._lifeline.expect_close()
        self._meetings.end()
        self._lifeline.close()


class StoreSums(TorchSums):
    """Sums over the members of such messages; building it is collective. By Gloo they go on after a death."""

    def __init__(self, messages: StoreMessages, own: SharedMemory | None = None) -> None:
        """`own`: memory that this rank has shared with other members before."""
        members = messages.group_members
        place, size = members.ranks.index(members.rank), len(members.ranks)
        gloo = members.sums(own=own)
        super().__init__(gloo, members.store, place, size, members.timeout_seconds, address=members.address)
        self.tolerant = messages.tolerant

    def among(self, messages: Messages) -> Sums:
        assert isinstance(messages, StoreMessages)
        return StoreSums(messages, self.shared_memory)


class _Inbox:
    """What has come for this rank from other members, and the thread that waits for it."""

    def __init__(self, members: StoreMembers, store: dist.Store) -> None:
        """`store`: a connection that nobody else waits in meanwhile."""
        self._members = members
        self._arrived: deque[tuple[int, Any, str]] = deque()
        self._failure: UserError | PlaneError | None = None
        self._awaited = ""  # the key
        self._listener = threading.Thread(None, self._listen, "hetsync-messages", (members.keys(store),), daemon=True)
        self._listener.start()

    def take(self) -> list[tuple[int, Any]]:
        if self._failure is not None:
            raise self._failure
        taken: list[tuple[int, Any]] = []
        while self._arrived:
            sender, message, key = self._arrived.popleft()
            with _store_errors(self._members):
                self._members.store.delete_key(key)
            taken.append((sender, message))
        return taken

    def close(self) -> None:
        """The thread has ended. One who died may have left a number without a message, at which it waits for ever."""
        while self._listener.is_alive():
            if self._awaited:
                with _store_errors(self._members):
                    self._members.store.set(self._awaited, STOP)  # type: ignore[arg-type]
            self._listener.join(SECONDS_TO_STOP)

    def _listen(self, store: dist.Store) -> None:
        """Until something goes wrong, which `take` raises: a rank that heard nothing any more would wait for ever."""
        try:
            for number in count(1):
                self._awaited = key = f"message/{self._members.rank}/{number}"
                with _store_errors(self._members):
                    data = store.get(key)
                if data == STOP:
                    return
                sender = int.from_bytes(data[:RANK_BYTES], "big")
                self._arrived.append((sender, codec.loads(data[RANK_BYTES:], sender=sender), key))
        except (UserError, PlaneError) as failure:
            self._failure = failure
        except Exception as error:
            self._failure = PlaneError(f"a message that cannot be read: {type(error).__name__}: {cause(error)}")


class _Meetings:
    """The main thread's blocking calls, over a group of their own: they sleep while they wait, end in time, and say who
    is late, as the store knows who has come."""

    def __init__(self, members: StoreMembers) -> None:
        self._members = members
        self._store, self._size = members.store, len(members.ranks)
        self._leads = members.rank == members.ranks[0]
        self._limit_seconds = wait_limit(members.rank, members.timeout_seconds)
        self._number = 0
        with _store_errors(members):
            self._store.set(f"came/{members.rank}", "0")
        self._group = members.group("meetings")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self._come()
        data, own = codec.dumps_own(value)
        lengths = self._all_gather(torch.tensor([len(data)]))
        sent = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._all_gather(sent).view(self._size, -1)
        return [codec.loads(bytes(part[:length].numpy()), own) for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The first rank's value on every rank."""
        self._come()
        data = bytearray(codec.dumps(value) if self._leads else b"")
        length = torch.tensor([len(data)])
        self._wait(self._group.broadcast([length]))
        told = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(int(length), dtype=torch.uint8)
        self._wait(self._group.broadcast([told]))
        return codec.loads(bytes(told.numpy()))

    def end(self) -> None:
        """The last meeting. Nobody asks the store after it, which ends with rank 0's process or with torchrun."""
        self._all_gather(torch.zeros(1, dtype=torch.float32))

    def _come(self) -> None:
        self._number += 1
        self._members.look()
        with _store_errors(self._members):
            self._store.set(f"came/{self._members.rank}", str(self._number))

    def _all_gather(self, own: torch.Tensor) -> torch.Tensor:
        gathered = own.new_empty(self._size * own.numel())
        self._wait(self._group._allgather_base(gathered, own))
        return gathered

    def _wait(self, work: dist.Work) -> None:
        completed = completion_of(work, self._members)
        wait_until(completed, self._limit_seconds, lambda: named(self._late()))

    def _late(self) -> list[int]:
        with _store_errors(self._members):
            came = {rank: int(self._store.get(f"came/{rank}")) for rank in self._members.ranks}
        return [rank for rank, number in came.items() if number < self._number]


@contextmanager
def _store_errors(members: StoreMembers) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise members.failure_of_store(error) from error
