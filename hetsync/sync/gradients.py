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
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from hetsync.config.schema import WireFormat
from hetsync.errors import UserError, complain
from hetsync.plane.base import Allocate, Residual, allocate_anywhere
from hetsync.plane.wire import round_trip
from hetsync.sync.buffers import Writes
from hetsync.sync.loop_report import STEPS, LoopReport, Roles
from hetsync.sync.model_tensors import all_trained
from hetsync.sync.reals import allocated, as_of, count_reals, reals, summed_in
from hetsync.sync.slice_gradient import Arrivals, plain_of
from hetsync.sync.tail import Tail, added_buffers, shared_buffers
from hetsync.sync.units import TaskUnits

WRITTEN = (
    "{} were written in the first batch by something else than a step, and each rank has made them of its own part: all"
    " go on with rank 0's; for those of a whole batch call the model on one, the same on all ranks, before job.prepare"
)
ROUNDS_WATCHED = 2  # in which forward may initialise weights
AGAIN = (
    "a weight got another gradient after gradients of this batch had been looked at or clipped, and before their step,"
    " but with sync.delay_bound 0 ranks have summed them by then: call backward for all losses of a step first, or take"
    " a delay bound of 1 or more"
)


WITH_GRAPH = (
    "gradients that backward has made with create_graph=True were computed with before their step, but with"
    " sync.delay_bound 0 ranks sum them, and sums have no graph: take torch.autograd.grad(loss, weights,"
    " create_graph=True) for what is differentiated once more, torch.no_grad() for a mere look, or a delay bound of 1"
    " or more"
)


class Place(NamedTuple):
    """Of a parameter: its stage, its bucket among all, whether several optimizers step it, and who is told that the
    loop looks at its gradient."""

    stage: int
    bucket: int
    of_several: bool
    look: Callable[[], None]


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


def any_with_graph(parameters: Iterable[torch.nn.Parameter]) -> bool:
    return any(parameter.grad is not None and parameter.grad.requires_grad for parameter in parameters)


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


class Counts(NamedTuple):
    """Behind the uses of each parameter in a stage's tail, summed over ranks.

    Attributes:
        sums: Ranks whose losses are sums.
        given: Units that gradients are means over.
        counted: Those of them whose loss is a number.
        roles: As in `Roles`, one after the other.
        spoiled: Ranks whose gradients are not finite.
        samples: Of the round.
    """

    sums: float
    given: float
    counted: float
    roles: Roles
    spoiled: float
    samples: float

    @classmethod
    def read(cls, told: Sequence[float]) -> Counts:
        """Out of the last `COUNTS` of a tail."""
        sums, given, counted, *roles, spoiled, samples = told
        return cls(sums, given, counted, Roles(*roles), spoiled, samples)

    def written(self) -> list[float]:
        return [self.sums, self.given, self.counted, *self.roles, self.spoiled, self.samples]


