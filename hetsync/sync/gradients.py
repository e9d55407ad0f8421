"""Synchronous mode's tensors: gradient sums in buckets, handed over in backward order while backward still runs.

Each slice adds units · (mean gradient) into its buckets: its samples, or what the loop's loss is a mean over
(`units.py`). Sums are divided by the units of the round, never by the number of ranks. A slice without a gradient has
none, and a rank that has skipped it makes the others' step all the same.

A slice may have several backward calls: gradients stay in `.grad` until its step, or until the loop looks at one
(`slice_gradient.py`), and only then is it known that they are whole. Once slices have shown one gradient a parameter,
those of a task's last slice go as soon as their bucket is full; a second one that comes after its bucket has left is an
error, never lost.

Each optimizer's parameters are a stage of the round, with buckets and a tail of their own. So where two networks take
turns within a slice, the first steps on its sums before the second is run:

    backward of D, sums of stage 0, step of D, backward of G, sums of stage 1, step of G

Sums stay in `.grad` until the loop sets them to zero. What the loop lets them add up to over several slices is the same
on all ranks, and their mean is not changed by a round: so accumulation of the loop's own needs no books here.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from hetsync.errors import UserError
from hetsync.plane.base import Allocate, Residual, WireFormat, allocate_anywhere
from hetsync.plane.wire import round_trip
from hetsync.sync.buffers import Writes
from hetsync.sync.model_tensors import all_trained
from hetsync.sync.reals import allocated, as_of, count_reals, reals, summed_in
from hetsync.sync.slice_gradient import SliceGradient, plain_of
from hetsync.sync.tail import Tail, added_buffers, shared_buffers
from hetsync.sync.units import TaskUnits

ROUNDS_WATCHED = 2  # in which forward may initialise weights
# Ranks whose losses are sums; units that gradients are means over, and those of them whose loss is a number; ranks that
# step, those of them that look at gradients before, that could step and do not, that have computed the slice and have
# nothing for this stage, and of all these those that have had no part of some batches before; that have skipped the
# slice, that do not know how loops clip, that have no slice; whose gradients are not finite; samples.
COUNTS = 13
BY_HAND = (
    "gradients were written by hand (weight.grad = ..., as gradient surgery does) before step, but with"
    " sync.delay_bound 0 they are averaged over ranks only then, which is wrong unless they are linear in each rank's"
    " gradient: take a delay bound of 1 or more, or give those that are by torch.autograd.backward(weights, gradients)"
)
DROPPED = (
    "gradients were set to none after backward and before their step, but with sync.delay_bound 0 ranks are yet to sum"
    " them: leave a batch out before its backward, by job.backward(loss, weight=0)"
)
BEHIND = (
    "the loops of {step:.0f} ranks step an optimizer in a batch and those of {others:.0f} do not, as {behind:.0f} ranks"
    " have had no part of some batches before (they are slow, or an epoch's last batch is small), and a count of the"
    " loop's own is behind there: with sync.delay_bound 0 go by job.step_count, which is the same on all ranks"
)
AGAIN = (
    "a weight got another gradient after gradients of this batch had been looked at or clipped, and before their step,"
    " but with sync.delay_bound 0 ranks have summed them by then: call backward for all losses of a step first, or take"
    " a delay bound of 1 or more"
)


class Bucket:
    """Some parameters' gradient sums in one flat buffer of the highest precision of theirs."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], allocate: Allocate) -> None:
        self.parameters = list(parameters)
        sizes = [count_reals(parameter) for parameter in parameters]
        self.flat = allocated(allocate, sum(sizes), parameters, parameters[0].device).zero_()
        self.views = [part.view_as(reals(p)) for part, p in zip(self.flat.split(sizes), parameters, strict=True)]
        self.used = [0] * len(parameters)  # slices of this round in which each parameter got a gradient
        self.missing = len(parameters)  # in the last slice
        self.lost: torch.Tensor | None = None  # what rounding took from our addend last time
        self.residual = Residual()  # and from the sum

    def add(self, units: float) -> None:
        """The gradients of a slice, means over so many units."""
        views, grads = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is not None:
                views.append(view)
                grads.append(reals(plain_of(parameter.grad)))
                self.used[index] += 1
        if grads:
            torch._foreach_add_(views, grads, alpha=units)

    def clear(self) -> None:
        self.flat.zero_()
        self.used = [0] * len(self.parameters)
        self.missing = len(self.parameters)


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, allocate: Allocate = allocate_anywhere
) -> list[Bucket]:
    """Parameters in reverse order, as backward reaches them, in buckets of about `bucket_bytes`."""
    buckets: list[Bucket] = []
    group: list[torch.nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        n_bytes = count_reals(parameter) * summed_in([parameter]).itemsize
        if group and size + n_bytes > bucket_bytes:
            buckets.append(Bucket(group, allocate))
            group, size = [], 0
        group.append(parameter)
        size += n_bytes
    return [*buckets, Bucket(group, allocate)] if group else buckets


class Arrivals:
    """The gradients of one slice, as backward has left them: how many, and whether a script has put others there."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        """`parameters` may hold gradients of slices before."""
        self._before = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}
        self.several = False  # for one parameter
        self.any = False
        self._seen: set[torch.nn.Parameter] = set()
        self._given: dict[torch.nn.Parameter, torch.Tensor] = {}  # to the loop
        self._versions: dict[torch.nn.Parameter, int] = {}  # of sparse ones, which have no subclass
        self._empty: set[torch.nn.Parameter] = set()  # whose gradient holds nothing, and is only there to be looked at

    def add(self, parameter: torch.nn.Parameter, look: Callable[[], None]) -> bool:
        """Is this the parameter's first? Whoever calls a torch function with what is in `.grad` from now on calls
        `look` before."""
        assert parameter.grad is not None
        first = parameter not in self._seen
        self.several |= not first
        self.any = True
        self._seen.add(parameter)
        self._empty.discard(parameter)
        if parameter.grad.layout is not torch.strided:
            self._given[parameter], self._versions[parameter] = parameter.grad, parameter.grad._version
        elif parameter.grad is not self._given.get(parameter):
            self._given[parameter] = parameter.grad = SliceGradient.of(parameter.grad, look)
        return first

    def has_any_of(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        return not self._seen.isdisjoint(parameters)

    def fill(self, parameters: Iterable[torch.nn.Parameter], look: Callable[[], None]) -> None:
        """Those that have got no gradient here may have one from other ranks: whoever looks finds that, too."""
        for parameter in parameters:
            if parameter.grad is None:
                self._given[parameter] = parameter.grad = SliceGradient.of(torch.zeros_like(parameter), look)
                self._empty.add(parameter)

    @torch.no_grad()
    def take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """They are whole, as far as this slice goes; what comes for them now is no matter of it.

        Raises UserError where what these hold is not what backward has left.
        """
        for parameter in parameters:
            grad = parameter.grad
            if parameter in self._seen:
                self._seen.discard(parameter)
                if grad is None:
                    raise UserError(DROPPED)
                of_sparse = self._versions.get(parameter)
                if grad is not self._given[parameter] or (of_sparse is not None and of_sparse != grad._version):
                    raise UserError(BY_HAND)
                parameter.grad = plain_of(grad)
            elif parameter in self._empty and grad is self._given[parameter]:
                parameter.grad = None
            elif grad is not None:
                before, version = self._before.get(parameter, (None, 0))
                if (before is not grad or version != grad._version) and bool(grad.count_nonzero()):
                    raise UserError(BY_HAND)

    def give_back(self) -> None:
        """What is in `.grad` is what it was before it was given to the loop: nobody makes it whole any more."""
        for parameter, given in self._given.items():
            if parameter.grad is given:
                parameter.grad = None if parameter in self._empty else plain_of(given)

    def make_whole(self, parameter: torch.nn.Parameter) -> None:
        """What is in `.grad` is what the loop's own names for it mean, too."""
        given = self._given.pop(parameter, None)
        if parameter.grad is not None and isinstance(given, SliceGradient):
            given.plain = parameter.grad


def stage_places(groups: Sequence[Sequence[torch.nn.Parameter]]) -> dict[torch.nn.Parameter, int]:
    """A weight's sum is there at its first step: one that several optimizers step is of the first of them."""
    place: dict[torch.nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        for parameter in group:
            place.setdefault(parameter, number)
    return place


class Stage:
    """What one optimizer steps on: buckets [first, stop) of all, and a tail with `COUNTS` behind the uses of each
    parameter."""

    def __init__(self, buckets: Sequence[Bucket], first: int, tail: Tail):
        self.first, self.stop = first, first + len(buckets)
        self.parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self.tail = tail


@dataclass(frozen=True)
class Unstepped:
    """What a loop says of a task in whose last slice it makes no step: it adds gradients up, has skipped the slice, or
    has been left.

    Attributes:
        computed: It has had a slice of the task, and not skipped it.
        apart: It has had none, and goes on with the next task.
        skipped: It has had one, and skipped it.
        makes_up: What slices before have brought is stepped on in its place.
        clips_unknown: It has yet to clip.
    """

    computed: bool = True
    apart: bool = False
    skipped: bool = False
    makes_up: bool = False
    clips_unknown: bool = False


STEPPED = Unstepped()  # says nothing else


class Gradients:
    """Main thread: `open_task`, per slice `open_slice`, backward (hooks), `take` and `close_slice`; after the last
    slice's backward, stage by stage, `flush` and `collect`. Communication thread: `released`, `pack`."""

    def __init__(
        self,
        model: torch.nn.Module,
        bucket_bytes: int,
        pace: Callable[[float], None],
        wake: Callable[[], None],
        overlap: bool = True,
        groups: Sequence[Sequence[torch.nn.Parameter]] = (),
        leave: Callable[[], None] = lambda: None,
        rank: int = 0,
        ranks_counted: int = 0,
        ranks: int = 1,
        skips: bool = False,
        allocate: Allocate = allocate_anywhere,
    ) -> None:
        """`pace(fraction)` holds an emulated device back to its time; `wake` tells that a bucket is released.

        Without `overlap` nothing is released before a task's last slice is over. `groups`: the parameters of each
        optimizer, in the order of their steps; the model's others belong to the last. `leave` is called by the thread
        that has filled a bucket or a tail, before that is released (`DeviceOrder.leave`). Of `ranks_counted` each round
        tells who has given how many samples; this is `rank` of `ranks`. `skips`: a round with gradients that are not
        finite completes, and brings nothing. `allocate` gives what is summed.
        """
        self.look: Callable[[int], None] = lambda stage: None  # the loop is about to look at this stage's gradients
        self._rank, self._ranks_counted = rank, ranks_counted
        self._buffers = shared_buffers(model)
        self._writes = Writes(model, [parameter for parameter in model.parameters() if parameter.requires_grad])
        self._ranks = ranks
        device, dtype = next(model.parameters()).device, summed_in([*model.parameters(), *model.buffers()])
        count = sum(buffer.numel() for buffer in self._buffers)
        self._means = count - sum(buffer.numel() for buffer in added_buffers(model))  # values, before those that add up
        self._shared, self._changes = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
        self._make_stages(model, partial(make_buckets, bucket_bytes=bucket_bytes, allocate=allocate), groups, device)
        self.samples = 0  # of the task whose buckets were all released last
        self._pace = pace
        self._wake = wake
        self._leave = leave
        self._skips = skips
        self.spoiled = False  # has the round of this task brought nothing?
        self._overlap = overlap  # no more, once a slice has had several gradients for a parameter
        self._shown = False  # that a slice has one gradient a parameter
        self._rounds_watched = 0
        self._versions: dict[torch.nn.Parameter, int] = {}  # of weights, when the task began
        self._arrivals = Arrivals()  # in this slice
        self._totals: list[torch.Tensor] = []  # of released buckets, finite if all of the bucket is
        self._released = threading.Semaphore(0)
        self._next = 0  # bucket to be released
        self._flushed = 0  # stages of which all is released
        self._collected = 0  # stages whose sums are in `.grad`
        self._taken: set[int] = set()  # stages whose gradients of this slice are in the buckets
        self._units = TaskUnits()
        self._held: set[int] = set()  # stages whose gradients the loop has been given before its step
        self._stepped: set[int] = set()  # stages that some rank steps on, in this round
        self._missed = 0  # rounds in which this rank, whose loop goes on, had no slice
        self.apart = False  # has some rank had no slice in this round?
        self.looks_differ = False  # are there ranks that look at gradients before a step, and others that do not?
        self.skipped = False  # has some rank skipped its slice, in this round?
        self.clips_unknown = False  # does some rank not know how loops clip, in this round?
        self._last_slice = False
        self._listening = False
        self._hooks = self._listen()

    def _make_stages(
        self,
        model: torch.nn.Module,
        buckets_of: Callable[[Sequence[torch.nn.Parameter]], list[Bucket]],
        groups: Sequence[Sequence[torch.nn.Parameter]],
        device: torch.device,
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        place = stage_places(groups)
        last = max(0, len(groups) - 1)
        self.buckets: list[Bucket] = []
        self.stages: list[Stage] = []
        for number in range(last + 1):
            mine = [parameter for parameter in trained if place.get(parameter, last) == number]
            buckets = buckets_of(mine)
            changes = self._buffer_views(self._changes) if number == last else []
            counted = self._ranks_counted if number == last else 0
            writers = self._ranks if number == last and self._ranks > 1 else 0
            tail = Tail(len(mine) + counted + COUNTS, changes, device, self._rank, writers, self._changes.dtype)
            self.stages.append(Stage(buckets, len(self.buckets), tail))
            self.buckets += buckets
        self._where = {
            parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket.parameters
        }
        uses = Counter(parameter for group in groups for parameter in set(group))
        self._of_several = {parameter for parameter, optimizers in uses.items() if optimizers > 1}
        self._stage_of = {parameter: n for n, stage in enumerate(self.stages) for parameter in stage.parameters}
        total = sum(bucket.flat.numel() for bucket in self.buckets)
        sums = accumulate(bucket.flat.numel() for bucket in self.buckets)
        self._backward_share = [done / total for done in sums]

    def _buffer_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([buffer.numel() for buffer in self._buffers])
        return [part.view_as(buffer) for part, buffer in zip(parts, self._buffers, strict=True)]

    @property
    def tail(self) -> Tail:
        """The last one: what ends a round."""
        return self.stages[-1].tail

    @torch.no_grad()
    def adopt_buffers(self) -> None:
        """All ranks hold the same buffers now."""
        self._writes.adopt()
        if self._buffers:
            torch._foreach_copy_(self._buffer_views(self._shared), self._buffers)

    def open_slice(self, samples: int, last: bool) -> None:
        """The backward calls from now on are of a slice of `samples`, the task's last or not."""
        self._units.open_slice(samples)
        self._held.clear()
        self._arrivals = Arrivals(self._where)
        self._last_slice = last
        self._listening = True

    def tell_units(self, units: float | None, loss: torch.Tensor | None, is_sum: bool = False) -> None:
        """See `TaskUnits.tell`."""
        self._units.tell(units, loss, is_sum)

    @property
    def arrived(self) -> bool:
        """Has the slice that is out brought any gradient?"""
        return self._arrivals.any

    @torch.no_grad()
    def fill(self, idle: bool) -> None:
        """A backward pass of the job's is over, or is left out, as there is nothing to learn (`idle`)."""
        for number, stage in enumerate(self.stages):
            comes = number not in self._taken and number >= self._collected
            if comes and (idle or self._arrivals.has_any_of(stage.parameters)):
                self._arrivals.fill(stage.parameters, partial(self.look, number))

    def hold(self, number: int, held: bool) -> None:
        """The loop has been given this stage's gradients to look at, or steps on them now."""
        (self._held.add if held else self._held.discard)(number)

    def is_stepped(self, number: int) -> bool:
        """Once this stage's sums are in: do other ranks, or this one, step on them?"""
        return number in self._stepped

    def close(self) -> None:
        """Leave gradients alone, until the next task is opened: the job is over, or goes on in delayed mode."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._arrivals.give_back()

    @torch.no_grad()
    def _arrive(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        stage = self._stage_of[parameter]
        if not self._listening or stage < self._collected or stage in self._taken:
            if self._listening and stage in self._held:
                raise UserError(AGAIN)
            if self._listening and parameter in self._of_several:
                raise UserError(
                    "a weight that two optimizers step got a gradient after the first of its steps in a batch, which"
                    " ranks do not sum: call all backward before job.step(first, second), or take sync.delay_bound 1"
                )
            return  # after the stage's step: the next one's
        if self._where[parameter] < self._next:
            raise UserError(
                "a weight got a second gradient in one slice, after its first had left for the other ranks:"
                " with several backward calls a slice, set sync.overlap to false"
            )
        self._units.arrived(stage)
        first = self._arrivals.add(parameter, partial(self.look, stage))
        if first and self._last_slice and self._overlap and self._shown:
            self.buckets[self._where[parameter]].missing -= 1
            self._release_full()

    def _release_full(self) -> None:
        """Release in the one order that all ranks share, whatever order backward took here."""
        while self._flushed < len(self.stages) and self._next < self.stages[self._flushed].stop:
            bucket = self.buckets[self._next]
            if bucket.missing:
                return
            # Backward takes about twice as long as forward: gradients come in the last two thirds.
            self._pace((1 + 2 * self._backward_share[self._next]) / 3)
            bucket.add(self._units.of_slice(self._flushed))
            self._release_bucket()

    def _release_bucket(self) -> None:
        self._totals.append(self.buckets[self._next].flat.sum())
        self._next += 1
        self._leave()
        self._released.release()
        self._wake()

    @torch.no_grad()
    def take(self, number: int) -> None:
        """A stage's gradients of this slice are whole: into the buckets with them. Where it is not the task's last,
        `.grad` is empty afterwards.

        Raises UserError where others were put there since backward.
        """
        if number in self._taken or number < self._collected:
            return
        stage = self.stages[number]
        self._arrivals.take(stage.parameters)
        for bucket in self.buckets[max(self._next, stage.first) : stage.stop]:
            bucket.add(self._units.of_slice(number))
        self._units.take(number)
        self._taken.add(number)
        if not self._last_slice:
            self._drop(stage.parameters)

    def close_slice(self) -> None:
        """The slice's last backward is over: `take` what has not been taken."""
        self._overlap &= not self._arrivals.several
        self._shown |= self._arrivals.any
        for number in range(len(self.stages)):
            self.take(number)
        self._taken.clear()
        self._arrivals = Arrivals()
        self._listening = False

    def _drop(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def flush(
        self,
        samples: int,
        number: int | None = None,
        scaled: bool = False,
        unstepped: Unstepped = STEPPED,
        looks: bool = False,
    ) -> float:
        """In the last slice: release all stages up to this one, which the loop steps next (None: all, and it steps
        none, see `unstepped`), whose gradients have been taken. `looks`: it looks at them before.

        Returns a sum over them. If it is not finite, nor are they, and the tail stays, so that the round cannot
        complete anywhere; unless they are `scaled`, whose infinities make all ranks skip the step, or the tail tells
        all ranks to leave the round out.
        """
        self.samples = samples
        total = 0.0
        for stage in self.stages[self._flushed : len(self.stages) if number is None else number + 1]:
            while self._next < stage.stop:
                self._release_bucket()
            self._watch_weights(stage)
            if stage is self.stages[-1]:
                self._find_changes(samples)
            if self._totals:
                total += float(torch.stack(self._totals).sum())
            self._totals.clear()
            spoiled = not scaled and not math.isfinite(total)
            if spoiled and not self._skips:
                break
            used = [count for bucket in self.buckets[stage.first : stage.stop] for count in bucket.used]
            place = self._flushed
            steps = place == number or (unstepped.makes_up and self._units.has_any(place))
            skips = unstepped.computed and not steps and self._units.has_any(place)
            given = [0] * self._ranks_counted if stage is self.stages[-1] else []
            if given:
                given[self._rank] = samples
            units = self._units.given(place), self._units.counted(place)
            absent = unstepped.computed and not steps and not skips
            roles = steps, steps and looks, skips, absent, (steps or skips or absent) and self._missed > 0
            says = unstepped.skipped, unstepped.clips_unknown, unstepped.apart
            self._missed += unstepped.apart and stage is self.stages[-1]
            counts = [*used, *given, self._units.sums, *units, *roles, *says, spoiled, samples]
            stage.tail.counts.copy_(torch.tensor(counts, dtype=stage.tail.counts.dtype))
            stage.tail.pack()
            self._flushed += 1
            self._leave()
            self._released.release()
            self._wake()
        return total

    def _watch_weights(self, stage: Stage) -> None:
        """Before its step: those that something else has written in this task (an initialisation by the first batch).
        Where that is all weights, the loop did it, on all ranks alike."""
        mine = [weight for weight in stage.parameters if weight in self._versions]
        changed = [weight for weight in mine if weight._version != self._versions[weight]]
        if len(changed) < len(mine):
            self._writes.weights += changed

    def _find_changes(self, samples: int) -> None:
        """Of buffers, and in the first rounds of weights, for the last tail."""
        self.tail.writes = self._writes.find(self._changes.device, self._changes.dtype)
        self._writes.weights = []
        if self._buffers:
            torch._foreach_copy_(self._buffer_views(self._changes), self._buffers)
            self._changes.sub_(self._shared)
            self._changes[: self._means].mul_(samples)
            self._totals.append(self._changes.sum())

    def _take_changes(self, samples: int) -> None:
        """Of buffers, out of the last tail."""
        if not self.spoiled:
            self._writes.take(self.tail.told)
            self._shared[: self._means].add_(self._changes[: self._means], alpha=1 / samples)
            self._shared[self._means :].add_(self._changes[self._means :])
        self._put_buffers_back()

    def _put_buffers_back(self) -> None:
        """What ranks hold alike."""
        self._writes.put_back()
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._buffer_views(self._shared))

    @property
    def has_released(self) -> bool:
        """Has any of the task's gradients been released?"""
        return self._next > 0 or self._flushed > 0

    def is_collected(self, number: int) -> bool:
        """Are the sums of this stage in `.grad`?"""
        return number < self._collected

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the task's slices, of which nothing has been released."""
        for bucket in self.buckets:
            bucket.clear()
        self._drop(self._where)
        self._taken.clear()
        self._units.clear()
        self._arrivals = Arrivals()
        self._listening = False
        self._put_buffers_back()

    def give_up(self) -> None:
        """The task's round is void, or its step has been another rank's: forget all of it. Nobody fetches meanwhile."""
        self.discard()
        while self.released():
            pass
        self._totals.clear()
        self._next = self._flushed = 0
        self._collected = len(self.stages)  # what the loop still brings is no matter of any task

    def begin_anew(self) -> None:
        """Members are others now. What rounding took from the sums so far is given up: shards are other ranks' now."""
        for bucket in self.buckets:
            bucket.residual = Residual()

    def samples_given(self) -> dict[int, int]:
        """By rank, in the round whose sums have come in last, where ranks are counted; none where it brings nothing."""
        if self.sum_is_spoiled:
            return {}
        counts = self.tail.counts[:-COUNTS].tolist()[-self._ranks_counted :]
        return {rank: int(samples) for rank, samples in enumerate(counts) if samples}

    @property
    def shared_buffers(self) -> torch.Tensor:
        """The values, flat, that all ranks shared when the last round had landed."""
        return self._shared

    @torch.no_grad()
    def take_over_buffers(self, shared: torch.Tensor, travel: Sequence[int]) -> None:
        """From a rank on which another round has landed; `travel` is its `tail.travel`."""
        self._shared.copy_(shared)
        self._writes.adopt()  # which are among the model's own tensors
        self._put_buffers_back()
        self.tail.travel = list(travel)

    @property
    def summed_samples(self) -> int:
        """Of the round whose tail was unpacked last."""
        return int(self.tail.counts[-1])

    @property
    def sum_is_spoiled(self) -> bool:
        """Was anything in that round not finite?"""
        return bool(self.tail.counts[-2])

    def released(self) -> bool:
        """Has the next bucket (or, after a stage's last, its tail) been released? Counts it as fetched if so."""
        return self._released.acquire(blocking=False)

    @torch.no_grad()
    def pack(self, index: int, wire: WireFormat) -> torch.Tensor:
        """A bucket as it goes out, with what rounding took from it last time."""
        bucket = self.buckets[index]
        if wire != "float32":
            if bucket.lost is None:
                bucket.lost = torch.zeros_like(bucket.flat)
            bucket.flat += bucket.lost
            sent = round_trip(bucket.flat, wire)
            torch.sub(bucket.flat, sent, out=bucket.lost)
            bucket.lost.nan_to_num_(0.0, 0.0, 0.0)  # of an infinite gradient nothing is left to be sent later
            bucket.flat.copy_(sent)
        return bucket.flat

    @torch.no_grad()
    def collect(self, number: int | None = None) -> int:
        """Sums up to this stage's (None: the last's) are in: set the gradients, means over the round's samples; with
        the last, buffers take their means. Returns how many samples there were: none where all ranks have withdrawn.
        Of a spoiled round there are no gradients, and buffers are what they were.

        Raises UserError on all ranks where some step and others do not.
        """
        samples = 0
        for stage in self.stages[self._collected : len(self.stages) if number is None else number + 1]:
            *used, sums, given, units = stage.tail.counts[: 3 - COUNTS].tolist()
            step, look, skip, absent, behind, *says, spoiled, count = stage.tail.counts[3 - COUNTS :].tolist()
            skipped, unknown, apart = says
            samples = int(count)
            divisor = count if sums else units or given
            self.spoiled |= spoiled > 0
            self.skipped |= skipped > 0
            self.looks_differ |= 0 < look < step
            self.apart |= apart > 0
            if step and behind and (skip or absent):
                raise UserError(BEHIND.format(step=step, others=skip + absent, behind=behind))
            self.clips_unknown |= unknown > 0
            if step and skip:
                raise UserError(
                    f"the loops of {step:.0f} ranks step an optimizer (or look at its gradients) and those of"
                    f" {skip:.0f} do not, with gradients of"
                    " this batch, but at sync.delay_bound 0 all ranks make the same steps: skip a batch before its"
                    " backward (or multiply its loss by 0), or take a delay bound of 1 or more"
                )
            for bucket in self.buckets[stage.first : stage.stop]:
                any_used = [used.pop(0) and not self.spoiled for _ in bucket.parameters]
                if given or self.spoiled:  # or what was there before stays as it is
                    means = torch._foreach_div(bucket.views, divisor) if any(any_used) else bucket.views
                    for parameter, mean, is_used in zip(bucket.parameters, means, any_used, strict=True):
                        parameter.grad = as_of(mean, parameter) if is_used else None
                        self._arrivals.make_whole(parameter)
                bucket.clear()
                if self.spoiled:  # so is what rounding has taken from it
                    bucket.lost, bucket.residual = None, Residual()
            if step:
                self._stepped.add(self._collected)
            self._collected += 1
        if self._collected == len(self.stages):
            if samples:
                self._take_changes(samples)
            self._next = self._flushed = 0
        return samples

    def open_task(self) -> None:
        """The next slices are another round's."""
        self._versions = {}
        if self._rounds_watched < ROUNDS_WATCHED:
            self._rounds_watched += 1
            self._versions = {parameter: parameter._version for parameter in self._where}
        self._collected = 0
        self._units.clear()
        self._stepped.clear()
        self.spoiled = self.skipped = self.clips_unknown = self.looks_differ = self.apart = False
        if not self._hooks:
            self._hooks = self._listen()

    def _listen(self) -> list[torch.utils.hooks.RemovableHandle]:
        with all_trained(self._where):
            return [parameter.register_post_accumulate_grad_hook(self._arrive) for parameter in self._where]
