"""What the policy knows of ranks and rounds, and the table of its transitions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from hetsync.sync.messages import Piece, StartRound


class Activity(Enum):
    RESTING = auto()  # holds no work
    STARTING = auto()  # holds a piece that it may begin now, from version `floor` or later
    COMPUTING = auto()  # on a piece begun from version `floor`
    BLOCKED = auto()  # holds a piece that it may begin only after another round


WORKING = (Activity.STARTING, Activity.COMPUTING)  # will speak without another round


class Cause(Enum):
    GIVEN = auto()
    GIVEN_AT_BOUND = auto()
    BEGAN = auto()
    FINISHED_MAY_BEGIN = auto()
    FINISHED_AT_BOUND = auto()
    FINISHED_EMPTY_HANDED = auto()
    RELEASED = auto()


TRANSITIONS = {
    (Activity.RESTING, Cause.GIVEN): Activity.STARTING,
    # It rested with work that waits for a round: its share was 0, or a peer left its samples.
    (Activity.RESTING, Cause.GIVEN_AT_BOUND): Activity.BLOCKED,
    (Activity.STARTING, Cause.GIVEN): Activity.STARTING,
    (Activity.COMPUTING, Cause.GIVEN): Activity.COMPUTING,
    (Activity.BLOCKED, Cause.GIVEN): Activity.BLOCKED,
    (Activity.STARTING, Cause.BEGAN): Activity.COMPUTING,
    # The rank saw its round complete before rank 0 did.
    (Activity.BLOCKED, Cause.BEGAN): Activity.COMPUTING,
    (Activity.COMPUTING, Cause.FINISHED_MAY_BEGIN): Activity.STARTING,
    (Activity.COMPUTING, Cause.FINISHED_AT_BOUND): Activity.BLOCKED,
    (Activity.COMPUTING, Cause.FINISHED_EMPTY_HANDED): Activity.RESTING,
    (Activity.BLOCKED, Cause.RELEASED): Activity.STARTING,
}


@dataclass
class Work:
    """A piece on its way through one rank. `version` is the one it began from, once it has begun."""

    piece: Piece
    version: int = -1


@dataclass
class Member:
    """What the coordinator knows of one live rank."""

    share: int
    floor: int = 0
    activity: Activity = Activity.RESTING
    held: deque[Work] = field(default_factory=deque)  # not begun
    current: Work | None = None
    ready: list[Work] = field(default_factory=list)  # finished, in no round yet
    flying: list[Work] = field(default_factory=list)  # in a round that is not complete
    pace: int | None = None  # with q = 1: the version that its next piece belongs to

    @property
    def working(self) -> bool:
        return self.activity in WORKING

    @property
    def under_way(self) -> list[Work]:
        """What it computes and what it holds: it may have begun the next of these and not have said so yet."""
        return [*([self.current] if self.current is not None else []), *self.held]

    def keep_pace(self, version: int, delay_bound: int) -> int:
        """The first version that its next piece may begin from, when nobody may run far ahead (q = 1)."""
        self.pace = (version if self.pace is None else self.pace) + 1
        return max(0, self.pace - 1 - delay_bound)

    def unapplied(self) -> dict[int, Work]:
        """By number. A synchronous piece is in its round from the start, and applied with it."""
        own = [work for work in self.under_way if work.piece.synchronous_round is None]
        return {work.piece.number: work for work in [*self.flying, *self.ready, *own]}


@dataclass
class Round:
    """A round under way: over once its sum has arrived and every contributor has said what it put in."""

    start: StartRound
    unheard: set[int]
    summed: bool = False
