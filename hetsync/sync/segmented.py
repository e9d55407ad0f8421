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


class Segment(NamedTuple):
    """Tensors of this rank's that the same ranks hold, in the same order on all of these, and what sums over them.

    Of ranks that share a stage, and so make the same progress, one `speaks` in these sums.
    """

    weights: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    sums: Sums
    speaks: bool = True


class SegmentedDeltas:
    """The calls of `Deltas`, made to all segments of a rank. What is done to each in the same order ends with the bits
    that one rank ends with which holds them all."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """At least one."""
        self.parts = [Deltas(each.weights, buffers=each.buffers, speaks=each.speaks) for each in segments]
        for part, segment in zip(self.parts, segments, strict=True):
            part.sums = segment.sums

    @property
    def packed(self) -> tuple[int, int]:
        return self.parts[0].packed

    @property
    def buffer_bytes(self) -> int:
        return sum(part.buffer_bytes for part in self.parts)

    @property
    def anchor(self) -> torch.Tensor:
        return torch.cat([part.anchor for part in self.parts])

    def snapshot(self, number: int) -> Snapshot:
        raise AssertionError("replicas on several ranks are evaluated at rests")

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        raise AssertionError("replicas on several ranks are evaluated at rests")

    def adopt(self) -> None:
        for part in self.parts:
            part.adopt()

    def open_task(self, slices: int, samples: int, batch: int) -> None:
        for part in self.parts:
            part.open_task(slices, samples, batch)

    def drop_task(self) -> None:
        for part in self.parts:
            part.drop_task()

    def finish(self, samples: int, steps: int) -> float:
        return sum(part.finish(samples, steps) for part in self.parts)

    def apply(self) -> bool:
        return all([part.apply() for part in self.parts])  # of all or of none, as all are told the same

    def take_leftover(self) -> bool:
        return any([part.take_leftover() for part in self.parts])

    def apply_sum(self) -> None:
        for part in self.parts:
            part.apply_sum()

    def reset_to_anchor(self) -> None:
        for part in self.parts:
            part.reset_to_anchor()
