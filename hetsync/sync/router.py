"""The way of messages between the ranks and the coordinator on rank 0.

If every rank sent to rank 0 itself, a few thousand of them would be all that it could answer (docs/results/scale.md).
So each 64 ranks have a leader, the first of them. What they report until rank 0 has read the leader's last message goes
into its next, so messages grow as rank 0 has more to do; and the leader hands out what rank 0 has for them. Of up to 64
ranks, rank 0 leads all, and nothing is passed on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetsync.plane.base import Plane
from hetsync.sync.messages import (
    Alive,
    Event,
    EventBatch,
    Exclude,
    GroupBatch,
    InstructionBatch,
    Look,
    Message,
    Notice,
    Ping,
    Probe,
    Seen,
)

GROUP = 64


@dataclass
class Inbox:
    """What has arrived for this rank, message by message, and the number of messages that are for others."""

    instructions: list[Sequence[Notice]] = field(default_factory=list)
    events: list[Sequence[Event]] = field(default_factory=list)
    signs: list[Probe | Alive | Look | Seen | Exclude] = field(default_factory=list)
    passed_on: int = 0


class Router:
    """One rank's end; called from its communication thread."""

    def __init__(self, plane: Plane, group: int | None = None) -> None:
        """`group` ranks have a leader; None says `GROUP`."""
        self._plane = plane
        self._group = group or GROUP
        self._leader = self._leader_of(plane.rank)
        self._early: Sequence[tuple[int, Message]] = ()  # have come already
        self._outgoing: list[Event] = []  # to rank 0, of this rank and of those whom it leads
        self._own: deque[Sequence[Notice]] = deque()  # from the coordinator, where it lives

    def _leader_of(self, rank: int) -> int:
        members = self._plane.members
        return members[members.index(rank) // self._group * self._group]

    def begin_anew(self, early: Sequence[tuple[int, Message]]) -> None:
        """Members are others now, and what was on its way is void; `early` has come since."""
        self._leader = self._leader_of(self._plane.rank)
        self._early = early
        self._outgoing = []
        self._own.clear()

    def send_events(self, events: Sequence[Event]) -> None:
        """To the coordinator, from a rank without one. Call it at every poll, also without events: those of others may
        wait here."""
        self._outgoing += events
        leads = self._leader == self._plane.rank
        first = self._plane.members[0]
        if self._outgoing and not (leads and self._plane.unread(first)):
            self._plane.send(EventBatch(self._outgoing), first if leads else self._leader)
            self._outgoing = []

    def send_instructions(self, by_rank: Mapping[int, Sequence[Notice]]) -> None:
        """From the coordinator, or from a leader to its group."""
        groups: dict[int, dict[int, Sequence[Notice]]] = defaultdict(dict)
        for rank, instructions in by_rank.items():
            if rank == self._plane.rank:
                self._own.append(instructions)
            elif (leader := self._leader_of(rank)) == self._plane.rank:
                self._plane.send(InstructionBatch(instructions), rank)
            else:
                groups[leader][rank] = instructions
        for leader, group in groups.items():
            self._plane.send(GroupBatch(group), leader)

    def pop_own(self) -> Sequence[Sequence[Notice]]:
        """The instructions for this rank itself that `send_instructions` was given since the last call."""
        own, self._own = self._own, deque()
        return own

    def receive(self) -> Inbox:
        """Takes in what has arrived, and passes on what is not for this rank."""
        inbox = Inbox()
        message: Message
        early, self._early = self._early, ()
        for _, message in [*early, *self._plane.receive()]:
            match message:
                case InstructionBatch():
                    inbox.instructions.append(message.instructions)
                case EventBatch() if self._plane.leads:
                    inbox.events.append(message.events)
                case EventBatch():
                    self._outgoing += message.events
                    inbox.passed_on += 1
                case GroupBatch():
                    self.send_instructions(message.by_rank)
                    inbox.passed_on += 1
                case Ping():
                    pass
                case Probe() | Alive() | Look() | Seen() | Exclude():
                    inbox.signs.append(message)
                case _:
                    raise AssertionError(f"rank {self._plane.rank} has got a {type(message).__name__}")
        return inbox
