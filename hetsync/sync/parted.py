"""Delayed mode in parts, each with `Deltas` of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hetsync.config.schema import WireFormat
from hetsync.sync.deltas import Deltas, Stepped
from hetsync.sync.messages import StartRound


class PartedDeltas:
    """The calls of `Deltas`, made to all parts of a rank's tensors. Where every round sums all, the bits are those of
    one `Deltas`."""

    def __init__(self, parts: Sequence[Deltas]) -> None:
        """At least one."""
        self.parts = list(parts)
        self.packed = (0, 0)  # samples and inner steps of what this rank gave to the newest round that it has joined
        self.summed: Sequence[Deltas] = ()  # by that round

    @property
    def buffer_bytes(self) -> int:
        return sum(part.buffer_bytes for part in self.parts)

    @property
    def anchor(self) -> torch.Tensor:
        anchors = [part.anchor for part in self.parts]
        return anchors[0] if len(anchors) == 1 else torch.cat(anchors)

    def _due(self, start: StartRound) -> Sequence[Deltas]:
        """What this round sums."""
        return self.parts

    def adopt(self) -> None:
        for part in self.parts:
            part.adopt()

    @property
    def holds_anchor(self) -> bool:
        return all([part.holds_anchor for part in self.parts])

    def adopt_weights(self) -> None:
        for part in self.parts:
            part.adopt_weights()

    def open_task(self, slices: int, samples: int, batch: int) -> None:
        for part in self.parts:
            part.open_task(slices, samples, batch)

    def drop_task(self) -> None:
        """The loop has left the task that is open: what it has done goes with no contribution, and is taken back by the
        next drain, as whatever else u holds."""

    def finish(self, samples: int, steps: int, lift: float = 1.0, stepped: Stepped | None = None) -> float:
        total = sum(part.finish(samples, steps, lift, stepped) for part in self.parts)
        if not math.isfinite(total):
            for part in self.parts:
                part.withhold()
        return total

    def apply(self) -> bool:
        """False while progress in flight keeps a part from it; the others have taken theirs over."""
        return all([part.apply() for part in self.parts])

    def packs_apart(self, start: StartRound) -> bool:
        """Does `pack` touch nothing that the newest `apply` has? See `Deltas.packs_apart`."""
        return start.drain is None and all([part.packs_apart for part in self._due(start)])

    def lands_apart(self, start: StartRound) -> bool:
        """The same of what is done once the round's sum is in."""
        return start.drain is None and not start.evaluate

    def pack(self, start: StartRound, contribute: bool, batch: int, wire: WireFormat) -> list[torch.Tensor]:
        """The addends of this rank to a round, one for each part that is `summed` by it."""
        self.summed = self._due(start)
        addends = [self._pack(part, start.drain is not None, contribute, batch, wire) for part in self.summed]
        given = {part.packed for part in self.summed}
        # Parts of different samples tell nothing of noise; and at a drain they differ on some rank or other.
        alike = len(given) == 1 and (start.drain is None or len(self.parts) == 1)
        self.packed = given.pop() if alike else (0, 0)
        return addends

    def _pack(self, part: Deltas, drain: bool, contribute: bool, batch: int, wire: WireFormat) -> torch.Tensor:
        return part.pack(contribute or (drain and part.take_leftover()), batch, wire)

    def apply_sum(self) -> None:
        """Of the round that was packed last."""
        for part in self.summed:
            part.apply_sum()

    def reset_to_anchor(self) -> None:
        for part in self.parts:
            part.reset_to_anchor()
