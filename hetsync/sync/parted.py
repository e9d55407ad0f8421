"""Delayed mode in parts, each with `Deltas` of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetsync.plane.base import WireFormat
from hetsync.sync.deltas import Deltas


class PartedDeltas:
    """The calls of `Deltas`, made to all parts of a rank's tensors; a round may sum some of them only. What is done to
    each in the same order ends with the bits that it ends with where all are one."""

    def __init__(self, parts: Sequence[Deltas]) -> None:
        """At least one."""
        self.parts = list(parts)
        self.packed = (0, 0)  # samples and inner steps of what this rank gave to the newest round that it has joined
        self._summed: Sequence[Deltas] = ()  # by that round

    @property
    def buffer_bytes(self) -> int:
        return sum(part.buffer_bytes for part in self.parts)

    @property
    def anchor(self) -> torch.Tensor:
        anchors = [part.anchor for part in self.parts]
        return anchors[0] if len(anchors) == 1 else torch.cat(anchors)

    def due(self, number: int, drain: bool) -> Sequence[Deltas]:
        """The parts that this round sums."""
        return self.parts

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
        return all([part.apply() for part in self.parts])

    def pack(self, number: int, drain: bool, contribute: bool, batch: int, wire: WireFormat) -> list[torch.Tensor]:
        """The addends of this rank to round `number`, one for each part that is due."""
        self._summed = self.due(number, drain)
        addends = [self._pack(part, drain, contribute, batch, wire) for part in self._summed]
        self.packed = self._summed[0].packed
        return addends

    def _pack(self, part: Deltas, drain: bool, contribute: bool, batch: int, wire: WireFormat) -> torch.Tensor:
        return part.pack(contribute or (drain and part.take_leftover()), batch, wire)

    def apply_sum(self) -> None:
        """Of the round that was packed last."""
        for part in self._summed:
            part.apply_sum()

    def reset_to_anchor(self) -> None:
        for part in self.parts:
            part.reset_to_anchor()