COUNTS = len(Counts._fields) - 1 + len(Roles._fields)


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
        self._overlap = overlap  # no more, once a slice has had several gradients for a parameter
        self._shown = False  # that a slice has one gradient a parameter
        self._rounds_watched = 0
        self._versions: dict[torch.nn.Parameter, int] = {}  # of weights, when the task began
        self._names = {weight: name for name, weight in model.named_parameters()}
        self._told_written = False
        self._arrivals = Arrivals()  # in this slice
        self._totals: list[torch.Tensor] = []  # of released buckets, finite if all of the bucket is
        self._released = threading.Semaphore(0)
        self._next = 0  # bucket to be released
        self._flushed = 0  # stages of which all is released
        self._collected = 0  # stages whose sums are in `.grad`
        self._taken: set[int] = set()  # stages whose gradients of this slice are in the buckets
        self._units = TaskUnits()
        self._held: set[int] = set()  # stages whose gradients the loop has been given before its step
        self._absent: dict[int, torch.nn.Parameter] = {}  # no rank has a gradient, and the loop was shown one
        self._told: dict[int, Counts] = {}  # by stage, whose sums are in: what ranks say of this round
        self._missed = False  # has this rank, whose loop goes on, had no part of some round?
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
        uses = Counter(parameter for group in groups for parameter in set(group))
        self._places = {
            parameter: Place(number, place, uses[parameter] > 1, partial(self._look_at, number))
            for number, stage in enumerate(self.stages)
            for place in range(stage.first, stage.stop)
            for parameter in self.buckets[place].parameters
        }
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
        self._arrivals = Arrivals(self._places)
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

    # Of the stages whose sums are in:

    def is_stepped(self, number: int) -> bool:
        """Do other ranks, or this one, step on this one?"""
        return number in self._told and self._told[number].roles.step > 0

    @property
    def spoiled(self) -> bool:
        """Does the round bring nothing?"""
        return any(told.spoiled for told in self._told.values())

    @property
    def skipped(self) -> bool:
        """Has some rank skipped its slice?"""
        return any(told.roles.skipped for told in self._told.values())

    @property
    def made_up(self) -> bool:
        """Does some rank make these steps without its loop, as it has skipped its slice, or has none?"""
        return self.skipped or any(told.roles.apart for told in self._told.values())

    @property
    def clips_unknown(self) -> bool:
        """Does some rank not know how loops clip?"""
        return any(told.roles.clips_unknown for told in self._told.values())

    @property
    def looks_differ(self) -> bool:
        """Do some ranks look at gradients before a step, and others not, as they have none of their own?"""
        return any(0 < told.roles.look < told.roles.step for told in self._told.values())

    def close(self) -> None:
        """Leave gradients alone, until the next task is opened: the job is over, or goes on in delayed mode."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._arrivals.give_back()

    def _look_at(self, stage: int) -> None:
        if torch.is_grad_enabled() and any_with_graph(self.stages[stage].parameters):
            raise UserError(WITH_GRAPH)
        self.look(stage)

    def _arrive(self, place: Place, parameter: torch.Tensor) -> None:
        """Once a parameter and backward pass, in Python: nothing is asked here that is known before."""
        assert isinstance(parameter, torch.nn.Parameter)
        if parameter.grad is None:  # what autograd calls an undefined one
            return
        stage = place.stage
        if not self._listening or stage < self._collected or stage in self._taken:
            if self._listening and stage in self._held:
                raise UserError(AGAIN)
            if self._listening and place.of_several:
                raise UserError(
                    "a weight that two optimizers step got a gradient after the first of its steps in a batch, which"
                    " ranks do not sum: call all backward before job.step(first, second), or take sync.delay_bound 1"
                )
            return  # after the stage's step: the next one's
        if place.bucket < self._next:
            raise UserError(
                "a weight got a second gradient in one slice, after its first had left for the other ranks:"
                " with several backward calls a slice, set sync.overlap to false"
            )
        self._units.arrived(stage)
        first = self._arrivals.add(parameter, place.look)
        if first and self._last_slice and self._overlap and self._shown:
            self.buckets[place.bucket].missing -= 1
            self._release_full()

    @torch.no_grad()
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
    def flush(self, samples: int, number: int | None = None, scaled: bool = False, report: LoopReport = STEPS) -> float:
        """In the last slice: release all stages up to this one, which the loop steps next (None: all, and it steps
        none), whose gradients have been taken. `report`: what else the loop says.

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
            given = [0] * self._ranks_counted if stage is self.stages[-1] else []
            if given:
                given[self._rank] = samples
            units = self._units.sums, self._units.given(place), self._units.counted(place)
            has_any = self._units.has_any(place)
            roles = Roles.of(report, chosen=place == number, has_any=has_any, missed=self._missed)
            self._missed |= report.apart and stage is self.stages[-1]
            counts = [*used, *given, *Counts(*units, roles, spoiled, samples).written()]
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
        if changed and len(changed) < len(mine):
            self._writes.weights += changed
            if self._rank == 0 and not self._told_written:
                self._told_written = True
                complain(WRITTEN.format(", ".join(sorted(self._names[weight] for weight in changed))))

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
        self._drop(self._places)
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
            numbers = stage.tail.counts.tolist()
            used, told = numbers[:-COUNTS], Counts.read(numbers[-COUNTS:])
            self._told[self._collected] = told
            told.roles.require_alike()
            samples, spoiled = int(told.samples), self.spoiled
            divisor = told.samples if told.sums else told.counted or told.given
            for bucket in self.buckets[stage.first : stage.stop]:
                any_used = [used.pop(0) and not spoiled for _ in bucket.parameters]
                if told.given or spoiled:  # or what was there before stays as it is
                    means = torch._foreach_div(bucket.views, divisor) if any(any_used) else bucket.views
                    found = zip(means, bucket.parameters, any_used, strict=True)
                    self._put(bucket.parameters, [as_of(mean, p) if is_used else None for mean, p, is_used in found])
                bucket.clear()
                if spoiled:  # so is what rounding has taken from it
                    bucket.lost, bucket.residual = None, Residual()
            self._collected += 1
        if self._collected == len(self.stages):
            self.tail.land()
            if samples:
                self._take_changes(samples)
            self._next = self._flushed = 0
        return samples

    def _put(self, parameters: Sequence[torch.nn.Parameter], means: Sequence[torch.Tensor | None]) -> None:
        """What ranks have summed, where any has a gradient: in the memory of this rank's own, for which a script may
        have other names. What the loop has been shown of one that is nobody's stays zeros until its step."""
        own, values = [], []
        for parameter, mean in zip(parameters, means, strict=True):
            shown, there = self._arrivals.shown(parameter), parameter.grad
            if mean is None and shown is not None and self._held:
                self._absent[id(parameter)] = parameter
                mean = shown
            elif mean is not None and there is not None and (there.layout, there.dtype) == (mean.layout, mean.dtype):
                own.append(there)
                values.append(mean)
                mean = there
            parameter.grad = mean
            self._arrivals.make_whole(parameter)
        if own:
            torch._foreach_copy_(own, values)

    @torch.no_grad()
    def drop_absent(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """Before their step: who has no gradient on any rank has none, unless the loop has made one of its own."""
        for weight in weights if self._absent else ():
            absent = self._absent.pop(id(weight), None) is not None
            if absent and weight.grad is not None and not weight.grad.count_nonzero():
                weight.grad = None

    def open_task(self) -> None:
        """The next slices are another round's."""
        self.drop_absent(list(self._absent.values()))  # no step came
        self._versions = {}
        if self._rounds_watched < ROUNDS_WATCHED:
            self._rounds_watched += 1
            self._versions = {parameter: parameter._version for parameter in self._places}
        self._collected = 0
        self._units.clear()
        self._told.clear()
        if not self._hooks:
            self._hooks = self._listen()

    def _listen(self) -> list[torch.utils.hooks.RemovableHandle]:
        with all_trained(self._places):
            return [
                parameter.register_post_accumulate_grad_hook(partial(self._arrive, place))
                for parameter, place in self._places.items()
            ]
