"""Delayed mode's tensors: local weights run ahead of an anchor that is bit-identical on every rank.

Four parameter-sized buffers beside the local weights u, all flat (weights, of whatever precision, then float buffers
such as batch-norm statistics), and float32, or float64 where one of these tensors is:

    anchor      w, as of the last round that landed here
    pending     P, finished progress: waiting, or on its way until its round lands
    flight      the sum under way
    correction  X, what rounds have changed and u has not taken over yet (lower precision: nor been able to)

After every call, at a task's boundary:  u + X = w + P.  So progress that a finish has to report is u + X − w,
whatever was rounded away or quantised before: nothing is ever lost. What a wire has rounded off a contribution is kept
in one buffer more, since it goes out with the weight of its own samples, whatever those of the next one are.

A rank may finish more tasks while its contribution is in flight. The first of these moves that part of P into X (as
−P); from then until the sum lands X must not be applied, since u would lose the progress in flight meanwhile.

What all this costs is passes over memory, so it makes few of them. A sum S that has come in stays where it is until
somebody needs w or `flight`: most often the main thread, which moves it into w and u at once. On CPUs all steps of an
operation go over one segment, which stays in the cache, before the next. X is made of S in place, and the two buffers
change roles. P and X that hold nothing are marked `empty`, and never read or cleared.

The main thread calls `adopt`, `finish`, `undo`, `apply`, `reset_to_anchor`; the communication thread `pack`,
`apply_sum`, and after a death `take_back`, `catch_up`. The caller holds one lock around each call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from hetsync.config.schema import SyncConfig, WireFormat
from hetsync.errors import UserError
from hetsync.plane.base import Allocate, Residual, Sums, allocate_anywhere
from hetsync.plane.wire import round_trip
from hetsync.sync.reals import allocated, count_reals, reals, summed_in
from hetsync.sync.tail import Tail

CPU_SEGMENT = 1 << 18  # values: a few such fit into the cache, and calls cost little beside work on them


@dataclass(frozen=True)
class Snapshot:
    """The weights that all ranks shared once `round` had landed, to be evaluated; made at a moment of time.monotonic.

    `weights` is the flat anchor; None says that the model holds these weights itself (synchronous mode).
    """

    round: int
    made_at: float
    weights: torch.Tensor | None = None


def segment_values(device: torch.device) -> int:
    """In how large pieces to go over memory. A GPU has no such cache, and each piece would cost it launches."""
    return CPU_SEGMENT if device.type == "cpu" else sys.maxsize


def runs(tensors: Sequence[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """The tensors in runs of `most` values or little more, large ones cut along their first dimension."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        cut = tensor.numel() > most and tensor.dim() > 0
        for piece in tensor.split(max(1, most * len(tensor) // tensor.numel())) if cut else (tensor,):
            if not found or piece.numel() > room:
                found.append([])
                room = most
            found[-1].append(piece)
            room -= piece.numel()
    return found


class Buffer:
    """Flat `values` for all local tensors, in float32 or float64 (`summed_in`), and views of them, made once: hundreds
    of them would take a tenth of a millisecond and more at every call."""

    def __init__(
        self,
        local: Sequence[torch.Tensor],
        local_runs: Sequence[Sequence[torch.Tensor]],
        room: int = 0,
        allocate: Allocate = allocate_anywhere,
    ) -> None:
        """`memory` holds the values, and `room` for so many more behind them."""
        sizes = [sum(piece.numel() for piece in run) for run in local_runs]
        self.memory = allocated(allocate, sum(sizes) + room, local, local[0].device)
        self.values = self.memory[: sum(sizes)]
        self.empty = True  # it stands for zeros, whatever is in its memory
        self.tensors = views(self.values, local)
        self.segments = self.values.split(sizes)
        self.pieces = [views(segment, run) for segment, run in zip(self.segments, local_runs, strict=True)]


class Scratch:
    """A segment's memory with each segment's views: what is written there and used at once never leaves the cache."""

    def __init__(self, local_runs: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [sum(piece.numel() for piece in run) for run in local_runs]
        values = torch.empty(max(sizes), dtype=dtype, device=device)
        self.segments = [values[:size] for size in sizes]
        self.pieces = [views(segment, run) for segment, run in zip(self.segments, local_runs, strict=True)]


def views(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of `flat`, with the shapes of these tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class Stepped(NamedTuple):
    """What a rank's inner steps in a task stand for, where its loop adds slices up: samples, and how many they are."""

    samples: float
    steps: int


class Owed(Enum):
    """Where u has what a wire has rounded off this rank's contributions, which later ones are to bring."""

    NOWHERE = "there is nothing"
    BESIDE = "u holds it beside w + P − X"
    WAITING = "in P, as a finish has found it"
    UNDER_WAY = "in P or X, of a contribution that nothing rounds"


class Deltas:
    sums: Sums | None = None  # over those who hold these tensors, where these are not all ranks

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        outer: Nesterov | None = None,
        buffers: Sequence[torch.Tensor] = (),
        rank: int = 0,
        ranks_counted: int = 0,
        speaks: bool = True,
        one_sum: bool = False,
        allocate: Allocate = allocate_anywhere,
        added: int = 0,
    ) -> None:
        """Local `weights` and float `buffers`, in the same order on every rank, of which the last, so many as are
        `added`, have increments that add up; `outer` acts on weights only. Of
        `ranks_counted` each round tells who has given how many samples; this is `rank`. Of ranks that make the same
        progress together, one `speaks`: the others add zeros where it adds what they have made, too. With `one_sum`
        what `pack` returns holds the tail, too, where that can be. `allocate` gives what is summed."""
        self._local = [reals(tensor.detach()) for tensor in [*weights, *buffers]]
        dtype = summed_in(self._local)
        self.exact = all(tensor.dtype is dtype for tensor in self._local)
        self._outer, self._speaks = outer, speaks
        self._weights = sum(map(count_reals, weights))  # values
        self._added = sum(map(torch.Tensor.numel, [*weights, *buffers][len(weights) + len(buffers) - added :]))
        self._first_buffer = len(weights)
        device = self._local[0].device
        most = segment_values(device)
        # No segment has both kinds: the outer optimizer acts on weights only.
        self._runs = [*runs(self._local[: len(weights)], most), *runs(self._local[len(weights) :], most)]
        counts = ranks_counted or int(outer is not None)
        self._anchor, self._pending = (Buffer(self._local, self._runs) for _ in range(2))
        self._flight, self._correction = (Buffer(self._local, self._runs, counts, allocate) for _ in range(2))
        # Where a segment is all of the model, as on a GPU, it would be a fifth buffer.
        cached = device.type == "cpu" and len(self._runs) > 1
        self._scratch = Scratch(self._runs, dtype, device) if self.exact and cached else None
        # The outer optimizer wants to know the samples of a round, and a recovery whose they are.
        self._own_count = slice(rank, rank + 1) if ranks_counted else slice(None)
        self.tail = Tail(counts, self._flight.tensors[len(weights) :], device, dtype=dtype)
        self._apply_used_flight = False  # the newest one, what is `flight` now
        self._one_sum = one_sum
        self.residual = Residual()  # what rounding took from the sums of weights
        self._steps = 0
        self._worth, self._merged_steps = 0.0, 0.0  # samples that steps stand for; steps, each one over its lift
        self._samples = 0
        self._weight = self._buffer_weight = 0.0  # that our last contribution had
        self._given_worth = (0.0, 0.0)  # what its steps counted for
        self._owed = Owed.NOWHERE
        self._rounded_off: torch.Tensor | None = None  # what is owed ...
        self._owed_weight = 0.0  # ... with this weight, over which u holds it
        self.has_moved = False  # u, by `apply`; whoever looks sets it back
        self.packed = (0, 0)  # samples and inner steps of our contribution to the newest round
        self._in_flight = False  # a contribution of ours is under way ...
        self._folded = False  # ... and has moved from P into X
        self._arrived = False  # `flight` is a sum, which w and X have not taken over yet
        self.adopt()

    @property
    def buffer_bytes(self) -> int:
        """Memory that delayed mode takes beside the weights."""
        rounded_off = 0 if self._rounded_off is None else self._rounded_off.nbytes
        return rounded_off + sum(b.values.nbytes for b in (self._anchor, self._pending, self._flight, self._correction))

    @property
    def anchor(self) -> torch.Tensor:
        """w, flat."""
        self._land()
        return self._anchor.values

    @torch.no_grad()
    def adopt(self) -> None:
        """w ← u: all ranks hold the same weights and nothing is under way."""
        torch._foreach_copy_(self._anchor.tensors, self._local)
        self._pending.empty = self._correction.empty = True
        self._owed = Owed.NOWHERE

    @property
    def holds_anchor(self) -> bool:
        """At rest: are the local weights still the anchor's?"""
        pairs = zip(self._anchor.tensors, self._local[: self._first_buffer], strict=False)
        return all(bool((w == u).all()) for w, u in pairs)

    @property
    def anchor_weights(self) -> torch.Tensor:
        """w of the weights alone, flat."""
        return self.anchor[: self._weights]

    @torch.no_grad()
    def move_anchor(self, weights: torch.Tensor) -> None:
        """w ← these flat `weights`, on all ranks after the same round, before another is packed. u takes the change
        over as it does a sum."""
        correction, change = self._correction, weights - self.anchor_weights
        if not change.any():
            return
        if correction.empty:
            correction.values.zero_()
        correction.values[: self._weights] += change
        correction.empty = False
        self.anchor_weights.copy_(weights)

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """At rest: w ← u, of the weights alone."""
        count = self._first_buffer
        torch._foreach_copy_(self._anchor.tensors[:count], self._local[:count])

    def open_task(self, slices: int, samples: int, batch: int) -> None:
        """A task of so many samples begins. P does not know of what is not finished."""

    @torch.no_grad()
    def finish(self, samples: int, steps: int, lift: float = 1.0, stepped: Stepped | None = None) -> float:
        """P ← all progress that no round has taken; it is worth `samples`, made in `steps` inner steps, which
        merging lifts (see `sync/steps.py:LocalSteps`). `stepped`: where a loop adds slices up, what its own steps stand
        for.

        Returns a sum over P; if it is not finite, nothing of P will go out.
        """
        self._land()
        pending, correction = self._pending, self._correction
        fold = self._in_flight and not self._folded and not pending.empty
        total = 0.0
        for run, w, p, x, p_pieces in zip(
            self._runs, self._anchor.segments, pending.segments, correction.segments, pending.pieces, strict=True
        ):
            if fold:
                torch.neg(p, out=x) if correction.empty else x.sub_(p)
            torch.neg(w, out=p) if correction.empty and not fold else torch.sub(x, w, out=p)
            torch._foreach_add_(p_pieces, run)
            total += float(p.sum())  # while it is in the cache
        correction.empty &= not fold
        self._folded |= self._in_flight
        self._samples += samples
        self._steps += steps
        worth, made = stepped or (samples, steps)
        self._worth += worth
        self._merged_steps += made / lift
        pending.empty = not math.isfinite(total)
        if self._owed in (Owed.BESIDE, Owed.WAITING):
            self._owed = Owed.BESIDE if pending.empty else Owed.WAITING
        return total

    def withhold(self) -> None:
        """Nothing of P goes out."""
        self._pending.empty = True
        if self._owed is Owed.WAITING:
            self._owed = Owed.BESIDE

    @torch.no_grad()
    def undo(self) -> None:
        """u ← w + P − X: what the task that is open has done is given up, whatever u is now."""
        self._land()
        pending, correction, beside = self._pending, self._correction, self._owed_beside()
        for index, (run, w, p, x) in enumerate(
            zip(self._runs, self._anchor.pieces, pending.pieces, correction.pieces, strict=True)
        ):
            values = [piece.clone() for piece in w]
            if not pending.empty:
                torch._foreach_add_(values, p)
            if not correction.empty:
                torch._foreach_sub_(values, x)
            if beside is not None:
                torch._foreach_add_(values, beside.pieces[index])
            torch._foreach_copy_(run, values)
            if not self.exact:  # what u cannot hold stays in X
                if correction.empty:
                    torch._foreach_zero_(x)
                torch._foreach_sub_(values, run)
                torch._foreach_add_(x, values)
        correction.empty &= self.exact

    def _owed_beside(self) -> Buffer | None:
        """What u holds beside w + P − X, or None for nothing."""
        if self._owed is not Owed.BESIDE:
            return None
        assert self._rounded_off is not None
        beside = Buffer(self._local, self._runs)
        beside.values.zero_()
        torch.div(self._rounded_off, self._owed_weight, out=beside.values[: self._weights])
        return beside

    def _take_in(self) -> None:
        """P ← P and what u holds beside it, where P is not of a contribution that is under way."""
        if (beside := self._owed_beside()) is None:
            return
        if self._pending.empty:
            self._pending.values.zero_()
        self._pending.values.add_(beside.values)
        self._pending.empty, self._owed = False, Owed.WAITING

    @torch.no_grad()
    def apply(self) -> bool:
        """u ← u + X, between two inner steps; False while that would hide progress in flight."""
        self._apply_used_flight = self._arrived and not self._correction.empty
        if self._land(taken_over=True):
            self._correction.empty = self.exact
            return True
        if self._folded:
            return False
        if not self._correction.empty:
            for index in range(len(self._runs)):
                self._add(index, self._correction)
            self._correction.empty = self.exact
        return True

    def _add(self, index: int, change: Buffer | Scratch) -> None:
        """u ← u + change. What weights of lower precision cannot hold stays there, or the next P would take it back
        from all."""
        self.has_moved = True
        run, pieces = self._runs[index], change.pieces[index]
        if self.exact:
            torch._foreach_add_(run, pieces)
        else:
            torch._foreach_add_(pieces, run)
            torch._foreach_copy_(run, pieces)
            torch._foreach_sub_(pieces, run)

    @torch.no_grad()
    def take_leftover(self) -> bool:
        """At a drain, where this rank has finished nothing more: P ← what the wire has rounded off its contributions,
        which goes with no samples. False where that is nothing. Of a task that was dropped u holds more, but all take
        over w now."""
        self._land()
        self._take_in()
        return self._owed is Owed.WAITING

    @property
    def packs_apart(self) -> bool:
        """Does `pack`, but for a drain, touch nothing that the newest `apply` has, where the main thread has called
        nothing since?

        It packs into what was X before the last sum landed, of which that `apply` has read only if it held something;
        and P holds nothing to be packed before another `finish`. A sum that has arrived would land first."""
        return not (self._arrived or self._apply_used_flight)

    @property
    def holds_progress(self) -> bool:
        """Is there finished progress that no round has taken?"""
        return self._samples > 0

    @torch.no_grad()
    def pack(self, contribute: bool, batch: int, wire: WireFormat, counted: int | None = None) -> torch.Tensor:
        """The addend of this rank (weights only, unless `tail`, which has the rest, is empty now): zeros, or its
        progress weighted by the samples of an inner step over B. The round tells that it has `counted` samples of this
        rank; None: those that it has progress of.

        That weight moves the anchor by each sample's progress exactly once, however tasks merge; for
        contributions of K steps each it is FedNova's normalised averaging (Wang et al. 2020).
        """
        self._land()
        flight, pending = self._flight.values, self._pending
        addend = flight[: self._weights]
        if not (contribute and self._speaks) or pending.empty:
            flight.zero_()
        else:
            if self._steps:
                self._buffer_weight = self._samples / (self._steps * batch)
                no_step = not self._merged_steps
                self._weight = self._buffer_weight if no_step else self._worth / (self._merged_steps * batch)
            torch.mul(pending.values[: self._weights], self._weight, out=addend)
            if self._owed is Owed.WAITING and self._weight != self._owed_weight:
                assert self._rounded_off is not None
                addend.add_(self._rounded_off, alpha=1 - self._weight / self._owed_weight)
            torch.mul(pending.values[self._weights :], self._buffer_weight, out=flight[self._weights :])
            first_added = flight.numel() - self._added
            flight[first_added:] = pending.values[first_added:]  # each increment counts once, of however many samples
            self._owe(addend, wire)
        self.tail.counts.zero_()
        counted = self._samples if counted is None else counted
        self.tail.counts[self._own_count] = counted if contribute and self._speaks else 0
        self.packed = (0, 0)
        if contribute:
            self.packed = (self._samples, self._steps)
            self._given_worth = self._worth, self._merged_steps
            self._samples, self._steps, self._worth, self._merged_steps = 0, 0, 0.0, 0.0
            self._in_flight = True
        if self._one_sum and wire == "float32" and self.tail.lie_behind(self._flight.memory):
            return self._flight.memory
        self.tail.pack()
        return addend

    def _owe(self, addend: torch.Tensor, wire: WireFormat) -> None:
        """What the wire rounds off the addend stays in u, over the weight that it has now: whatever weight the next
        contribution has, this part goes with its own, or progress would count for more or less than its samples."""
        if wire != "float32" and self._weight:
            self._rounded_off = torch.sub(addend, round_trip(addend, wire), out=self._rounded_off)
            self._pending.values[: self._weights].sub_(self._rounded_off, alpha=1 / self._weight)
            self._owed, self._owed_weight = Owed.BESIDE, self._weight
        elif self._owed is Owed.WAITING:
            self._owed = Owed.UNDER_WAY

    def apply_sum(self) -> None:
        """w and X are to take over the sum; X loses our own part of it, which u holds already."""
        self._arrived = True
        self.tail.land()

    def _land(self, taken_over: bool = False) -> bool:
        """w ← w + S and X ← X + S − P, if a sum S has arrived, and True then. With `taken_over` u takes each run of the
        new X over while that is in the cache, where it may stay: what X then holds besides is not to be read."""
        if not self._arrived:
            return False
        flight, pending, correction = self._flight, self._pending, self._correction
        if self._outer is not None:
            self._outer(flight.values[: self._weights], float(self.tail.counts.sum()))
        own = self._in_flight and not self._folded and not pending.empty
        change: Buffer | Scratch = flight
        if taken_over and self._scratch is not None and (own or not correction.empty):
            change = self._scratch
        for index, (w, s, p, x, to) in enumerate(
            zip(
                self._anchor.segments,
                flight.segments,
                pending.segments,
                correction.segments,
                change.segments,
                strict=True,
            )
        ):
            w += s
            if not correction.empty:
                s = torch.add(s, x, out=to)
            if own:
                torch.sub(s, p, out=to)
            if taken_over:
                self._add(index, change)
        flight.empty = False
        pending.empty |= own
        self._flight, self._correction = correction, flight
        self.tail.changes = self._flight.tensors[self._first_buffer :]
        self._arrived = self._in_flight = self._folded = False
        self._bring_owed()
        return True

    def _bring_owed(self) -> None:
        """The round of our contribution counts."""
        if self._owed is Owed.UNDER_WAY:
            self._owed = Owed.NOWHERE

    @property
    def velocity(self) -> torch.Tensor | None:
        """The outer optimizer's, if it has one."""
        return None if self._outer is None else self._outer.velocity

    def samples_given(self) -> dict[int, int]:
        """By rank, in the round whose sum has come in last, where ranks are counted."""
        return {rank: int(samples) for rank, samples in enumerate(self.tail.counts.tolist()) if samples}

    @torch.no_grad()
    def take_back(self) -> None:
        """Our contribution that is under way was to a round that does not count: it is progress that no round has
        taken. What rounding took from the sums so far is given up: shards are other ranks' now; and what 16-bit weights
        could not hold, where X holds that beside what has been folded, as at a drain. Where the wire has
        rounded this one, what it had rounded off those before goes with the next one's weight."""
        self._land()
        self.residual = Residual()
        if not self._in_flight:
            return
        if self._folded and not self._correction.empty:
            pending, correction = self._pending, self._correction
            if pending.empty:
                pending.values.zero_()
            pending.values.sub_(correction.values)
            pending.empty, correction.empty = False, True
        samples, steps = self.packed
        self._samples += samples
        self._steps += steps
        worth, merged_steps = self._given_worth
        self._worth += worth
        self._merged_steps += merged_steps
        self._in_flight = self._folded = False
        if self._owed is Owed.UNDER_WAY:
            self._owed = Owed.WAITING
        else:
            self._take_in()
            self._owed = Owed.NOWHERE

    @torch.no_grad()
    def catch_up(self, anchor: torch.Tensor, velocity: torch.Tensor | None, travel: Sequence[int]) -> None:
        """A round has landed on others, with our contribution if one is under way, and not here: w and X move as they
        would have, to this `anchor`, which another rank has sent; `travel` is its `tail.travel`."""
        self._land()
        self.residual = Residual()
        anchor = anchor.to(self._anchor.values.device)
        pending, correction = self._pending, self._correction
        change = anchor - self._anchor.values
        if not correction.empty:
            change += correction.values
        if self._in_flight and not self._folded and not pending.empty:
            change -= pending.values
            pending.empty = True
        correction.values.copy_(change)
        correction.empty = False
        self._anchor.values.copy_(anchor)
        if self._outer is not None:
            self._outer.velocity = None if velocity is None else velocity.to(anchor.device, copy=True)
        self.tail.travel = list(travel)
        self._in_flight = self._folded = False
        self._bring_owed()

    @contextmanager
    def showing(self, weights: torch.Tensor) -> Iterator[None]:
        """u holds other flat `weights` inside, itself again after; only `pack` and `apply_sum` meanwhile."""
        with torch.no_grad():
            own = torch.cat([tensor.flatten() for tensor in self._local])
            torch._foreach_copy_(self._local, views(weights, self._local))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._local, views(own, self._local))

    @torch.no_grad()
    def reset_to_anchor(self) -> None:
        """u ← w, at the end of a drain; and back, since u is what is saved: 16-bit weights round what w holds."""
        self._land()
        assert not self._in_flight
        torch._foreach_copy_(self._local, self._anchor.tensors)
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
        most = segment_values(step.device)
        for part, velocity in zip(step.split(most), self.velocity.split(most), strict=True):
            velocity += part
            part.add_(velocity, alpha=velocity_weight).mul_(self.learning_rate)
            velocity *= decay

    def factors(self, samples: float) -> tuple[float, float]:
        """m · (1 − mᶠ) / (1 − m) and mᶠ for a round of so many samples."""
        decay = self._momentum ** (samples / self._full_set)
        return self._momentum * (1 - decay) / (1 - self._momentum), decay


def make_outer(sync: SyncConfig, batch_size: int) -> Nesterov | None:
    """Its momentum is meant for the recipe's K, whatever a controller makes of that."""
    if sync.outer.name != "nesterov":
        return None
    return Nesterov(sync.outer.learning_rate, sync.outer.momentum, sync.first_accumulation * batch_size)
