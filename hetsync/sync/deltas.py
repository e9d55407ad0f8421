"""Delayed mode's tensors: local weights run ahead of an anchor that is bit-identical on every rank.

Four parameter-sized buffers beside the local weights u, all float32 and flat (weights, of whatever precision, then
float buffers such as batch-norm statistics):

    anchor      w, as of the last round that landed here
    pending     P, finished progress: waiting, or on its way until its round lands
    flight      the sum under way
    correction  X, what rounds have changed and u has not taken over yet (16-bit weights: nor been able to)

After every call, at a task's boundary:  u + X = w + P.  So progress that a finish has to report is u + X − w,
whatever was rounded away or quantised before: nothing is ever lost, and error feedback needs no buffer.

A rank may finish more tasks while its contribution is in flight. The first of these moves that part of P into X (as
−P); from then until the sum lands X must not be applied, since u would lose the progress in flight meanwhile.

The main thread calls `adopt`, `finish`, `apply`, `reset_to_anchor`; the communication thread `pack`, `apply_sum`.
The caller holds one lock around each call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError
from hetsync.plane.base import Residual, WireFormat
from hetsync.plane.wire import round_trip
from hetsync.sync.tail import Tail


@dataclass(frozen=True)
class Snapshot:
    """The weights that all ranks shared once `round` had landed, to be evaluated; made at a moment of time.monotonic.

    `weights` is the flat anchor; None says that the model holds these weights itself (synchronous mode).
    """

    round: int
    made_at: float
    weights: torch.Tensor | None = None


class Deltas:
    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        outer: Nesterov | None = None,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        """Local `weights` and float `buffers`, in the same order on every rank; `outer` acts on weights only."""
        self._local = [tensor.detach() for tensor in [*weights, *buffers]]
        self._exact = all(tensor.dtype is torch.float32 for tensor in self._local)
        self._outer = outer
        self._weights = sum(tensor.numel() for tensor in weights)  # values
        count = sum(tensor.numel() for tensor in self._local)
        device = self._local[0].device
        self.anchor, self._pending, self._flight, self._correction = (
            torch.zeros(count, dtype=torch.float32, device=device) for _ in range(4)
        )
        # The outer optimizer wants to know the samples of a round.
        self.tail = Tail(int(outer is not None), self._views(self._flight)[len(weights) :], device)
        self.residual = Residual()  # what rounding took from the sums of weights
        # Made once: a hundred of them would take a tenth of a millisecond and more at every call.
        self._anchor_views, self._pending_views, self._correction_views = (
            self._views(flat) for flat in (self.anchor, self._pending, self._correction)
        )
        self._steps = 0
        self._samples = 0
        self.packed = (0, 0)  # samples and inner steps of our contribution that is under way, or was last
        self._in_flight = False  # a contribution of ours is under way ...
        self._folded = False  # ... and has moved from P into X
        self.adopt()

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` that have the shapes of the local tensors."""
        parts = flat.split([tensor.numel() for tensor in self._local])
        return [part.view_as(tensor) for part, tensor in zip(parts, self._local, strict=True)]

    @torch.no_grad()
    def adopt(self) -> None:
        """w ← u: all ranks hold the same weights and nothing is under way."""
        torch._foreach_copy_(self._anchor_views, self._local)
        self._pending.zero_()
        self._correction.zero_()

    def snapshot(self, number: int) -> Snapshot:
        """The anchor, once this round has landed."""
        return Snapshot(number, time.monotonic(), self.anchor.clone())

    def open_task(self, slices: int) -> None:
        """P does not know of what is not finished, and a drain takes it back."""

    @torch.no_grad()
    def finish(self, samples: int, steps: int) -> float:
        """P ← all progress that no round has taken; it is worth `samples`, made in `steps` inner steps.

        Returns a sum over P; if it is not finite, nor is P, and nothing of it will go out.
        """
        if self._in_flight and not self._folded:
            self._correction -= self._pending
            self._folded = True
        torch.sub(self._correction, self.anchor, out=self._pending)
        torch._foreach_add_(self._pending_views, self._local)
        self._samples += samples
        self._steps += steps
        total = float(self._pending.sum())
        if not math.isfinite(total):
            self._pending.zero_()
        return total

    @torch.no_grad()
    def apply(self) -> bool:
        """u ← u + X, between two inner steps; False while that would hide progress in flight."""
        if self._folded:
            return False
        if self._exact:
            torch._foreach_add_(self._local, self._correction_views)
            self._correction.zero_()
        else:  # what u cannot hold stays in X, or the next P would take it back from all
            torch._foreach_add_(self._correction_views, self._local)
            torch._foreach_copy_(self._local, self._correction_views)
            torch._foreach_sub_(self._correction_views, self._local)
        return True

    @torch.no_grad()
    def pack(self, contribute: bool, batch: int, wire: WireFormat) -> torch.Tensor:
        """The addend of this rank (weights only: `tail` has the rest): zeros, or its progress weighted by the samples
        of an inner step over B.

        That weight moves the anchor by each sample's progress exactly once, however tasks merge; for
        contributions of K steps each it is FedNova's normalised averaging (Wang et al. 2020).
        """
        addend = self._flight[: self._weights]
        if not contribute:
            self._flight.zero_()
            self.tail.counts.zero_()
        else:
            weight = self._samples / (self._steps * batch)
            torch.mul(self._pending, weight, out=self._flight)
            if wire != "float32":
                torch.div(round_trip(addend, wire), weight, out=self._pending[: self._weights])
            self.tail.counts.fill_(self._samples)
            self.packed = (self._samples, self._steps)
            self._samples = self._steps = 0
            self._in_flight = True
        self.tail.pack()
        return addend

    @torch.no_grad()
    def apply_sum(self) -> None:
        """w and X take over the sum; X loses our own part of it, which u holds already."""
        if self._outer is not None:
            self._outer(self._flight[: self._weights], float(self.tail.counts))
        self.anchor += self._flight
        self._correction += self._flight
        if self._in_flight and not self._folded:
            self._correction -= self._pending
            self._pending.zero_()
        self._in_flight = self._folded = False

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        """u holds other flat `weights` inside, itself again after; only `pack` and `apply_sum` meanwhile."""
        with torch.no_grad():
            own = torch.cat([tensor.flatten() for tensor in self._local])
            torch._foreach_copy_(self._local, self._views(weights))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._local, self._views(own))

    @torch.no_grad()
    def reset_to_anchor(self) -> None:
        """u ← w, at the end of a drain; and back, since u is what is saved: 16-bit weights round what w holds."""
        assert not self._in_flight
        torch._foreach_copy_(self._local, self._anchor_views)
        self.adopt()


