"""How the ranks of a stage divide micro-batches: each computes a run of their samples, by speed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from hetsync.balance.profile import StepTime
from hetsync.balance.shares import speed_shares


def parts_by_speed(times: Sequence[StepTime], samples: int) -> tuple[int, ...]:
    """Samples of each of a stage's ranks. Where there are fewer than ranks, the fastest have one each."""
    if samples >= len(times):
        return speed_shares(times, samples)
    fastest = sorted(range(len(times)), key=lambda place: (times[place].seconds(1), place))[:samples]
    return tuple(int(place in fastest) for place in range(len(times)))


def bounds_of_pieces(parts: Iterable[Sequence[int]]) -> list[int]:
    """Where the pieces of a micro-batch begin, and the end of the last. `parts`: of each stage, those of its ranks."""
    return sorted({0, *(end for sizes in parts for end in accumulate(sizes))})


def without_short_pieces(parts: Sequence[Sequence[int]], least: int) -> list[tuple[int, ...]]:
    """The same where all pieces have `least` samples, if there are so many. Else a piece that has fewer goes with the
    next, or the last ones with the one before: some ranks have none then."""
    _, *bounds = bounds_of_pieces(parts)
    moved, kept = {0: 0}, 0
    for bound in bounds:
        if bounds[-1] - bound < least:
            kept = bounds[-1]
        elif bound - kept >= least:
            kept = bound
        moved[bound] = kept
    ends = [[moved[end] for end in accumulate(sizes, initial=0)] for sizes in parts]
    return [tuple(end - begin for begin, end in pairwise(each)) for each in ends]


def pieces_by_rank(parts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """By stage and rank, the samples of each piece that the rank computes, one pass after another."""
    pieces = [*pairwise(bounds_of_pieces(parts))]
    return [
        [
            tuple(end - begin for begin, end in pieces if first <= begin < last)
            for first, last in pairwise(accumulate(sizes, initial=0))
        ]
        for sizes in parts
    ]


@dataclass(frozen=True)
class Division:
    """Of the micro-batches of a replica, into pieces that no stage divides any further: each goes through the model at
    once, whichever ranks compute its stages. So nothing that stages hand over has to be taken apart or put together.

    Attributes:
        stages: Ranks of each stage.
        times: Of all ranks, by rank; none are needed where each stage has one.
        least: Samples of a piece at least, in micro-batches that have so many.
    """

    stages: Sequence[Sequence[int]]
    times: Sequence[StepTime] = ()
    least: int = 1
    _known: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_slices(self, micro_batches: Sequence[int]) -> Division:
        """For full slices of micro-batches of such sizes, and shorter ones: batch norm does not train on one sample,
        and so none of their pieces has one, unless those of full slices have."""
        fewest = min(piece for samples in micro_batches for piece in self.pieces(samples))
        return replace(self, least=min(fewest, 2))

    def pieces(self, samples: int) -> tuple[int, ...]:
        """Samples of each piece of a micro-batch, in order."""
        return tuple(end - begin for begin, end in pairwise(bounds_of_pieces(self._parts(samples))))

    def owners(self, stage: int, samples: int) -> tuple[int, ...]:
        """The rank that computes each piece of a micro-batch in a stage."""
        ranks, begins = self.stages[stage], accumulate(self.pieces(samples), initial=0)
        ends = [*accumulate(self._parts(samples)[stage])]
        return tuple(
            next(rank for rank, end in zip(ranks, ends, strict=True) if begin < end)
            for begin in begins
            if begin < samples
        )

    def share(self, stage: int, rank: int, micro_batches: Sequence[int]) -> int:
        """Samples that a rank computes of micro-batches of such sizes."""
        place = list(self.stages[stage]).index(rank)
        return sum(self._parts(samples)[stage][place] for samples in micro_batches)

    def _parts(self, samples: int) -> list[tuple[int, ...]]:
        """By stage, of each of its ranks. There are few sizes of micro-batches."""
        if samples not in self._known:
            parts = [self._by_speed(ranks, samples) for ranks in self.stages]
            self._known[samples] = without_short_pieces(parts, self.least)
        return self._known[samples]

    def _by_speed(self, ranks: Sequence[int], samples: int) -> tuple[int, ...]:
        return parts_by_speed([self.times[rank] for rank in ranks], samples) if len(ranks) > 1 else (samples,)


WHOLE = Division([[0]])  # of a rank alone: all micro-batches are in one piece
