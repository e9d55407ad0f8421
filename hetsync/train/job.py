"""A job as a training script sees it: what it prepares, the loop over batches, and what happens at rest.

    with hetsync.join(run="runs/mine", resume="auto") as job:
        model, optimizer, scheduler, loader, test_loader = job.prepare(model, optimizer, scheduler, loader, test_loader)
        for epoch in job.epochs(10):
            for images, labels in loader:
                loss = criterion(model(images), labels)
                job.backward(loss)
                job.step(optimizer, scheduler)
            job.keep_best(job.evaluate(validate))

Recipes (`trainer.py`) are such a script, on these public methods and nothing else.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from hetsync.config.schema import Config
from hetsync.data.evaluation import numbers
from hetsync.data.handed_over import check_not_a_worker
from hetsync.errors import STOPPED, UserError
from hetsync.plane.base import Plane, meet
from hetsync.plane.ending import end_loop
from hetsync.profiling.measure import autocast
from hetsync.stop_signal import STATUSES, StopSignal
from hetsync.train import checkpoint
from hetsync.train.alike import require_alike, settings_described
from hetsync.train.best import Best, Mode, comparable
from hetsync.train.evaluation import Combine, check_callable, combined, named, on_cpu
from hetsync.train.preparation import Preparation
from hetsync.train.prepared import PreparedScheduler
from hetsync.train.run_folder import Resume, opened_folder
from hetsync.train.running import THE_END, Running
from hetsync.train.session import AtRest, Session
from hetsync.train.trackers import Tracked, check_trackers


class StoppedByRequest(SystemExit):
    """The job has saved and stopped, as a signal asked it to."""

    def __init__(self, status: int) -> None:
        """`status`: the process's."""
        super().__init__(status)
        self.status = status


