"""Which samples a rank uses in which step, and where all ranks come to rest. Pure.

Positions are those of HetSync's sample stream (hetsync/data/ledger.py), so that every peer sees the same samples in the
same order, each once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hetsync.balance.shares import apportion


@dataclass(frozen=True)
class Step:
    """One slice of one rank: stream positions [start, stop).

    `batch` is what the gradients' sum over ranks is divided by, `position` where the learning rate's schedule stands.
    """

    start: int
    stop: int
    batch: int
    position: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


Segment = list[Step]


def rests(total: int, every: int | None) -> list[tuple[int, int]]:
    """The stretches of the stream between evaluations; the last ends with the samples."""
    marks = [*range(0, total, every or total), total]
    return list(pairwise(marks))


def part(start: int, stop: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """A rank's stretch of [start, stop), split over ranks by their shares, in rank order."""
    parts = apportion(stop - start, dict(enumerate(shares)))
    ends = list(accumulate(parts[r] for r in range(len(shares))))
    return start + ends[rank] - parts[rank], start + ends[rank]


def lockstep(total: int, batch: int, every: int | None, shares: Sequence[int], rank: int) -> list[Segment]:
    """Every rank takes part in every step, with its share of it (none of a tiny last step, perhaps)."""
    return [
        [
            Step(*part(start, min(start + batch, last), shares, rank), min(start + batch, last) - start, start)
            for start in range(first, last, batch)
        ]
        for first, last in rests(total, every)
    ]


def uneven(total: int, batch: int, every: int | None, weights: Sequence[int], rank: int) -> list[Segment]:
    """Steps of equal size on every rank, the number of them by weight: a fast rank has more of them."""
    size = max(1, batch // len(weights))
    return [list(_cut(first, last, size, batch, weights, rank)) for first, last in rests(total, every)]


def _cut(first: int, last: int, size: int, batch: int, weights: Sequence[int], rank: int) -> Iterator[Step]:
    mine, end = part(first, last, weights, rank)
    for start in range(mine, end, size):
        done = (start - mine) / (end - mine)
        yield Step(start, min(start + size, end), batch, first + int(done * (last - first)))


@dataclass
class TrainingClock:
    """A rank's seconds of training, which stand still while all evaluate.

    Ranks go on as far apart as they came: else an evaluation would be a barrier on the clock of those that do not meet
    at every step.
    """

    first: float = 0.0  # when the first rank came to rest
    lag: float = 0.0  # this rank's behind it, for which it waits before it goes on

    def at(self, since_rest: float) -> float:
        """So many seconds after ranks were free to go on."""
        return self.first + since_rest

    def rest(self, mine: float, everyones: Sequence[float]) -> None:
        """All have come to rest, each at its own time."""
        self.first = min(everyones)
        self.lag = mine - self.first
