"""A rank's tasks, slice by slice: a batch comes, the loop computes on it and steps the optimizers, and it is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetsync.balance.device import Device
from hetsync.data.ledger import Span, length
from hetsync.data.loader import Loader
from hetsync.errors import UserError, complain
from hetsync.plane.base import LostError
from hetsync.sync.constraints import NO_CONSTRAINTS, ChangesAfterSteps, Constraints
from hetsync.sync.engine import Engine
from hetsync.sync.lone import total_of
from hetsync.sync.loop_report import LoopReport
from hetsync.sync.messages import CapFound, LoopCounts, Task
from hetsync.sync.model_tensors import ModelTensors
from hetsync.sync.rates import Rates
from hetsync.sync.recovery import spans_of
from hetsync.sync.steps import LocalSteps, Steps
from hetsync.sync.undo import BeforeStep, Tensors
from hetsync.sync.units import AverageUnits
from hetsync.train.accounts import RankTotals, TaskInWork, Unstepped
from hetsync.train.memory import SliceMemory
from hetsync.train.prepared import PreparedScaler
from hetsync.train.reduction import check_is_mean, units_of

SCALE = "loss scale"
LOSSES_CHECKED = 32  # of this rank
SLICES_CHECKED = 2
SKIPPED = (
    " in a batch that another rank has skipped, which makes the step without that: with sync.delay_bound 0 skip no"
    " batch, but call job.backward(loss, weight=0), and go on as with any"
)
UNSTEPPED = (
    "the loop has clipped or looked at gradients and made no step on them, in a batch in which another rank had no"
    " part, and so made the step: with sync.delay_bound 0 make the step in each batch, or decide by what is known"
    " before backward (job.step_count), or take a delay bound of 1 or more"
)
LOOKED_AT_BY_SOME = (
    "gradients were changed between backward and step in a batch in which a rank had none of a weight, and so could not"
    " do the same: with sync.delay_bound 0 call job.backward(loss) in place of loss.backward(), which gives all"
    " ranks all gradients"
)
CHANGES = (
    "the loop changes weights after optimizer.step, and what ranks merge with a sync.delay_bound of 1 or more need not"
    " keep to that: if it is a constraint (clamped, of bounded norm, orthogonal), give job.constrain the model and the"
    " function"
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a session trains.

    Args:
        model: All weights and buffers that ranks share.
        optimizers: Of the model's weights, in the order in which a loop steps them.
        rates: The learning rates of each optimizer.
        averages: Running averages of weights, which each rank keeps for itself between rests.
        scaler: Multiplies the loss so that float16 holds its gradients, which then may be infinite.
        shared: Weights that ranks share in a run that is gone on with, though the script may have frozen them.
        constraints: Of weights.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    rates: Sequence[Rates]
    averages: Sequence[torch.nn.Module] = ()
    scaler: PreparedScaler | None = None
    shared: Sequence[torch.nn.Parameter] = ()
    constraints: Constraints = NO_CONSTRAINTS


class TaskRunner:
    """Attributes:
    steps: Of each optimizer.
    tensors: The model's, as the engine knows them.
    work: The task that is computed.
    left: The loop has ended; nobody computes slices, and optimizers step without it.
    was_stepped: Has this loop over batches stepped an optimizer?
    has_learned: Has any done so with a gradient of its own?
    """

    def __init__(
        self,
        *,
        trained: Trained,
        batch_size: int,
        ranks: int,
        device: Device,
        loader: Loader,
        engine: Engine,
        totals: RankTotals,
        record: Callable[..., None],
        memory: SliceMemory | None,
        skips: bool = False,
    ) -> None:
        """`totals` are kept, and `record` is told of each task. `memory` tells how many samples fit, where that is not
        known. `skips`: what is not finite is left out of rounds."""
        self._local = LocalSteps.of(trained.optimizers, batch_size, ranks)
        self.steps = [
            Steps(each, rates, self._local, partial(self._before, n), partial(self._after, n))
            for n, (each, rates) in enumerate(zip(trained.optimizers, trained.rates, strict=True))
        ]
        self._alone = ranks == 1  # no other has to hold the same
        self._trained = trained
        self.renew_tensors()
        self.work: TaskInWork | None = None
        self.left = False
        self.was_stepped = self.has_learned = False
        self.unstepped = Unstepped()
        self._adds_up = False  # has the loop left a task without a step?
        self._losses_to_check = LOSSES_CHECKED
        self._steps_some = False  # or without that of some optimizer?
        self._tells_counts = not self._alone  # is the coordinator to be told where the loop does so?
        self._tells = False  # does the loop tell its losses?
        self._units = AverageUnits()  # of this rank, until tasks tell those of all
        self._units_told: tuple[float, ...] = ()  # by the last task that knew
        self._clips: Sequence[Callable[[], object]] | None = None  # as the loop has clipped when it made its last step
        self._makes_up = False  # a step, where the loop has skipped a batch and those of others have not
        self._versions: dict[torch.nn.Parameter, int] = {}  # of gradients, as the loop's first batch came
        self._spent: set[int] = set()  # optimizers that have stepped on the gradients that are there
        self._undo: list[BeforeStep] = []  # of steps of the task that others' steps follow
        self._scale_before: Mapping[str, Any] | None = None  # the first of these
        self._changes = None if self._alone or trained.constraints else ChangesAfterSteps()
        self._kept: Tensors | None = None  # what a task that does not count is not to change
        self._batch_size = batch_size
        self._scaler = trained.scaler
        self._scaled = trained.scaler is not None and trained.scaler.is_enabled()
        self._device = device
        self._loader = loader
        self._engine = engine
        engine.look = self.look
        self._totals = totals
        self._record = record
        self._memory = memory
        self._skips = skips
        self._slices_checked = 0
        self._slice: Sequence[Span] = ()  # that is out, or was last
        self._data_before = self._waited_before = 0.0  # seconds in all, up to the last task's end

    def renew_tensors(self) -> None:
        """Those of the model as it is now."""
        self.tensors = ModelTensors(self._trained.model, self._trained.optimizers, self._alone)

    def settle(self) -> None:
        """The loop is left: what it has computed counts, as far as it is whole or has left for other ranks."""
        self.left, work = True, self.work
        if work is None:
            return
        if self._is_void(work):
            self._drop(work)
            return
        others_have_it = self._engine.has_released or bool(work.synchronous and work.last and work.collected)
        if work.out and (work.stepped or others_have_it):
            self.close_slice(work)
        if not work.slices_left or others_have_it:
            self.finish(work)
        else:
            self._put_back()
            self.work = None

    def slices(self, task: Task) -> Iterator[Any]:
        work = self.work = TaskInWork(task, len(task.slices))
        self._undo, self._scale_before = [], None
        self._units_told = task.units or self._units_told
        for steps in self.steps:
            steps.begin_task(task)
        batches = iter(self._loader.slices(task))
        for spans in task.slices:
            began = time.monotonic()
            batch = next(batches)
            self._totals.data_seconds += time.monotonic() - began
            self._slice = spans
            work.open_slice(length(spans))
            self._engine.open_slice(task, work.slice_samples, work.last)
            if self._memory is not None:
                self._memory.begin_slice()
            self._device.begin_slice(work.slice_samples)
            if self._changes is not None:
                self._changes.begin_slice()
            yield batch
            self._look_for_changes()
            if self._is_void(work):
                self._drop(work)
                return
            self._check_steps(work)
            self._check_steps_kept(work)
            if work.out:
                if self._is_skipped(work):
                    self._skip(work)
                self.close_slice(work)
        self.finish(work)

    def _is_void(self, work: TaskInWork) -> bool:
        """After a rank's death a synchronous task may be no more to be finished. Then there are no gradients any more,
        as in a slice in which no step is due."""
        if work.synchronous and not work.void and self._engine.is_void:
            if work.out:
                self._pause(work)
            self._give_up(work)
        return work.void

    def _give_up(self, work: TaskInWork) -> None:
        if self._steps_some:  # by a count of its own, which may differ between ranks after this
            raise LostError(
                "a rank has gone, and at sync.delay_bound 0 the others cannot go on where the loop steps its optimizers"
                " in some batches only: go on with --resume (in a script: resume='auto')"
            )
        work.void = True
        self._tells_counts = True  # another one, perhaps
        for step in self._undo:
            step.put_back()
        if self._scaler is not None:
            self._scaler.give_up(self._scale_before)
        if self._engine.give_up(work.task):
            self._totals.samples += work.task.samples
            self._totals.since_rest += work.task.samples
            self._totals.loop_steps += 1
        self._kept = Tensors(_tensors_of(self._trained.model, *self._trained.averages))

    def scale(self) -> dict[str, Any]:
        """Of the loss, for a rank that is behind after a death."""
        return {SCALE: self._scaler.state_dict()} if self._scaler is not None and self._scaled else {}

    def take_scale(self, given: Mapping[str, Any]) -> None:
        if self._scaler is not None and SCALE in given:
            self._scaler.load_state_dict(given[SCALE])

    def _drop(self, work: TaskInWork) -> None:
        for steps in self.steps:
            steps.rates.leave_void(len(work.task.slices) - work.slices_left + work.out)  # that have come to the loop
        self.work, work.out = None, False
        self.tensors.restore()
        self._put_back()
        self._device.take_seconds()

    def _put_back(self) -> None:
        if self._kept is not None:
            self._kept.put_back()
            self._kept = None

    def _check_steps(self, work: TaskInWork) -> None:
        """The loop has asked for the next batch."""
        if work.synchronous and len(work.task.slices) > 1 and len(work.collected) < len(self.steps):
            if self._is_skipped(work):
                return
            raise UserError(
                f"a batch was not stepped on, and with sync.accumulation {len(work.task.slices)} at sync.delay_bound 0"
                " gradients are added up over batches already: call step after each batch's backward, or set"
                " sync.accumulation to 1 and add them up in the loop"
            )

    def _is_skipped(self, work: TaskInWork) -> bool:
        """Has the loop left the slice that is out as it came: no backward, no step?"""
        if work.collected or work.told:
            return False
        if work.synchronous:
            return not self._engine.arrived
        return self._tells or all(weight.grad is None for steps in self.steps for weight in steps.weights)

    def _skip(self, work: TaskInWork) -> None:
        """It counts nothing. Gradients that were stepped on already, and that the loop sets to zero only before its
        next backward, are no part of it."""
        for number, steps in enumerate(self.steps):
            steps.rates.leave_void(1, others_step=work.synchronous and work.slice_samples < work.task.round_samples)
            if work.synchronous and number in self._spent:
                steps.optimizer.zero_grad(set_to_none=True)
        work.skipped = True

    def slice_out(self, what: str) -> TaskInWork:
        if self.work is None or not self.work.out:
            raise UserError(f"{what} was called while no batch is out: call it within the loop over the job's batches")
        self._engine.order.note_script()
        return self.work

    def begin_look(self) -> None:
        """The first batch of a loop is out: its script may only look at it."""
        self._versions = self._versions_of_gradients()

    @property
    def has_only_looked(self) -> bool:
        """Has the script done nothing since with the slice that is out? What is in `.grad` may be of one before."""
        work = self.work
        if work is None or not work.out or work.stepped or work.collected or work.told:
            return False
        if work.synchronous and not self._alone:
            return not self._engine.arrived
        return all(self._versions.get(weight) == now for weight, now in self._versions_of_gradients().items())

    def end_look(self) -> None:
        """The script's lines come, as between two loops, although the slice stays out."""
        for steps in self.steps:
            steps.show_owner(self._task.position)

    def go_on(self) -> None:
        """After such lines: what they have set holds."""
        for steps in self.steps:
            steps.start()
            steps.begin_task(self._task)

    @property
    def _task(self) -> Task:
        assert self.work is not None
        return self.work.task

    def _versions_of_gradients(self) -> dict[torch.nn.Parameter, int]:
        work = self.work
        if work is None or (work.synchronous and not self._alone):  # where hooks tell what comes
            return {}
        return {weight: weight.grad._version for weight in self._trained.model.parameters() if weight.grad is not None}

    @property
    def is_void(self) -> bool:
        """Has a death left the slice that is out without gradients, as far as the loop has come to them?"""
        return self.slice_out("step").void

    @property
    def step_is_due(self) -> bool:
        """In the slice that is out; in synchronous mode only a task's last slice ends with a step."""
        work = self.slice_out("step")
        return not work.void and (work.last or not work.synchronous)

    def collect(self, number: int, *, holds: bool = False, looks: bool = False) -> bool:
        """Before anything is done with an optimizer's gradients: now they are those of its step, in synchronous mode
        the means over all ranks. False where no step is due: there they have been put aside. `holds`: something is done
        before the step. `looks`: by the loop itself, on a rank that has gradients of its own.

        Raises UserError in synchronous mode where others were put there before: ranks had not summed them yet.
        """
        work = self.slice_out("step")
        if self._is_void(work):
            self.steps[number].optimizer.zero_grad(set_to_none=True)  # of this rank's slice, and of no sum
            return False
        if work.synchronous:
            self._engine.hold(number, holds)
        due = work.last or not work.synchronous
        if number in work.collected:
            return due
        self.tensors.restore()
        if not work.synchronous:
            self._check_gradients(number)
            if self._skips and not self._scaled:
                self._leave_out(number, work)
        elif self._engine.is_collected(number):
            raise UserError(
                "with sync.delay_bound 0 each optimizer makes one step a slice, in the order in which they were given"
                " to job.prepare: give them in the order of their steps"
            )
        elif not work.last:
            self._check_gradients(number)
            self._engine.take(work.task, number)
        else:
            self._check_gradients(number)
            self._pause(work)
            for stage in range(number + 1):
                self._engine.take(work.task, stage)
            self._engine.reduce(work.task, number, self._scaled, LoopReport(looks=looks))
            if self._engine.is_void:
                self._give_up(work)
                return False
            self._device.begin_step()
            work.going_on = True
        work.collected.add(number)
        return due

    def _check_gradients(self, number: int) -> None:
        work = self.slice_out("step")
        if any(weight.grad is not None for weight in self.steps[number].weights):
            self.has_learned |= not work.synchronous or self._engine.arrived
        elif not work.idle:
            raise UserError("step found no gradient: call loss.backward() on a loss of this model before it")

    def _leave_out(self, number: int, work: TaskInWork) -> None:
        """Gradients that are not finite: the optimizer steps over weights that have none, and its state stays good.
        What the loop lets averages take in from now on, such as statistics of the batch, is undone with the task."""
        optimizer = self.steps[number].optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not math.isfinite(total_of(weight.grad for weight in weights if weight.grad is not None)):
            self._check_whole()
            if not work.spoiled:
                self._kept = Tensors(_tensors_of(*self._trained.averages))
            work.spoiled += self._slice
            optimizer.zero_grad(set_to_none=True)

    def _check_whole(self) -> None:
        if self._adds_up:
            raise UserError(
                "gradients were not finite while the loop adds them up over batches, of which fault.not_finite"
                " other than stop would lose all: use stop, or step after each batch"
            )

    def _before(self, number: int) -> None:
        """The optimizer is about to step, whoever told it to."""
        if self.left or self._makes_up:
            return
        work = self.slice_out("optimizer.step")
        self.was_stepped = True
        self._look_for_changes()
        if number in work.stepped and work.synchronous:
            raise UserError(
                "an optimizer was stepped twice in one slice, where sync.delay_bound 0 sums gradients over ranks once:"
                " step it once a batch, or take a delay bound of 1 or more"
            )
        self.collect(number)
        unscaled = self._scaler is not None and self._scaler.begin_step(self.steps[number].optimizer)
        self._check_gradients_kept(number, work)
        if unscaled and not math.isfinite(total_of(self._gradients_of(number))):
            self.steps[number].optimizer.zero_grad(set_to_none=True)  # as a scaler steps: not at all
        if work.synchronous:
            self._engine.drop_absent(self.steps[number].weights)
        self._check_steps_kept(work)
        if work.synchronous and not work.void and number < len(self.steps) - 1 and self._engine.keeps_going:
            if self._scaler is not None and not self._undo:
                self._scale_before = self._scaler.state_dict()
            self._undo.append(BeforeStep(self.steps[number].groups))

    def _after(self, number: int) -> None:
        self._trained.constraints.project()
        if self.left or self._makes_up:  # no slice ends after it
            self.tensors.restore()
            return
        work = self.slice_out("optimizer.step")
        work.stepped.add(number)
        if self._is_skipped_elsewhere(work):
            work.after_step = Tensors(self._made_by_steps())
        if self._changes is not None and not work.synchronous:
            self._changes.note_step(weight for steps in self.steps for weight in steps.weights)

    def _look_for_changes(self) -> None:
        """Tell of those that the loop makes after its steps, once."""
        if self._changes is not None and self._changes.found():
            self._changes = None
            if self._engine.coordinator is not None:
                complain(CHANGES)

    # What a loop does itself beside its steps is not done where a rank makes them without its loop.

    def hand_over(self, number: int) -> None:
        """The loop has got the gradients of an optimizer's step, to look at them, or to clip them."""
        work = self.slice_out("step")
        if self._is_skipped_elsewhere(work):
            work.before_step[number] = Tensors(self._gradients_of(number))

    def look(self, number: int) -> None:
        """The loop is about to look at gradients of an optimizer in synchronous mode, or to change them, and gets those
        of the step."""
        work = self.work
        if work is None or not work.out or self.left or number in work.collected:
            return
        for place in range(number + 1):  # in the order of their steps
            weights = self.steps[place].weights
            without = [weight for weight in weights if weight.grad is None]
            if place in work.collected or self._engine.is_collected(place) or len(without) == len(weights):
                continue
            if self.collect(place, holds=True, looks=True):
                others_alone = any(weight.grad is not None for weight in without)
                if others_alone or self._engine.looks_differ or self._is_skipped_elsewhere(work):
                    work.before_step[place] = Tensors(self._gradients_of(place))

    def _is_skipped_elsewhere(self, work: TaskInWork) -> bool:
        return work.synchronous and not work.void and self._engine.is_skipped

    def _check_gradients_kept(self, number: int, work: TaskInWork) -> None:
        given = work.before_step.pop(number, None)
        if given is None or given.are(self._gradients_of(number)):
            return
        if not self._is_skipped_elsewhere(work):
            raise UserError(LOOKED_AT_BY_SOME)
        raise UserError(
            f"gradients were changed between backward (or unscale_, job.collect) and step{SKIPPED}; what"
            " job.clip_grad_norm_ clips all ranks clip alike"
        )

    def _check_steps_kept(self, work: TaskInWork) -> None:
        made, work.after_step = work.after_step, None
        if made is not None and not made.are(self._made_by_steps()):
            raise UserError(
                f"weights, or averages of them, were changed after their step{SKIPPED}; a constraint of weights that"
                " job.constrain knows holds on all ranks"
            )

    def _gradients_of(self, number: int) -> list[torch.Tensor]:
        return [weight.grad for weight in self.steps[number].weights if weight.grad is not None]

    def _made_by_steps(self) -> list[torch.Tensor]:
        return [*self._trained.model.parameters(), *_tensors_of(*self._trained.averages)]

    def _pause(self, work: TaskInWork) -> None:
        """Device time so far; what follows, up to `going_on`, waits for other ranks."""
        if work.going_on:
            self._device.end_step()
        else:
            self._device.end_slice()
        work.going_on = False

    @property
    def batch_samples(self) -> int:
        """Of those on which a step is made, over all ranks: of K batches in synchronous mode."""
        work = self.slice_out("backward")
        return work.task.round_samples if work.synchronous else self._batch_size

    def as_of_batch(self, total: torch.Tensor) -> torch.Tensor:
        """A loss that is a sum over the slice that is out, as it is for as many samples as the batch has."""
        return total * (self.batch_samples / self.slice_out("backward").slice_samples)

    def check_loss(self, loss: torch.Tensor | float) -> None:
        """UserError where it is plainly a sum over the slice that is out. A loop makes its loss in the same way each
        time: only the first are looked at, as with cold caches a look takes a quarter of a millisecond."""
        if isinstance(loss, torch.Tensor) and self._losses_to_check:
            self._losses_to_check -= 1
            check_is_mean(loss, self.slice_out("backward").slice_samples)

    def add_loss(self, mean: torch.Tensor | float) -> None:
        """Of the slice that is out, for the records; several add up. UserError unless it is one number."""
        self._tells = True
        self.slice_out("step").add_loss(mean)

    def tell_backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None, is_sum: bool) -> float:
        """A backward pass of this loss is to come, a mean over `weight` units (None: over the slice's samples), or made
        of a sum. What it is to be multiplied by; 0 where there is nothing to learn."""
        work = self.slice_out("backward")
        units = work.slice_samples if weight is None else units_of(weight)
        work.told += 1
        if not units or not loss.requires_grad:
            units = 0.0
            work.idle += 1
        place = work.weighted
        if weight is not None:
            work.count_units(units)
        if work.synchronous and units:
            self._engine.tell_units(units, loss.detach(), is_sum)
        delayed = weight is not None and not work.synchronous
        return units and (units / self._expected_units(work, place, units) if delayed else 1.0)

    def _expected_units(self, work: TaskInWork, place: int, units: float) -> float:
        """Of as many samples as the slice that is out, on average: as all ranks know it, or, before any has told, as
        this one does. A slice that is the whole batch has its own, as in one process."""
        if work.slice_samples == self._batch_size:
            return units
        told = (*self._units_told[place : place + 1], 0.0)[0]
        if not told:
            own = AverageUnits()
            own.sums = self._units.sums
            own.add(work.units, self._batch_size)
            told = own.per_sample[place]
        return told * work.slice_samples

    def end_backward(self, *, idle: bool) -> None:
        """That pass is over, or left out (`idle`): what others are to come are of means over the slice's samples."""
        if self.slice_out("backward").synchronous:
            self._engine.tell_units(None)
            self._engine.fill(idle)

    def note_clip(self, clip: Callable[[], object]) -> None:
        """The loop has clipped the gradients of the slice that is out, as `clip` does."""
        if self._engine.clips_unknown:
            raise UserError(
                "job.clip_grad_norm_ was called in a batch that another rank has skipped before it had ever clipped, so"
                " it cannot make the same step: with sync.delay_bound 0 skip none of the first, but call"
                " job.backward(loss, weight=0), clip and step"
            )
        work = self.slice_out("clip_grad_norm_")
        for number in list(work.before_step):
            self._check_gradients_kept(number, work)
        work.clips.append(clip)

    def close_slice(self, work: TaskInWork) -> None:
        work.out = False
        if self._changes is not None:
            self._changes.end_slice()
        if not work.weighted and not work.told > work.idle:
            work.miss_units(len(self._units_told))
        if not work.skipped:
            self._spent = set(work.stepped)
        if work.stepped and (work.last or not work.synchronous):
            self._clips = work.clips
        work.slices_left -= 1
        self.unstepped = work.close_slice(self.unstepped)
        self._check_tensors()
        if work.void:
            return
        if not (work.synchronous and work.last):
            self._device.end_slice(stepped=bool(work.stepped))
        else:
            self._pause(work)
        cap = None if self._memory is None else self._memory.end_slice(work.slice_samples)
        if cap is not None:
            self._engine.report(CapFound(self._engine.worker.rank, cap))
        self._engine.close_slice(work.task)

    def _check_tensors(self) -> None:
        """A model that makes weights in its forward has them after the first slices."""
        if self._slices_checked < SLICES_CHECKED:
            self._slices_checked += 1
            self.tensors.check()
        else:
            self.tensors.restore()

    def finish(self, work: TaskInWork) -> None:
        self.work = None
        task = work.task
        samples = task.samples
        if not self.left and task.slices and not work.skipped:
            self._adds_up |= not work.collected
            self._steps_some |= len(work.collected) < len(self.steps)
        if work.synchronous:
            self._watch_steps(work)
            if work.stepped and (not self.left or len(work.stepped) == len(self.steps)):
                self._totals.loop_steps += 1
            if not self._engine.is_collected(len(self.steps) - 1):
                self._finish_round(work)
                if work.void:
                    self._drop(work)
                    return
        seconds, (loss_sum, told) = self._device.take_seconds(), work.take_losses()
        lossless = samples - told
        self._units.add(work.units, self._batch_size)
        if self._skips and not work.synchronous and not math.isfinite(loss_sum):
            work.spoiled += spans_of([task]) if not work.spoiled else []
        if work.spoiled:
            self._put_back()
            self._engine.leave_out(task, work.spoiled)
            return
        lift = self._local.lift(task)
        self._engine.finish(task, seconds, loss_sum, lift, lossless, tuple(work.units), work.steps)
        if self._engine.is_spoiled(task):
            self._check_whole()
            return
        totals, waited = self._totals, self._engine.timer.wait_seconds
        totals.compute_seconds += seconds
        totals.tasks += 1
        totals.samples += samples
        totals.since_rest += samples
        self._record(
            "piece",
            piece=task.number,
            samples=samples,
            slices=len(task.slices),
            version=self._engine.worker.version,
            compute_seconds=round(seconds, 6),
            data_seconds=round(totals.data_seconds - self._data_before, 6),
            wait_seconds=round(waited - self._waited_before, 6),
            loss=loss_sum / (samples - lossless) if samples > lossless else None,
        )
        self._data_before, self._waited_before = totals.data_seconds, waited

    def _watch_steps(self, work: TaskInWork) -> None:
        """A loop that makes not all steps in each batch counts them: a rank that has no part of a batch lags."""
        unstepped = not self.left and not work.void and not self._scaled and bool(work.collected - work.stepped)
        unstepped &= not self._engine.is_spoiled(work.task)
        if unstepped and self._engine.is_made_up:
            raise UserError(UNSTEPPED)
        if self._tells_counts and (unstepped or self._adds_up or self._steps_some):
            self._tells_counts = False
            self._engine.report(LoopCounts(self._engine.worker.rank))

    def _finish_round(self, work: TaskInWork) -> None:
        """The loop has left sums to be taken: it adds gradients up over slices, has skipped the task's last, or has
        been left."""
        report = LoopReport(
            computed=bool(work.task.slices) and not self.left and not work.skipped,
            apart=not work.task.slices and not self.left,
            skipped=work.skipped,
            makes_up=work.skipped and len(work.task.slices) > 1,  # or slices before it would get no step
            clips_unknown=work.skipped and self._clips is None,
        )
        samples = self._engine.reduce(work.task, None, self._scaled, report)
        if self._engine.is_void:
            self._give_up(work)
            return
        all_due = self.left and samples and not self._scaled
        left_out = [
            steps
            for number, steps in enumerate(self.steps)
            if number not in work.stepped and (all_due or (not self.left and self._engine.is_stepped(number)))
        ]
        if left_out:
            self._device.begin_step()
            self._make_up(left_out)
            self._device.end_step()

    def _make_up(self, left_out: Sequence[Steps]) -> None:
        """Steps that the loop has not made. Those that others' loops have made meanwhile it would have made alike."""
        self._makes_up = True
        if self._scaler is not None and self._scaled:
            self._scaler.make_up([steps.optimizer for steps in left_out], self._clip)
        else:
            self._clip()
            for steps in left_out:
                steps.step()
            for steps in left_out:
                steps.clear()
        self._makes_up = False

    def _clip(self) -> None:
        for clip in () if self.left else self._clips or ():
            clip()


def _tensors_of(*modules: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
