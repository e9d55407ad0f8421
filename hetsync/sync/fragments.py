"""Delayed mode in fragments: each round sums one of them, in turn, and a drain all.

So a sum has fewer bytes: behind a link that all weights would keep busy for several slices each fragment is merged
sooner than all would be (Streaming DiLoCo, Douillard et al. 2025). A fragment is given with all progress since it was
given last, of however many contributions, and is weighted by their samples (`Deltas.pack`), so each sample's progress
moves each weight once.

Books know of contributions: with the round that one is in its samples count as applied, although of n fragments others
follow in up to n - 1 rounds after it; and at its turn a fragment is given with what is in no contribution yet, too. So
what a rank that dies has given of some fragments and not of others counts as applied, or is computed once more for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane.base import Allocate, allocate_anywhere
from hetsync.sync.constraints import NO_CONSTRAINTS, Constraints, Twins
from hetsync.sync.deltas import Deltas, Nesterov, Snapshot, Stepped
from hetsync.sync.messages import StartRound
from hetsync.sync.parted import PartedDeltas
from hetsync.sync.tail import Tail


def fragments_of(weights: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Views of the weights, in order, in `count` fragments of about as many values, cut along first dimensions; fewer
    where there are fewer places to cut. (`deltas.runs` cuts by size, for the processor's cache.)"""
    total = sum(weight.numel() for weight in weights)
    found: list[list[torch.Tensor]] = [[] for _ in range(count)]
    before = 0  # values
    for weight in map(torch.Tensor.detach, weights):
        rows = weight if weight.dim() else weight.view(1)
        while len(rows):
            index = min(before * count // max(1, total), count - 1)
            room = -(-(index + 1) * total // count) - before
            first = rows[: max(1, math.ceil(room * len(rows) / max(1, rows.numel())))]
            found[index].append(first)
            before += first.numel()
            rows = rows[len(first) :]
    return [fragment for fragment in found if fragment] or [[]]


class FragmentedDeltas(PartedDeltas):
    """Of one rank that holds all weights, in the order of rounds on every rank."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        outer: Nesterov | None = None,
        buffers: Sequence[torch.Tensor] = (),
        rank: int = 0,
        ranks_counted: int = 0,
        one_sum: bool = False,
        fragments: int = 1,
        allocate: Allocate = allocate_anywhere,
        added: int = 0,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        """As those of `Deltas`; `outer` is for one fragment. Buffers go with the last of the weights. The anchor is
        within the `constraints` after each round."""
        assert outer is None or fragments == 1
        cut = fragments_of(weights, fragments)
        super().__init__(
            [
                Deltas(
                    mine,
                    outer,
                    buffers if mine is cut[-1] else (),
                    rank,
                    ranks_counted,
                    one_sum=one_sum,
                    allocate=allocate,
                    added=added if mine is cut[-1] else 0,
                )
                for mine in cut
            ]
        )
        self._sizes = [part.anchor.numel() for part in self.parts]
        self._constraints = constraints
        self._twins = constraints.twins(weights) if constraints else None
        self._samples = 0  # finished, and in no contribution yet
        self._given = 0  # in the contribution that is under way

    @property
    def tail(self) -> Tail:
        """Where buffers travel."""
        return self.parts[-1].tail

    @property
    def velocity(self) -> torch.Tensor | None:
        """The outer optimizer's, if there is one."""
        return self.parts[0].velocity

    def _due(self, start: StartRound) -> Sequence[Deltas]:
        return [part for place, part in enumerate(self.parts) if start.sums(place, len(self.parts))]

    def snapshot(self, number: int) -> Snapshot:
        """The anchor, once this round has landed."""
        anchor = self.anchor
        return Snapshot(number, time.monotonic(), anchor.clone() if len(self.parts) == 1 else anchor)

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        """See `Deltas.showing`."""
        with ExitStack() as shown:
            for part, values in zip(self.parts, weights.split(self._sizes), strict=True):
                shown.enter_context(part.showing(values))
            yield

    def undo(self) -> None:
        """See `Deltas.undo`."""
        for part in self.parts:
            part.undo()
        self._constraints.project()

    def apply(self) -> bool:
        applied = super().apply()
        if any(part.has_moved for part in self.parts):
            self._constraints.project()  # progress of this rank's own moves it from the anchor
        for part in self.parts:
            part.has_moved = False
        return applied

    def finish(self, samples: int, steps: int, lift: float = 1.0, stepped: Stepped | None = None) -> float:
        self._samples += samples
        return super().finish(samples, steps, lift, stepped)

    def pack(self, start: StartRound, contribute: bool, batch: int, wire: WireFormat) -> list[torch.Tensor]:
        addends = super().pack(start, contribute, batch, wire)
        if contribute:
            self._given, self._samples = self._samples, 0
        return addends

    def _pack(self, part: Deltas, drain: bool, contribute: bool, batch: int, wire: WireFormat) -> torch.Tensor:
        # Where a round sums all, what is in no contribution yet waits for that. Where it sums some, all that this part
        # has is given at its turn: it may owe what other parts have given, and ranks in step with rounds would miss
        # the same one for ever.
        all_summed = len(self.summed) == len(self.parts)
        gives = contribute or (part.holds_progress and not (all_summed and self._samples))
        if drain and not part.holds_progress:  # it may have been given in full, and rounded, in a round before
            gives = part.take_leftover() or gives
        return part.pack(gives, batch, wire, self._samples if contribute else 0)

    def apply_sum(self) -> None:
        super().apply_sum()
        self._given = 0
        if self._twins is not None:
            self._constrain(self._twins)

    def _constrain(self, twins: Twins) -> None:
        """All of the anchor, whatever the round has summed: a constraint may be on several weights together."""
        anchors = [part.anchor_weights for part in self.parts]
        values = torch.cat(anchors)
        twins.constrain(values)
        for part, mine in zip(self.parts, values.split([len(anchor) for anchor in anchors]), strict=True):
            part.move_anchor(mine)

    def samples_given(self) -> dict[int, int]:
        """See `Deltas.samples_given`: by contributions, whose other fragments may be still to come."""
        return self.summed[0].samples_given()

    def lands_apart(self, start: StartRound) -> bool:
        return super().lands_apart(start) and self._twins is None

    def take_back(self) -> None:
        """See `Deltas.take_back`."""
        for part in self.parts:
            part.take_back()
        self._samples, self._given = self._samples + self._given, 0

    def catch_up(self, anchor: torch.Tensor, velocity: torch.Tensor | None, travel: Sequence[int]) -> None:
        """See `Deltas.catch_up`."""
        for part, values in zip(self.parts, anchor.split(self._sizes), strict=True):
            part.catch_up(values, velocity, travel if part is self.parts[-1] else ())
        self._given = 0
