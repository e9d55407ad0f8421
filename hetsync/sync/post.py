"""Letters between the ranks and the coordinator on rank 0.

If every rank wrote to rank 0 itself, a few thousand of them would be all that it could answer (docs/scale.md). So each
64 ranks have a leader, the first of them. It puts what they say until rank 0 has read the last letter into the next, so
letters grow as rank 0 has more to do; and it hands out what rank 0 has for them. Of up to 64 ranks, rank 0 leads all,
and nothing is passed on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetsync.plane.base import Plane
from hetsync.sync.messages import Alive, Event, Give, Instruction, Probe, StartRound

GROUP = 64


@dataclass
class Mail:
    """What has arrived for this rank, letter by letter, and the number of letters that went on to others."""

    instructions: list[Sequence[Instruction]] = field(default_factory=list)
    events: list[Sequence[Event]] = field(default_factory=list)
    signs: list[Probe | Alive] = field(default_factory=list)
    passed_on: int = 0


class Post:
    """One rank's end; called from its communication thread."""

    def __init__(self, plane: Plane, group: int | None = None) -> None:
        """`group` ranks have a leader; None says `GROUP`."""
        self._plane = plane
        self._group = group or GROUP
        self._leader = self._leader_of(plane.rank)
        self._heard: list[Event] = []  # to go to rank 0, of this rank and of those whom it leads
        self._own: deque[Sequence[Instruction]] = deque()  # from the coordinator, where it lives

    def _leader_of(self, rank: int) -> int:
        return rank // self._group * self._group

    def tell(self, events: Sequence[Event]) -> None:
        """To the coordinator, from a rank without one; call it at every look, with or without a word of its own."""
        self._heard += events
        leads = self._leader == self._plane.rank
        if self._heard and not (leads and self._plane.unread(0)):
            self._plane.send(self._heard, 0 if leads else self._leader)
            self._heard = []

    def deliver(self, letters: Mapping[int, Sequence[Instruction]]) -> None:
        """From the coordinator, by rank."""
        bundles: dict[int, dict[int, Sequence[Instruction]]] = defaultdict(dict)
        for rank, instructions in letters.items():
            if rank == self._plane.rank:
                self._own.append(instructions)
            elif (leader := self._leader_of(rank)) == self._plane.rank:
                self._plane.send(instructions, rank)
            else:
                bundles[leader][rank] = instructions
        for leader, bundle in bundles.items():
            self._plane.send(bundle, leader)

    def own(self) -> Sequence[Sequence[Instruction]]:
        """Letters from the coordinator to this rank itself since the last call."""
        own, self._own = self._own, deque()
        return own

    def receive(self) -> Mail:
        """Takes in what has arrived, and passes on what is not for this rank."""
        mail = Mail()
        for _, letter in self._plane.receive():
            if isinstance(letter, Probe | Alive):
                mail.signs.append(letter)
            elif isinstance(letter, dict):
                self.deliver(letter)
                mail.passed_on += 1
            elif isinstance(letter[0], Give | StartRound):
                mail.instructions.append(letter)
            elif self._plane.rank == 0:
                mail.events.append(letter)
            else:
                self._heard += letter
                mail.passed_on += 1
        return mail
