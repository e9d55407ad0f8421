"""Ranks that share a stage: each computes its pieces of micro-batches, and at a slice's end they add up gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from hetsync.plan.division import Division
from hetsync.plane.base import Channels
from hetsync.replica.base import MicroBatch, Piece
from hetsync.replica.segments import SegmentSums


class OwnPiece(NamedTuple):
    """`place` is the piece's among those of its micro-batch."""

    place: int
    piece: Piece


class Lockstep:
    """One rank's part in a stage, which may be its own alone.

    Args:
        division: Of micro-batches among the ranks of all stages.
        stage: This one.
        rank: This one.
        held: Names of the tensors that the stage holds.
        model: That has them.
        channels: Between the ranks; None for a rank alone.
    """

    def __init__(
        self,
        division: Division,
        stage: int,
        rank: int,
        held: Sequence[str],
        model: nn.Module,
        channels: Channels | None,
    ) -> None:
        self.ranks = division.stages[stage]
        self._division, self._stage, self._rank = division, stage, rank
        self._sums: SegmentSums | None = None
        if len(self.ranks) > 1:
            assert channels is not None
            self._sums = SegmentSums({tuple(self.ranks): held}, model, rank, channels)

    def own(self, micro_batch: MicroBatch) -> list[OwnPiece]:
        """The pieces that this rank computes."""
        if len(self.ranks) == 1:
            return [OwnPiece(place, piece) for place, piece in enumerate(micro_batch.pieces)]
        owners = self._division.owners(self._stage, micro_batch.samples)
        pairs = zip(owners, micro_batch.pieces, strict=True)
        return [OwnPiece(place, piece) for place, (owner, piece) in enumerate(pairs) if owner == self._rank]

    def begin(self) -> None:
        """A slice begins, with weights and buffers that are the same on all ranks of the stage."""
        if self._sums is not None:
            self._sums.begin()

    def finish(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Gradients become their sum over the ranks; buffers move by the mean of their changes, by samples."""
        if self._sums is None:
            return
        own = sum(each.piece.samples for micro_batch in micro_batches for each in self.own(micro_batch))
        self._sums.finish(1.0, own / sum(each.samples for each in micro_batches))


def sizes_of(pieces: Sequence[OwnPiece]) -> list[int]:
    """Samples of each."""
    return [each.piece.samples for each in pieces]