class Nesterov:
    """The outer optimizer of DiLoCo (Douillard et al. 2023) on the sums of rounds, which may be of any size.

    A round of f times `full_set` samples, with sum s of progress, momentum m and velocity v:

        v ← v + s;   w ← w + lr · (s + m · (1 − mᶠ) / (1 − m) · v);   v ← mᶠ · v

    At f = 1 that is SGD's Nesterov step. Every sample's progress comes to lr / (1 − m) times itself, into however
    many rounds samples are cut, and a round without samples moves nothing. One more buffer.
    """

    def __init__(self, learning_rate: float, momentum: float, full_set: int) -> None:
        """`full_set`: the samples that momentum is meant for, those of K slices of all ranks."""
        self.learning_rate = learning_rate
        self._momentum = momentum
        self._full_set = full_set
        self.velocity: torch.Tensor | None = None  # flat

    def __call__(self, step: torch.Tensor, samples: float) -> None:
        """Turn the sum of a round of so many samples into what the anchor moves by, in place."""
        if self.velocity is None:
            self.velocity = torch.zeros_like(step)
        if self.velocity.numel() != step.numel():
            raise UserError(
                f"the checkpoint's outer momentum has {self.velocity.numel()} values, the model {step.numel()} weights:"
                " start afresh, or resume with the version of HetSync that saved it"
            )
        velocity_weight, decay = self.factors(samples)
        self.velocity += step
        step.add_(self.velocity, alpha=velocity_weight).mul_(self.learning_rate)
        self.velocity *= decay

    def factors(self, samples: float) -> tuple[float, float]:
        """m · (1 − mᶠ) / (1 − m) and mᶠ for a round of so many samples."""
        decay = self._momentum ** (samples / self._full_set)
        return self._momentum * (1 - decay) / (1 - self._momentum), decay


def make_outer(sync: SyncConfig, batch_size: int) -> Nesterov | None:
    """Its momentum is meant for the recipe's K, whatever a controller makes of that."""
    if sync.outer.name != "nesterov":
        return None
    return Nesterov(sync.outer.learning_rate, sync.outer.momentum, sync.accumulation * batch_size)
