"""Delayed mode's tensors: local weights run ahead of an anchor that is bit-identical on every rank.

Four parameter-sized buffers beside the local weights u, all float32 and flat (weights, then float buffers such as
batch-norm statistics):

    anchor      w, as of the last round that landed here
    pending     P, finished progress: waiting, or on its way until its round lands
    flight      the sum under way
    correction  X, what rounds have changed and u has not taken over yet

After every call, at a piece's boundary:  u + X = w + P.  So progress that a finish has to report is u + X − w,
whatever was rounded away or quantised before: nothing is ever lost, and error feedback needs no buffer.

A rank may finish more pieces while its contribution flies. The first of these moves the flying part of P into X
(as −P); from then until the landing X must not be applied, since u would lose the flying progress meanwhile.

The main thread calls `adopt`, `finish`, `apply`, `settle`; the communication thread `load`, `land`. The caller
holds one lock around each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetsync.plane.base import WireFormat
from hetsync.plane.wire import round_trip

Outer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The weights that all ranks shared once `round` had landed, to be evaluated; made at a moment of time.monotonic.

    `weights` is the flat anchor; None says that the model holds these weights itself (synchronous mode).
    """

    round: int
    made_at: float
    weights: torch.Tensor | None = None


class Deltas:
    def __init__(self, tensors: Sequence[torch.Tensor], outer: Outer | None = None) -> None:
        """`tensors` are the local weights and float buffers, in the same order on every rank."""
        self._local = [tensor.detach() for tensor in tensors]
        self._outer = outer
        count = sum(tensor.numel() for tensor in self._local)
        device = self._local[0].device
        self.anchor, self._pending, self._flight, self._correction = (
            torch.zeros(count, device=device) for _ in range(4)
        )
        # Made once: a hundred of them would take a tenth of a millisecond and more at every call.
        self._anchor_views, self._pending_views, self._correction_views = (
            self._views(flat) for flat in (self.anchor, self._pending, self._correction)
        )
        self._steps = 0
        self._samples = 0
        self.loaded = (0, 0)  # samples and inner steps of our contribution that is under way, or was last
        self._flying = False  # a contribution of ours is under way ...
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

    @torch.no_grad()
    def finish(self, samples: int, steps: int) -> None:
        """P ← all progress that no round has taken; it is worth `samples`, made in `steps` inner steps."""
        if self._flying and not self._folded:
            self._correction -= self._pending
            self._folded = True
        torch.sub(self._correction, self.anchor, out=self._pending)
        torch._foreach_add_(self._pending_views, self._local)
        self._samples += samples
        self._steps += steps

    @torch.no_grad()
    def apply(self) -> bool:
        """u ← u + X, between two inner steps; False while that would hide progress which flies."""
        if self._folded:
            return False
        torch._foreach_add_(self._local, self._correction_views)
        self._correction.zero_()
        return True

    @torch.no_grad()
    def load(self, contribute: bool, batch: int, wire: WireFormat) -> torch.Tensor:
        """The addend of this rank: zeros, or its progress weighted by the samples of an inner step over B.

        That weight moves the anchor by each sample's progress exactly once, however pieces merge; for
        contributions of K steps each it is FedNova's normalised averaging (Wang et al. 2020).
        """
        if not contribute:
            return self._flight.zero_()
        weight = self._samples / (self._steps * batch)
        torch.mul(self._pending, weight, out=self._flight)
        if wire != "float32":
            torch.div(round_trip(self._flight, wire), weight, out=self._pending)
        self.loaded = (self._samples, self._steps)
        self._samples = self._steps = 0
        self._flying = True
        return self._flight

    @torch.no_grad()
    def land(self) -> None:
        """w and X take over the sum; X loses our own part of it, which u holds already."""
        step = self._flight if self._outer is None else self._outer(self._flight)
        self.anchor += step
        self._correction += step
        if self._flying and not self._folded:
            self._correction -= self._pending
            self._pending.zero_()
        self._flying = self._folded = False

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        """u holds other flat `weights` inside, itself again after; no other method but `load` and `land` meanwhile."""
        with torch.no_grad():
            own = torch.cat([tensor.flatten() for tensor in self._local])
            torch._foreach_copy_(self._local, self._views(weights))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._local, self._views(own))

    @torch.no_grad()
    def settle(self) -> None:
        """u ← w, at the end of a drain."""
        assert not self._flying
        torch._foreach_copy_(self._local, self._anchor_views)
        self._pending.zero_()
        self._correction.zero_()


class Nesterov:
    """The outer optimizer of DiLoCo (Douillard et al. 2023) on the sum of a round.

    With SGD's Nesterov momentum m: b ← m·b + step; the anchor moves by lr·(step + m·b). One more buffer.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self.velocity: torch.Tensor | None = None

    def __call__(self, step: torch.Tensor) -> torch.Tensor:
        if self.velocity is None:
            self.velocity = torch.zeros_like(step)
        self.velocity.mul_(self._momentum).add_(step)
        return step.add_(self.velocity, alpha=self._momentum).mul_(self._learning_rate)
