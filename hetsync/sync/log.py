"""What the leader of a replica tells its followers: all that it does to its weights, in its order.

They do the same to theirs, in the same order, so that all stages of a replica put the same tasks into the same rounds,
and compute on the same versions. A leader's two threads write it, each entry under the lock under which they do what it
says; its communication thread sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hetsync.plane.some_ranks import SomeRanks
from hetsync.sync.messages import DrainRequested, StartRound, Task


class Coming(NamedTuple):
    """The task will be computed: its samples may be loaded."""

    task: Task


class Began(NamedTuple):
    """The main thread begins the task."""

    task: Task


class Applied(NamedTuple):
    """The main thread has taken over what rounds below `version` have brought."""

    version: int


class Closed(NamedTuple):
    """A slice of the task is over, its step made, and what has landed is applied."""


class Finished(NamedTuple):
    """The task is over: its progress may go out."""

    task: int


class Joined(NamedTuple):
    """The communication thread has joined a round, with what was finished (`contributes`) or with zeros."""

    start: StartRound
    contributes: bool


class Landed(NamedTuple):
    """The round's sums are in, on all ranks of the replica, and go into the anchor."""

    start: StartRound


Entry = Coming | Began | Applied | Closed | Finished | Joined | Landed


class LogBatch(NamedTuple):
    """From a leader to each of its followers."""

    entries: Sequence[Entry]


class Summed(NamedTuple):
    """From a follower: its sums of this round are in."""

    round: int


class Followers:
    """A leader's; of a replica on one rank there are none."""

    def __init__(self, plane: SomeRanks | None = None, ranks: Sequence[int] = ()) -> None:
        """`plane` of the leaders, which puts aside what followers say."""
        self._plane, self._ranks = plane, tuple(ranks)
        self._untold: deque[Entry] = deque()
        self._summed = dict.fromkeys(self._ranks, -1)  # the newest round of each

    def tell(self, entry: Entry) -> None:
        if self._ranks:
            self._untold.append(entry)

    def send(self) -> None:
        """Communication thread."""
        if self._plane is None or not self._untold:
            return
        batch = LogBatch([self._untold.popleft() for _ in range(len(self._untold))])
        for rank in self._ranks:
            self._plane.send(batch, rank)

    def receive(self) -> tuple[int, list[DrainRequested]]:
        """How much they have told, and what of it is for the coordinator."""
        told = self._plane.take_aside() if self._plane is not None else []
        requests = []
        for rank, message in told:
            if isinstance(message, Summed):
                self._summed[rank] = message.round
            else:
                assert isinstance(message, DrainRequested)
                requests.append(message)
        return len(told), requests

    def have_summed(self, number: int) -> bool:
        return all(newest >= number for newest in self._summed.values())
