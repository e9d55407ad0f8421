"""Stream positions at which something is due: all ranks come to rest, or the anchor is evaluated while they go on.

Pure data and books, like the state machine that keeps them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Reasons to rest.
STOP = "stop requested"
CHECKPOINT = "checkpoint"
EPOCH = "end of an epoch"
JOIN = "a rank joins"
CALL = "a call of the script"
ROLLBACK = "back to a checkpoint"
TOO_FEW = "too few ranks are left"
ALL_LEFT = "all ranks have left their loops"

Marks = Callable[[int], int | None]
"""The next marked stream position after one, if any is left."""


@dataclass(frozen=True)
class Milestone:
    """Stream position at which all ranks come to rest, and why."""

    position: int
    reason: str
    final: bool = False


Milestones = Callable[[int], Milestone]
"""The next milestone after a stream position."""


def no_marks(position: int) -> int | None:
    """Nothing is marked."""
    return None


def marks_every(samples: int | None, total: int) -> Marks:
    """Marks at the multiples of `samples` below `total`; None marks nothing."""

    def following(position: int) -> int | None:
        due = (position // samples + 1) * samples if samples else total
        return due if due < total else None

    return following


def at_ends_of_batches(marks: Marks, batch: int, interval: int | None, total: int) -> Marks:
    """Each mark at the first end of a batch at or after it, so that no rest cuts one; several that fall into one batch
    are one. Batches of `batch` samples are cut anew in each interval, or, without intervals, from the stream's
    beginning."""
    interval = interval or max(1, total)

    def begin(position: int) -> int:
        return position // interval * interval + position % interval // batch * batch

    def end(position: int) -> int:
        first = position // interval * interval
        return first + min(interval, -(-(position - first) // batch) * batch)

    def following(position: int) -> int | None:
        due = marks(begin(position))
        return None if due is None or end(due) >= total else end(due)

    return following


def checkpoints_every(samples: int | None, batch: int, interval: int | None, total: int) -> Marks:
    """Marks of checkpoints that are due after so many samples each."""
    return at_ends_of_batches(marks_every(samples, total), batch, interval, total)


def rests_at(marks: Marks, reason: str, total: int) -> Milestones:
    """Rests at the marks, and a final one at the end."""
    return rests_for({reason: marks}, total)


def rests_for(reasons: Mapping[str, Marks], total: int) -> Milestones:
    """Rests at the marks of several reasons, the first of which holds where they meet; and a final one at the end."""

    def following(position: int) -> Milestone:
        due = [(mark, reason) for reason, marks in reasons.items() if (mark := marks(position)) is not None]
        if not due:
            return Milestone(total, "end", True)
        mark, reason = min(due, key=lambda found: found[0])
        return Milestone(mark, reason)

    return following


class Rests:
    """The rest that comes next, and those that were asked for."""

    def __init__(self, milestones: Milestones, position: int) -> None:
        self._milestones = milestones
        self._requested: deque[str] = deque()  # to follow the rest that is already inevitable
        self.next = milestones(position)

    def bring_forward(self, frontier: int, reason: str) -> bool:
        """Rest at the frontier of what is handed out; False where all ranks come to rest there for another reason."""
        if frontier >= self.next.position:
            return False
        self.next = Milestone(frontier, reason)
        return True

    def request(self, frontier: int, reason: str) -> None:
        """The same, but with a rest of its own, unless one that was asked for so is still to come."""
        coming = frontier >= self.next.position and self.next.reason == reason
        if not coming and reason not in self._requested and not self.bring_forward(frontier, reason):
            self._requested.append(reason)

    def go_back(self, applied: int) -> None:
        """Rest as soon as what is handed out is over, with `applied` samples by now: all that comes after is to be done
        again. Rests that were asked for follow it."""
        if self.going_back:
            return
        if self.next != self._milestones(applied):
            self._requested.appendleft(self.next.reason)
        self.next = Milestone(applied, ROLLBACK)

    @property
    def going_back(self) -> bool:
        return self.next.reason == ROLLBACK

    @property
    def requested(self) -> tuple[str, ...]:
        """Reasons of rests that are to follow the next."""
        return tuple(self._requested)

    def resume(self, rest: Milestone, requested: Iterable[str]) -> None:
        """Go on from what another has known."""
        self.next, self._requested = rest, deque(requested)

    def repeat(self, rest: Milestone) -> None:
        """All have come to this rest, and are to come to it once more before they go on to the next; or to another, at
        which they go back, and after which it comes again."""
        if self.going_back:
            return
        # One that is due at its position anyway comes again, also where all have gone back to before others.
        if self.next not in (rest, self._milestones(self.next.position - 1)):
            self._requested.appendleft(self.next.reason)
        self.next = rest

    def advance(self, position: int) -> None:
        """All ranks have come to rest at `position`."""
        self.next = Milestone(position, self._requested.popleft()) if self._requested else self._milestones(position)


@dataclass(frozen=True)
class Evaluation:
    """What all ranks have found at the weights that they shared when round `round` had landed.

    `parts` are what the ranks have found, in rank order, on parts of the test data that do not overlap.
    """

    round: int
    samples_applied: int
    parts: tuple[Any, ...]


class Snapshots:
    """Which rounds' anchors are evaluated, by all ranks and while they go on, and who has done its part.

    One at a time: while somebody has not, the next waits.
    """

    def __init__(self, marks: Marks, position: int) -> None:
        self.next = marks(position)  # the samples from which on one is due
        self._marks = marks
        self._due_from = self.next  # what the newest one was due from
        self._round = -1  # none
        self._applied: int | None = None  # once the round is complete
        self._whole = True
        self._parts: dict[int, Any] = {}
        self.awaited: set[int] = set()  # ranks that have not done their part

    def go_back(self, position: int) -> None:
        """What lies behind is evaluated again."""
        self.next = self._due_from = self._marks(position)

    def due(self, reaches: int) -> bool:
        """Is the anchor to be evaluated after a round that brings the job to `reaches` samples or more?"""
        if self.next is None or reaches < self.next or self.awaited:
            return False
        self._due_from, self.next = self.next, self._marks(reaches)
        return True

    def due_from(self, at_drain: bool) -> int | None:
        """What `next` would be if the one that is under way had not begun; `at_drain`: the newest is."""
        return self._due_from if at_drain or (self._round >= 0 and self._whole) else self.next

    def resume(self, due_from: int | None, owed: Mapping[int, int]) -> None:
        """Go on where an evaluation is due from `due_from` on. Ranks, with its round, that are at one still end it
        first, and nobody asks what they have found."""
        self.next = due_from
        if owed:
            self.request(max(owed.values()), owed)
            self._whole, self._applied = False, 0

    def request(self, number: int, ranks: Collection[int]) -> None:
        """The anchor of round `number` is to be evaluated by these ranks."""
        self._round, self._applied, self._whole = number, None, True
        self._parts, self.awaited = {}, set(ranks)

    def round_applied(self, number: int, applied: int) -> None:
        """Round `number` is complete, and with it `applied` samples: where these fall short of what the evaluation
        was due from, as a round before has brought nothing, another is due there."""
        if number == self._round:
            self._applied = applied
            if self._due_from is not None and applied < self._due_from:
                self.next = self._due_from

    def record_part(self, rank: int, number: int, part: Any) -> bool:
        """A rank has done its part; False if it was not asked to."""
        if rank not in self.awaited or number != self._round:
            return False
        self.awaited.discard(rank)
        self._parts[rank] = part
        return True

    def remove_rank(self, rank: int) -> None:
        """Its part will not come: what the others find is not of the whole test data."""
        if rank in self.awaited:
            self.awaited.discard(rank)
            self._whole = False

    def pop_complete(self) -> Evaluation | None:
        """The evaluation that has become complete, once."""
        if self._applied is None or self._round < 0 or self.awaited:
            return None
        parts = tuple(part for _, part in sorted(self._parts.items()))
        done = Evaluation(self._round, self._applied, parts)
        self._round = -1
        return done if self._whole else None
