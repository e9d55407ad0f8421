"""The contract between the engine and whatever carries its bytes: messages (`Messages`), sums (`Sums`), and a `Plane`,
which is one of each; and tensors between single ranks (`Channels`), opened where there is need of them.

Order. Every rank posts the same collectives in the same order, with the same sizes and wire formats; a
rank with nothing to give posts zeros. Rank A posting (1, 2) while rank B posts (2, 1) deadlocks both:

    A: allreduce 1 ... waits for B          B: allreduce 2 ... waits for A

Ownership. From `allreduce` until its handle is done, the tensor belongs to the plane: the caller neither
reads nor writes it. The handle keeps the tensor and every staging buffer alive. `send` copies: once it
returns, the message may be changed.

Completion. Nothing here blocks except `gather_objects`, `broadcast_object`, `barrier` and `close`, and these
sleep while they wait: a waiting rank must not burn the core that its device's host thread needs.

Failure. Anything that goes wrong raises `PlaneError`, from the call itself or from the handle's `done`;
`LateError` from a blocking call that waited too long, `LostError` where a rank has gone, `DamagedError` where a message
is not what was sent. A plane never retries. How
long a handle may take is the caller's business.

Death. Where a plane is `tolerant`, a rank's death is `MembersLost` (`LostError` where it held what the ranks meet at),
at every other rank and in either thread: from whatever was under way and from every later call, until `mend`. That is
called by one thread of each of those who are left, and waits until the other is in no call, which knows of it once it
calls `heed`. Afterwards nothing that was sent or posted before will arrive, or come to an end. A rank keeps the number
that it started with; `members` are the ranks that are left, and whatever is collective is among them.

Replacement. Where a plane `replaces`, the first member may start a process that takes the number of a rank that has
gone (`summon`). That one has a plane of its own at first, with itself as the only member (`newcomer`), on which it gets
ready, and knocks. When nothing is under way all members `admit` it, while it calls `enter`: as after `mend`, nothing
from before arrives, and the main thread's blocking calls raise MembersLost until `heed`. Members are in the order in
which they came: who has joined later comes later, whatever its number.

Threads. `allreduce`, `send`, `unread`, `receive` and the handles' `done` are called from one thread (the communication
thread); the blocking calls from another (the main thread), never two of them at once; `allocate` from either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from hetsync.config.schema import WireFormat
from hetsync.errors import UserError

Told = TypeVar("Told")
Allocate = Callable[[int, torch.device], torch.Tensor]  # so many float32 values there, flat and not cleared


class PlaneError(RuntimeError):
    """A message or a collective could not be carried out."""


class LateError(PlaneError):
    """Other ranks did not come in time; the message names them."""


class LostError(PlaneError):
    """Another rank has gone, or what the ranks meet at."""


class CutOffError(LostError):
    """So many have gone, whole hosts of them, that they may live and go on without this rank."""


class MembersLost(LostError):
    """Another rank has gone, and those who are left can go on: see `Plane.mend`."""


class DamagedError(PlaneError):
    """What has arrived is not what was sent, by rank `sender` where that is known."""

    def __init__(self, what: str, sender: int | None = None) -> None:
        super().__init__(what)
        self.sender = sender


def allocate_anywhere(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def wait_limit(rank: int, timeout_seconds: float) -> float:
    """Seconds to wait for other ranks: rank 0 knows most about who is late, so the others leave it time to say so."""
    return timeout_seconds if rank == 0 else 1.5 * timeout_seconds


def named(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, ranks))


class Handle(ABC):
    """A collective under way."""

    @abstractmethod
    def done(self) -> bool:
        """Move the collective on as far as it goes without waiting; True once the result is in the tensor."""


class Residual:
    """What rounding has taken from the sums of one stream of collectives so far, in the shard that this rank adds up.

    The caller keeps one a stream, whose tensors have one size, and the plane fills it: `values` belong at `first`.
    Those of another wire's shards are laid aside until a sum that is not rounded takes them.
    """

    def __init__(self) -> None:
        self.first = 0
        self.values: torch.Tensor | None = None
        self._aside: list[tuple[int, torch.Tensor]] = []

    def in_shard(self, values: int) -> torch.Tensor | None:
        """What is kept for a shard of so many values."""
        if self.values is not None and self.values.numel() != values:
            self._aside.append((self.first, self.values))
            self.values = None
        return self.values

    def take_all(self) -> list[tuple[int, torch.Tensor]]:
        """What is kept, and where it belongs; nothing is then."""
        kept = [*self._aside, *([(self.first, self.values)] if self.values is not None else [])]
        self._aside, self.values = [], None
        return kept


class Channels(ABC):
    """One rank's tensors to and from single other ranks, used by one thread; from one rank to another in order.

    What is sent takes its shapes and types along. CUDA tensors travel through the host's memory.
    """

    @abstractmethod
    def send(self, note: Any, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Begin to send tensors, and a small picklable note with them.

        CPU tensors that are contiguous are not copied: nobody may change them before `flush`.
        """

    @abstractmethod
    def receive(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        """What that rank sent next, in new memory of the host. Sleeps until it is there; `LateError` names the rank."""

    @abstractmethod
    def flush(self) -> None:
        """Return once all that was sent has been received, or `LateError`."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; collective. A second call does nothing."""


class Invitation(NamedTuple):
    """To a newcomer: the address at which the members admit it, and what else it is told."""

    address: str
    told: Any


class Summoned(ABC):
    """A process that was started in place of a rank that has gone, as the member sees it that has started it."""

    ready: Any = None  # what it told when it knocked
    gone = False  # it has ended, or could not be started

    @abstractmethod
    def invite(self, told: Any) -> str:
        """It enters now, and is told this. Returns the address at which all `admit` it. LostError where it has gone."""

    @abstractmethod
    def dismiss(self, seconds: float) -> None:
        """It is not needed, and ends, unless it was invited. Waits so long for it to hear that."""


class Newcomer(ABC):
    """This process, which takes the place of a rank that has gone, as long as it is no member."""

    @property
    @abstractmethod
    def told(self) -> Any:
        """By the member that has started it."""

    @abstractmethod
    def knock(self, told: Any) -> Invitation:
        """Tell that member that this process is ready, and wait to be invited. The process ends where it is not needed
        any more, also before."""


class Messages(ABC):
    """One rank's small messages to others, its blocking calls, and the end of the job."""

    rank: int  # the number that it started with, or whose place it has taken
    members: tuple[int, ...]  # the ranks that are left, ascending, and then those that have joined
    tolerant = False  # is a death `MembersLost`?
    outlives_first = True  # where it is: also the first member's?
    replaces = False  # can another process take the place of a rank that has gone?
    newcomer: Newcomer | None = None  # on such a process, until it has entered

    @property
    def size(self) -> int:
        """The number of ranks that are left."""
        return len(self.members)

    @property
    def leads(self) -> bool:
        """Is this the first of the ranks that are left: rank 0, while it lives?"""
        return self.rank == self.members[0] and self.newcomer is None

    @property
    def ranks_at_start(self) -> int:
        """The number of ranks that the job began with: none has a number as high."""
        return self.size

    @property
    @abstractmethod
    def messages_by(self) -> str:
        """What carries them, for people to read."""

    @abstractmethod
    def send(self, message: Any, to: int) -> None:
        """Send a small picklable message; messages from one rank to another arrive in order."""

    @abstractmethod
    def unread(self, to: int) -> bool:
        """Has that rank not received yet all that was sent to it?"""

    @abstractmethod
    def receive(self) -> Sequence[tuple[int, Any]]:
        """All messages that have arrived since the last call, as (sender, message), without waiting."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank (start-up, evaluation, reports)."""

    @abstractmethod
    def broadcast_object(self, value: Any) -> Any:
        """The first member's value on every rank; rank 0's, while it lives."""

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.gather_objects(None)

    @abstractmethod
    def open_channels(self) -> Channels:
        """Collective: tensors between single ranks. PlaneError where there is no other rank."""

    def open_sums(self, ranks: Sequence[int]) -> Sums:
        """Collective among these ranks, of which this is one: sums over them, beside those of all. PlaneError where
        these messages have none."""
        raise PlaneError(f"messages by {self.messages_by} open no sums over {named(ranks)}")

    def mend(self) -> None:
        """After MembersLost, collective among those who are left: `members` are these now. A death meanwhile may be
        MembersLost again. Blocking calls raise MembersLost until `heed`. Where nobody has gone, whoever calls it makes
        it MembersLost to the others."""
        raise LostError(f"messages by {self.messages_by} do not go on after a rank has gone")

    def heed(self) -> None:  # noqa: B027 - most are never mended
        """The main thread knows that members are others now: its next blocking call is among these."""

    @property
    def asked_at(self) -> Mapping[str, Any] | None:
        """Where processes that somebody starts by hand ask for the place of a rank that has gone; None where none can,
        or where the first member starts them itself. Plain values."""
        return None

    def summon(self, rank: int, told: Any) -> Summoned:
        """On the first member: start a process that takes the place of this rank, which has gone, or open the place for
        one that asks. Does not wait."""
        raise PlaneError(f"messages by {self.messages_by} cannot be joined by another rank")

    def admit(self, rank: int, address: str) -> None:
        """Collective among the members, while that rank enters: it is the last of them then. Where it raises
        MembersLost, as somebody has died, `mend` comes next, and members may be the same as before."""
        raise PlaneError(f"messages by {self.messages_by} cannot be joined by another rank")

    def enter(self, members: Sequence[int], address: str) -> None:
        """On a newcomer that was invited: join these, who admit it."""
        raise PlaneError(f"messages by {self.messages_by} cannot be joined by another rank")

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the whole job now, on all ranks, with this exit code. Does not return."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all ranks, and release everything; collective. A second call does nothing."""


class Sums(ABC):
    """One rank's part in the sums of tensors over all ranks."""

    @property
    @abstractmethod
    def sums_by(self) -> str:
        """What carries them, for people to read."""

    tolerant = False  # do they go on after a death?

    @property
    def moves(self) -> int:
        """How often a collective has moved on. While this grows, looking again soon lets it move on further."""
        return 0

    @property
    def failed(self) -> bool:
        """Whether a collective has failed. Later ones will not come to an end either, and nobody should wait."""
        return False

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        """So many float32 values, flat and not cleared, where these sums are fastest; what lies elsewhere is summed,
        too. Ranks need not ask alike, and the tensor outlives the sums."""
        return allocate_anywhere(count, device)

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        """Sum a flat, contiguous tensor of float32 or float64 over all ranks, in its own precision and in place;
        bit-identical results everywhere. It is of one type on all ranks.

        The low-precision formats round each rank's addend once and the sum once; they send an
        all-to-all of shards, add in float32, and all-gather the sums. What rounding takes from the addend is not
        fed back here: the caller that knows the value it meant (see `wire.round_trip`) does that. What it takes from
        the sum is known to the rank that adds up the shard, and is kept in `residual` for the next sum of that stream.
        A sum on the wire "float32", which rounds nothing, delivers all that is kept.
        """

    def among(self, messages: Messages) -> Sums:
        """New sums of the same kind among the members of messages that have been mended; collective. These ones must
        be kept until then: what they sum may still be written to."""
        raise LostError(f"sums by {self.sums_by} do not go on after a rank has gone")

    @abstractmethod
    def close(self) -> None:
        """Release everything; collective, and only after every handle is done. A second call does nothing."""


class Plane(Messages, Sums):
    """One rank's end of the job's communication: messages and sums put together, which may travel by different ways.

    Subclasses change what a plane does by overriding its methods; around another plane they are given it as both.
    """

    why = "given"  # this plane, for people to read

    def __init__(self, messages: Messages, sums: Sums) -> None:
        self.messages, self.sums = messages, sums
        self.rank, self.members, self.newcomer = messages.rank, messages.members, messages.newcomer
        self.times_mended = 0  # or let others join
        self.tolerant, self.outlives_first = messages.tolerant and sums.tolerant, messages.outlives_first

    @property
    def replaces(self) -> bool:  # type: ignore[override]
        return self.tolerant and self.messages.replaces

    @property
    def ranks_at_start(self) -> int:
        return self.messages.ranks_at_start

    @property
    def messages_by(self) -> str:
        return self.messages.messages_by

    @property
    def sums_by(self) -> str:
        return self.sums.sums_by

    @property
    def described(self) -> str:
        """What carries the bytes and why, for people to read."""
        return f"sums by {self.sums_by}, messages by {self.messages_by} ({self.why})"

    def settle(self, device: torch.device) -> None:
        """Collective, once every rank knows its device, and before sums of its tensors. UserError where they cannot be.

        A plane that chose its sums itself may now choose better ones.
        """

    def send(self, message: Any, to: int) -> None:
        self.messages.send(message, to)

    def unread(self, to: int) -> bool:
        return self.messages.unread(to)

    def receive(self) -> Sequence[tuple[int, Any]]:
        return self.messages.receive()

    def gather_objects(self, value: Any) -> list[Any]:
        return self.messages.gather_objects(value)

    def broadcast_object(self, value: Any) -> Any:
        return self.messages.broadcast_object(value)

    def barrier(self) -> None:
        self.messages.barrier()

    def open_channels(self) -> Channels:
        return self.messages.open_channels()

    def open_sums(self, ranks: Sequence[int]) -> Sums:
        return self.messages.open_sums(ranks)

    def mend(self) -> None:
        self.messages.mend()
        self._members_changed()

    def _members_changed(self) -> None:
        """Collective among those who are members now."""
        # Around another plane, which is both.
        self.sums = self.messages if isinstance(self.messages, Plane) else self.sums.among(self.messages)
        self.members, self.newcomer = self.messages.members, self.messages.newcomer
        self.times_mended += 1

    def heed(self) -> None:
        self.messages.heed()

    @property
    def asked_at(self) -> Mapping[str, Any] | None:
        return self.messages.asked_at if self.replaces else None

    def summon(self, rank: int, told: Any) -> Summoned:
        return self.messages.summon(rank, told)

    def admit(self, rank: int, address: str) -> None:
        self.messages.admit(rank, address)
        self._members_changed()

    def enter(self, members: Sequence[int], address: str) -> None:
        self.messages.enter(members, address)
        self._members_changed()

    def abort(self, code: int) -> None:
        self.messages.abort(code)

    @property
    def moves(self) -> int:
        return self.sums.moves

    @property
    def failed(self) -> bool:
        return self.sums.failed

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        return self.sums.allocate(count, device)

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        return self.sums.allreduce(tensor, wire, residual)

    def close(self) -> None:
        """Wait for all ranks and release; a plane whose sums have failed is left alone, since waiting would hang."""
        if not self.failed:
            self.sums.close()
            self.messages.close()


def decided_by_first(messages: Messages, decide: Callable[[], Told]) -> Told:
    """Collective: what `decide` returns on rank 0, on every rank; or its UserError, raised on every rank."""
    told: Told | UserError | None = None
    if messages.leads or messages.newcomer is not None:  # which is alone yet
        try:
            told = decide()
        except UserError as mistake:
            told = mistake
    told = messages.broadcast_object(told)
    if isinstance(told, UserError):
        raise told
    return cast(Told, told)


def made_by_all(messages: Messages, make: Callable[[], Told]) -> Told:
    """Collective: what `make` returns on this rank; the first UserError of any rank, raised on every rank."""
    made: Told | None = None
    mistake: UserError | None = None
    try:
        made = make()
    except UserError as error:
        mistake = error
    for told in messages.gather_objects(mistake):
        if told is not None:
            raise told
    return cast(Told, made)


def meet(plane: Plane, what: str, value: Any = None) -> list[Any]:
    """Collective: everybody's values. UserError where ranks have come to different calls."""
    members = plane.members  # a death later on changes them
    told = plane.gather_objects((what, value))
    for rank, (theirs, _) in zip(members, told, strict=True):
        if theirs != told[0][0]:
            raise UserError(
                f"rank {rank} came to {theirs} while rank {members[0]} came to {told[0][0]}: all ranks must call"
                " the same, in the same order (not within a condition on the rank)"
            )
    return [value for _, value in told]


class StalledError(RuntimeError):
    """Nothing moved for longer than the limit; the message names who was waited for."""
