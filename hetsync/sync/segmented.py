"""Delayed mode of a replica on several ranks: each rank has the buffers of the segments that it holds.

A segment is what has the same holders, in every replica one or those that share a stage, and is summed over these.
Replicas may be cut at different places, so a rank may hold several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hetsync.plane.base import Sums
from hetsync.sync.deltas import Deltas, Snapshot
from hetsync.sync.parted import PartedDeltas


class Segment(NamedTuple):
    """Tensors of this rank's that the same ranks hold, in the same order on all of these, and what sums over them.

    Of ranks that share a stage, and so make the same progress, one `speaks` in these sums. The last buffers, so many as
    are `added`, have increments that add up.
    """

    weights: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    sums: Sums
    speaks: bool = True
    added: int = 0


class SegmentedDeltas(PartedDeltas):
    """Each segment is a part, and every round sums all."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Of none, as those of a stage that is frozen or has no weights, a round sums nothing. But what is in flight is
        known all the same: a leader without any says when its followers apply what has landed, and they may have some.
        """
        deltas = [
            Deltas(
                each.weights, buffers=each.buffers, speaks=each.speaks, allocate=each.sums.allocate, added=each.added
            )
            for each in segments
        ]
        for part, segment in zip(deltas, segments, strict=True):
            part.sums = segment.sums
        super().__init__(deltas or [Deltas([torch.empty(0)])])

    def snapshot(self, number: int) -> Snapshot:
        raise AssertionError("replicas on several ranks are evaluated at rests")

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        raise AssertionError("replicas on several ranks are evaluated at rests")