class Job(Preparation):
    """One rank's part. Methods marked collective are called by all ranks, in the same order.

    Attributes:
        rank, size, local_rank: This rank among all, their number, and its place among those of its host.
        device: This rank's own.
        epoch: Of the loop over `epochs`.
        finished: The run that was to be gone on with is at its end already; loops over batches are empty.
        folder: The run folder, or None.
    """

    def __init__(
        self,
        config: Config,
        plane: Plane,
        *,
        keep: bool = True,
        resume: Resume = False,
        stop: StopSignal | None = None,
        owns_plane: bool = False,
        show: bool = True,
        track: Tracked = (),
        resume_by: str = "the same command, where resume is 'auto'",
    ) -> None:
        """Collective. Of the settings those of model, data and optimizer do not count: `prepare` and `loader` tell.
        Without `keep` there is no run folder. `stop` hears signals; `show`: rank 0 shows progress; `track`: what gets
        figures beside those that `config` names; `resume_by`: what goes on with a stopped run, {} being its folder.

        Raises UserError for settings that cannot work, a run folder that is in use, and a damaged run.
        """
        check_not_a_worker()
        require_alike(plane, "hetsync.join", settings_described(config, keep, resume))
        if resume is not False and not keep:
            raise UserError("resume needs the folder of the run: give hetsync.join a run")
        super().__init__(config, plane, show, resume_by)
        self.epoch = 0
        self._stop = stop
        self._owns_plane = owns_plane
        self._course: Iterator[Any] | None = None
        self._loop: Callable[[], Generator[Any] | None] = lambda: None  # the last one
        self._loops = 0  # over batches
        self._slices = 0  # that have come to this loop over batches
        self._in_loop = False  # a batch is out
        self._lines_at = -1  # samples applied at the interval's end after which the script's lines came last
        with contextlib.ExitStack() as held:
            if keep:
                self.folder, resumed = held.enter_context(opened_folder(plane, config.run, resume))
                self.loaded = checkpoint.load_agreed(self.folder, plane) if resumed else None
            check_trackers(track, self.folder)
            check_trackers(config.run.track, self.folder)
            self._track = [*config.run.track, *track]
            self._best = Best(self.folder) if self.folder is not None else None
            self._take_place()
            self._held = held.pop_all()  # until the end

    # The loop.

    def _slices_so_far(self) -> int | None:
        return self._slices if self._in_loop else None

    def log(self, values: Mapping[str, float]) -> None:
        """Values of your own for the trackers, as rank 0 knows them: means over some seconds where it is called in the
        loop over batches, the values as they are where it is called at rest."""
        if self.folder is None and not self._track:
            raise UserError("job.log has nowhere to write: give hetsync.join a run, or track a tracker of your own")
        if self._running is None or not self._running.is_open:
            raise UserError("job.log was called before the loop over batches: call it in the loop, or after an epoch")
        tracking = self._running.tracking
        if tracking is not None:
            tracking.add(numbers("job.log", values))
            if not self._in_loop:
                tracking.log_values()

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs, from where the run stands. All ranks come to rest at the end of each, with the
        same weights: what follows the loop over batches may evaluate, save, step schedulers, freeze and unfreeze."""
        if self._loader is None:
            raise UserError(self._no_training_data)
        if not isinstance(count, int) or count < 1:
            raise UserError(f"job.epochs got {count}: give a whole number of epochs, 1 or more")
        if self._total is not None:
            raise UserError(
                "the job was told twice how long to train: call job.epochs once, with all epochs, and give job.loader"
                " neither epochs nor samples"
            )
        samples = self._loader.source.epoch_samples
        self._total = count * samples
        for epoch in self.intervals(samples):
            self.epoch = epoch
            yield epoch

    def intervals(self, samples: int) -> Iterator[int]:
        """As `epochs`, of so many samples each: their numbers, from where the run stands, up to all that `loader` was
        told to train on."""
        if not isinstance(samples, int) or samples < 1:
            raise UserError(f"job.intervals got {samples} samples: give a whole number, 1 or more")
        if self._running is not None and samples != self._interval_samples:
            raise UserError("job.intervals was called after the loop had begun: call it once, around the loop")
        self._interval_samples = samples
        return self._intervals(samples)

    def _intervals(self, samples: int) -> Iterator[int]:
        running = self._begin()
        if self.finished:
            return
        position = running.session.applied - self._reopened
        while position < running.setup.total and not running.over:
            loops = self._loops
            yield position // samples
            if self._loops == loops:
                raise UserError(
                    f"epoch {position // samples} used none of the job's batches: loop over the loader that job.prepare"
                    " or job.loader returned"
                )
            if self._in_loop and (loop := self._loop()) is not None:
                loop.close()  # left, but held by a variable of the script
            self._come_to_rest()
            position = running.session.applied

    def _batches(self) -> Iterator[Any]:
        loop = self._loop_over_batches()
        if not self._in_loop:
            self._loop = weakref.ref(loop)  # so that a break closes it
        return loop

    def _loop_over_batches(self) -> Generator[Any]:
        running = self._begin()
        if self._in_loop:
            raise UserError("two loops over the job's batches at once: begin the second when the first is over")
        self._loops += 1
        if self.finished:
            return
        if running.left:
            running.go_on()
            return
        if self._reopened:
            self._reopened, self._lines_at = False, running.session.applied
            return
        if self._course is None:
            self._course = running.session.course()
        self._slices = 0
        self._parts.begin_loop(running.session.applied)
        try:
            for item in self._course:
                if isinstance(item, AtRest):
                    if self._rest(item):
                        return
                    continue
                self._in_loop = True
                self._slices += 1
                yield item
                self._in_loop = False
                if self._parts.scaler is not None:
                    self._parts.scaler.update()  # once a batch, however many optimizers have been stepped
                running.between_batches()
        except GeneratorExit:
            running.leave()  # by break: the other ranks do the rest of this one's samples
            raise
        finally:
            self._in_loop = False

    def _rest(self, rest: AtRest) -> bool:
        """All ranks are at rest: save, evaluate. True where the script's own lines come next."""
        running = self._begin()
        every = self._interval_samples
        applied = running.session.applied
        at_intervals_end = every is not None and (rest.final or applied % every == 0) and applied != self._lines_at
        if at_intervals_end or rest.final:
            self._check_steps(running)
        ended = rest.final and applied < running.setup.total  # all loops have
        running.rest(rest, lambda: self._state(reopened=at_intervals_end, ended=ended))
        if running.session.stopping:
            raise StoppedByRequest(self._status())
        if at_intervals_end:
            self._lines_at = applied
        return running.over or at_intervals_end

    def _state(self, reopened: bool = False, ended: bool = False) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and optimizers: `ended`, whether the run goes on no more."""
        return {**self._parts.state(self.session.tasks.tensors.frozen), "reopened": reopened, "ended": ended}

    def _check_steps(self, running: Running) -> None:
        """Collective. UserError where batches have come, and nobody has stepped on any."""
        told = self.plane.gather_objects((running.session.tasks.was_stepped, running.session.totals.samples))
        if any(samples for _, samples in told) and not any(stepped for stepped, _ in told):
            raise UserError(
                f"no optimizer has made a step on {sum(samples for _, samples in told)} samples: call job.step (or"
                " optimizer.step) after backward"
            )

    def _status(self) -> int:
        """Collective: the exit status of a job that was asked to stop, by a signal to any of its ranks or otherwise."""
        mine = self._stop.caught if self._stop is not None else None
        caught = [number for number in self.plane.gather_objects(mine) if number is not None]
        return STATUSES[caught[0]] if caught else STOPPED

    def _come_to_rest(self) -> None:
        """After a loop over batches: at the rest that ended it, or on the way there where the loop was left."""
        if self._in_loop:
            raise UserError(
                "a batch is out, and what was called needs all ranks at rest: call it after the loop over an epoch's"
                " batches (job.evaluate_every evaluates while training goes on)"
            )
        running = self._begin()
        while running.on_its_way and not self._rest(next(running.leaving)):
            running.go_on()

    def _settle(self) -> None:
        """Where the loop has been left, what the script does next is done at the rest to come."""
        if self._running is not None and self._running.on_its_way:
            self._come_to_rest()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, of the scaled loss where gradients are float16; the records keep it."""
        if not isinstance(loss, torch.Tensor):
            raise UserError(
                f"job.backward got a {type(loss).__name__}: give the loss that the model has made, a tensor"
            )
        scaler = self._parts.scaler
        scales = scaler is not None and scaler.is_enabled()
        # Where float16 overflows, that step is skipped: the records take the loss for 0.
        self.session.tasks.add_loss(loss.detach().nan_to_num(0.0, 0.0, 0.0) if scales else loss)
        if scaler is not None and scaler.has_made(loss):
            raise UserError("job.backward got a loss that is scaled already: give the loss itself, which it scales")
        (loss if scaler is None else scaler.scale(loss)).backward(**options)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The forward pass in `run.precision`."""
        return autocast(self.config.run.precision, self.device)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, **options: Any) -> torch.Tensor | None:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of the step: summed over ranks, and unscaled. None where
        no step is due."""
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(weight) for weight in weights}
        steps = self.session.tasks.steps
        numbers = [number for number, each in enumerate(steps) if any(id(weight) in known for weight in each.weights)]
        if not numbers:
            raise UserError("job.clip_grad_norm_ got weights that no prepared optimizer steps: prepare their optimizer")
        for number in numbers:
            if not self.session.tasks.collect(number):
                return None
            if self._parts.scaler is not None:
                self._parts.scaler.unscale_once(self._parts.optimizers[number])
        return steps[numbers[0]].clip(weights, max_norm, **options)

    def _collect_for(self, optimizer: torch.optim.Optimizer) -> bool:
        self.session.tasks.was_stepped = True
        return self.session.tasks.collect(self._parts.number_of(optimizer))

    def step(self, *things: Any) -> bool:
        """After the last backward: the steps of these optimizers (of all, where none is named), whose gradients are
        then gone, and of these schedulers. Where accumulation at delay bound 0 makes no step due, gradients are added
        up, and it returns False."""
        optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)] or self._parts.optimizers
        schedulers = [thing for thing in things if not isinstance(thing, torch.optim.Optimizer)]
        scaler = self._parts.scaler
        for scheduler in schedulers:
            if not isinstance(scheduler, PreparedScheduler):
                raise UserError(
                    f"job.step got a {type(scheduler).__name__}: give optimizers, and schedulers as job.prepare"
                    " returned them"
                )
        for optimizer in optimizers:
            if self._collect_for(optimizer):
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
        for scheduler in schedulers:
            scheduler.step()
        return self.session.tasks.step_is_due

    # At rest.

    @property
    def metrics(self) -> dict[str, float]:
        """What the last evaluation has found, by name: rank 0's while training goes on, on all ranks at rest."""
        return {} if self._running is None else self._running.evaluations.metrics

    def evaluate(self, function: Callable[..., Any], *arguments: Any, combine: Combine | None = None) -> Any:
        """Collective, at rest: what `function(*arguments)` returns on all of the test data. Each rank runs it on its
        part (prepared DataLoaders of test data hold no more), in evaluation mode and without gradients.

        Numbers, tensors and arrays, in lists and dictionaries, too, become means weighted by samples; metrics of
        torchmetrics are merged; `combine` gets the list of what the ranks have returned and does anything else.
        """
        check_callable("job.evaluate", function)
        running = self._begin()
        self._come_to_rest()
        part = running.evaluations.part_of(lambda: function(*arguments), running.session.shares)
        result = combined(running.session.meet("job.evaluate", part), combine)
        running.evaluated(named(result))
        return result

    def gather(self, value: Any) -> list[Any]:
        """Collective, before the loop or at rest: every rank's value, in their order. Tensors come on the CPU."""
        if self._running is None or not self._running.is_open:
            return self.plane.gather_objects(on_cpu(value))
        self._come_to_rest()
        return self.session.meet("job.gather", on_cpu(value))

    def keep_best(self, value: float, mode: Mode = "max", model: torch.nn.Module | None = None) -> bool:
        """Collective, at rest: keep the weights in RUN/best if the value, the same on all ranks, is the best so far:
        those of what is trained, or of `model`, such as an average (`ema.module`)."""
        if self._best is None:
            raise UserError("job.keep_best needs a run folder: give hetsync.join a run")
        running = self._begin()
        self._come_to_rest()
        told = running.session.meet("job.keep_best", comparable("job.keep_best", value))
        if len(set(told)) > 1:
            raise UserError(f"job.keep_best got {told} on the ranks: give all the same, as job.evaluate returns it")
        better = self._best.improves(value := told[0], mode)
        if better and self.is_main:
            self._best.keep(value, mode, running.session.applied, running.session.model if model is None else model)
        self.plane.barrier()
        return better

    def stop(self) -> None:
        """At rest, on all ranks: training is over, as if all its samples had been used."""
        self._come_to_rest()
        running = self._begin()
        running.session.meet("job.stop")
        running.stop_here()

    # Begin and end.

    @property
    def session(self) -> Session:
        if self._running is None:
            raise UserError("no batch is out: call this within the loop over the job's batches")
        return self._running.session

    @property
    def saved(self) -> bool:
        """Has this process written a checkpoint?"""
        return self._running is not None and self._running.saved

    def _begin(self) -> Running:
        """Collective: training is about to begin."""
        running = self.ready()
        if not self.finished and not running.is_open:
            running.open(self._stop)
        return running

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A failure on one rank ends the whole job; a mistake does so with one sentence."""
        if failure is not None and not isinstance(failure, StoppedByRequest):
            self._fail(failure)
            return
        try:
            self.close()
        except StoppedByRequest:  # at a rest on the way to the end, where it has saved
            self.close()
            raise
        except BaseException as late:
            self._fail(late)
            raise

    def _fail(self, failure: BaseException) -> None:
        if self._running is not None:
            self._running.give_up(release=self.size == 1)
        self._held.close()
        end_loop(self.plane, failure)

    def close(self) -> None:
        """Collective: training comes to its end, where the loop has not brought it there; the summary is written."""
        running = self._running
        if running is not None and running.is_open:
            while running.session.under_way and (rest := next(running.leaving, None)) is not None:
                self._rest(rest)
            running.close(lambda: self._state(ended=True))
        else:
            meet(self.plane, THE_END)
        self._held.close()
        if self._owns_plane:
            self.plane.close()
