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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from hetsync.config.schema import Config
from hetsync.data.evaluation import numbers
from hetsync.data.handed_over import check_not_a_worker, source_of
from hetsync.data.ledger import batches_in
from hetsync.data.workers import Collate
from hetsync.errors import UserError
from hetsync.plane.base import Plane, meet
from hetsync.plane.unclosed import Unclosed
from hetsync.profiling.measure import autocast
from hetsync.stop_signal import StopSignal
from hetsync.sync.buffers import Rule
from hetsync.sync.constraints import Projection
from hetsync.sync.milestones import CALL, Marks
from hetsync.train import checkpoint
from hetsync.train.alike import data_described, parts_described, require_alike, require_as_told, settings_described
from hetsync.train.best import Best, Mode, comparable
from hetsync.train.display import Shows
from hetsync.train.evaluation import Combine, EvaluationLoader, check_callable, named, on_cpu
from hetsync.train.loop import Loop, StoppedByRequest
from hetsync.train.parts import Factor
from hetsync.train.preparation import Assigns, Loss, Preparation
from hetsync.train.prepared import PreparedScheduler, TrainingLoader, unwrapped
from hetsync.train.reduction import Reduction
from hetsync.train.replacing import summons_of
from hetsync.train.resumption import FinishedError, Standing, require_order
from hetsync.train.run_folder import Resume, Status, opened_folder, shared_folder, status_of
from hetsync.train.running import THE_END, Running, Shown
from hetsync.train.same_samples import require_same_samples
from hetsync.train.session import Session
from hetsync.train.stage import Stage
from hetsync.train.trackers import Tracked, check_trackers
from hetsync.train.unprepared import digests_of, names_in, require_same_unprepared
from hetsync.train.workplace import take_place

EVALUATIONS_CHECKED = 3
ASKED_ON = (
    "the loop asked by next for another batch after an epoch's last: write 'for batch in loader', since at"
    " sync.delay_bound above 0 each rank has as many batches as it has time for, and not len(loader)"
)


class Job:
    """One rank's part. Methods marked collective are called by all ranks, in the same order.

    Attributes:
        rank, size, local_rank: This rank among all, their number, and its place among those of its host.
        device: This rank's own.
        unclosed: What happens where nobody closes the job, once it watches.
        epoch: Of the loop over `epochs`.
        folder: The run folder, or None.
    """

    def __init__(
        self,
        config: Config,
        plane: Plane,
        *,
        keep: bool = True,
        seeded: bool = True,
        resume: Resume = False,
        stop: StopSignal | None = None,
        owns_plane: bool = False,
        show: Shows = "text",
        track: Tracked = (),
        resume_by: str = "the same command, where resume is 'auto'",
    ) -> None:
        """Collective. Of the settings those of model, data and optimizer do not count: `prepare` and `loader` tell.
        Without `keep` there is no run folder. Where it is not `seeded`, the seed is what the script has given to
        `torch.manual_seed` last before the loop, and not the config's. `stop` hears signals; `show`: how rank 0 shows
        progress; `track`: what gets figures beside those that `config` names; `resume_by`: what goes on with a stopped
        run, {} being its folder.

        Raises UserError for settings that cannot work, a run folder that is in use, and a damaged run.
        """
        check_not_a_worker()
        require_alike(plane, "hetsync.join", settings_described(config, keep, resume, seeded))
        if resume is not False and not keep:
            raise UserError("resume needs the folder of the run: give hetsync.join a run")
        self.config = config
        self.plane = plane
        self.rank, self.size = plane.rank, plane.ranks_at_start
        self.epoch = 0
        self._resume = resume
        self._running: Running | None = None
        self._stop = stop
        self._owns_plane = owns_plane
        with contextlib.ExitStack() as held:
            if stop is not None:
                held.callback(stop.over)
            self.folder, loaded = None, None
            if plane.newcomer is not None:
                summons = summons_of(plane.newcomer)
                require_as_told(summons.settings, settings_described(config, keep, resume, seeded))
                self.folder = held.enter_context(shared_folder(Path(summons.folder)))
            elif keep:
                self.folder, resumed = held.enter_context(opened_folder(plane, config.run, resume))
                loaded = checkpoint.load_agreed(self.folder, plane) if resumed else None
            check_trackers(track, self.folder)
            check_trackers(config.run.track, self.folder)
            self._shown = Shown(show, [*config.run.track, *track], resume_by)
            self._best = Best(self.folder) if self.folder is not None else None
            self._at = take_place(config, plane, self.folder, loaded, seeded)
            self._held = held.pop_all()  # until the end
        self._looks_at_unprepared = EVALUATIONS_CHECKED
        self.device, self.local_rank = self._at.device, self._at.place.local_rank
        self._prepared = Preparation(self.rank, self.size, self.device)
        self._loop = Loop(self._prepared, self._begin, stop)
        if config.run.precision == "float16":
            self._prepared.scale_losses(self._loop)
        self.unclosed = Unclosed(plane, is_over=self._is_over, close=self.close, give_up=self._give_up)

    @property
    def is_main(self) -> bool:
        """Is this rank 0, or, once that has died, the first of those that are left?"""
        return self.plane.leads

    def print(self, *values: Any, **named: Any) -> None:
        """On the main rank only. Where progress is shown, below what is shown."""
        if self.is_main:
            if named or self._running is None or self._shown.shows == "nothing":
                print(*values, **named)
            else:
                self._running.telling.say(" ".join(map(str, values)))

    # What is prepared.

    def prepare(self, *things: Any, buffers: Mapping[str, Rule] = MappingProxyType({})) -> Any:
        """Models, optimizers, schedulers, GradScalers, averages of weights (`AveragedModel`) and DataLoaders: what the
        loop uses in their place, in the same order. Models and optimizers are returned as they are.

        A DataLoader that shuffles is the job's training data, one that does not is test data, of which each rank
        evaluates its part. UserError for anything else.

        `buffers`: what becomes of those of the models that each rank changes on its own samples, by name or pattern:
        `"mean"`, `"sum"` of what each has added, `"rows"`, which each has written, or the `"min"` or `"max"` of these.
        Batch norm's are known.
        """
        self._check_before("prepare")
        found = [self._prepared.prepare(thing, self._loop) for thing in things]
        self._prepared.say_of_buffers(things, buffers)
        return found[0] if len(found) == 1 else tuple(found)

    def keep_average(self, *averages: Any) -> None:
        """Averages of weights that the loop makes by itself after its steps (`average.mul_(d).add_(weight, alpha=1 -
        d)`): modules, such as a copy of the model, or lists and dictionaries of tensors. As an `AveragedModel` that is
        given to `prepare`, they are those of all ranks at each rest, and in checkpoints."""
        self._check_before("keep_average")
        for average in averages:
            self._prepared.keep_average(average)

    def _check_before(self, method: str) -> None:
        """UserError once the loop has begun."""
        if self._running is not None:
            raise UserError(f"job.{method} was called after the loop had begun: prepare everything before it")

    def loader(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        epochs: float | None = None,
        samples: int | None = None,
        collate_fn: Collate | None = None,
        workers: int | None = None,
        costs: Sequence[float] | None = None,
        weights: Sequence[float] | torch.Tensor | None = None,
    ) -> TrainingLoader:
        """This rank's batches of the training data: a map-style or iterable data set, or a DataLoader of one.

        Args:
            data: The same on every rank.
            batch_size: Samples of a batch of all ranks together.
            epochs: Passes over the data, for one loop over all of them. Where nobody tells, here or by `epochs`, each
                loop over the batches is an epoch, and the job ends with the script.
            samples: Samples in all, instead of epochs. Of an iterable data set: those of an epoch, in its own order;
                each is used once, and each rank reads all of them, unless the data set has `read(start, stop)`.
            collate_fn: Samples to a batch.
            workers: Processes of each rank that load.
            costs: Work that each sample takes, where they differ.
            weights: Of each sample, 0 or more: an epoch draws by them as many as there are, with replacement, as a
                `WeightedRandomSampler` does.
        """
        self._check_before("loader")
        found = source_of(data, batch_size, collate_fn, workers, costs, samples, weights)
        pin_memory = bool(getattr(data, "pin_memory", False))
        return self._prepared.load(self._loop, samples, epochs, *found, pin_memory)

    def test_loader(self, loader: DataLoader[Any]) -> EvaluationLoader:
        """Batches of this rank's part of the test data, as large as its share, in the data set's own order."""
        return self._prepared.test(loader)

    def accumulate(self, slices: int) -> None:
        """As `accumulation` of `hetsync.join`, for whoever learns of it later."""
        self._check_before("accumulate")
        self._take(replace(self.config, sync=replace(self.config.sync, accumulation=slices)))

    def _take(self, config: Config) -> None:
        self.config = config
        self._at = replace(self._at, config=config)

    def register(self, name: str, state: Any) -> None:
        """Checkpoints keep what `state.state_dict()` returns on rank 0; all ranks' `load_state_dict` get it back."""
        self._check_before("register")
        self._prepared.parts.register(name, state)

    def schedule(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """What the optimizer's learning rates are multiplied by after so many samples of the whole job."""
        self._check_before("schedule")
        self._prepared.parts.schedule(optimizer, factor)

    def step_schedulers_every(self, samples: int) -> None:
        """Schedulers that are stepped in the loop make a step for each so many samples of the job, however often the
        loop calls them; without this, for each batch, or each n batches, as it calls them first."""
        self._check_before("step_schedulers_every")
        if not isinstance(samples, int) or samples < 1:
            raise UserError(f"job.step_schedulers_every got {samples} samples: give a whole number, 1 or more")
        self._prepared.parts.scheduler_samples = samples

    def constrain(self, module: torch.nn.Module, function: Projection) -> None:
        """Weights of a model, or of a part of it, keep to a constraint: `function(module)` projects them in place
        (clamps, shortens, makes orthogonal), as it is called after each optimizer's step, and, on a copy of the module,
        wherever ranks merge. It goes by weights, buffers and constants alone, and changes no others."""
        self._check_before("constrain")
        if not isinstance(module, torch.nn.Module):
            raise UserError(f"job.constrain got a {type(module).__name__}: give a prepared model, or a part of one")
        module = unwrapped(module)
        check_callable("job.constrain", function, module)
        self._prepared.parts.constrained.append((module, function))

    def measure(self, loss: Loss) -> None:
        """Measure each rank's speed before training, on a copy of the model: `loss(model, batch)` is a batch's mean
        loss. Without it ranks start with equal shares."""
        self._check_before("measure")
        self._prepared.loss = loss

    def follow(self, assigns: Assigns) -> None:
        """Collective from `ready` on: the ranks train by a data-parallel plan, whose shares are in the job's settings.
        `assigns` is called once their speeds are known, with the emulated cluster, if any."""
        self._check_before("follow")
        self._prepared.assigns = assigns

    def evaluate_every(self, samples: int | None, function: Callable[[], Any], combine: Combine | None = None) -> None:
        """Evaluate after so many samples, again and again, while training goes on, and at its end (None: only there):
        as `evaluate`, of the weights that all ranks share then. Results are in the records, and on rank 0 in `metrics`.
        """
        self._check_before("evaluate_every")
        self._prepared.evaluate_every(samples, function, combine)

    def call_every(self, samples: int | Marks | None, function: Callable[[], None]) -> None:
        """All ranks come to rest within the loop, too, after each so many samples (at the end of the batch that is out
        then; None: only where `call_soon` asks for it), and call `function()`, all alike: it may do what lines after an
        epoch's loop may. At an epoch's end the script's own lines come, and it is not called."""
        self._check_before("call_every")
        self._prepared.call_every(samples, function)

    def call_soon(self) -> None:
        """In the loop, on any rank: ask for a rest at which `call_every`'s function is called."""
        self.session.request_rest(CALL)

    def train_on(self, samples: int) -> None:
        """How many samples to train on in all, where `loader` was not told."""
        self._check_before("train_on")
        self._prepared.train_on(samples)

    def begin_at(self, samples: int) -> None:
        """Before the loop: the job goes on after so many samples of its order, whose weights, optimizers and schedulers
        the script has loaded by itself, on all ranks alike."""
        self._check_before("begin_at")
        if not isinstance(samples, int) or samples < 0:
            raise UserError(f"job.begin_at got {samples} samples: give a whole number, 0 or more")
        self._prepared.first_sample = samples

    def on(self, event: Literal["evaluation", "checkpoint", "round", "end"], callback: Callable[[Any], None]) -> None:
        """Call on rank 0, between two batches: after an "evaluation" with its metrics, after a "checkpoint" with its
        samples, after a "round" with the number of rounds, at the "end" with the summary."""
        self._prepared.call(event, callback)

    # The run that is gone on with.

    def finished_at(self, total: int) -> str | None:
        """Collective: why nothing is left to do where `total` samples are to be trained on, or None.

        UserError where the run has trained on more.
        """
        loaded = self._at.loaded
        if loaded is None:
            return None
        marked = self.is_main and self.folder is not None and status_of(self.folder) == Status.FINISHED
        marked = self.plane.broadcast_object(marked)
        return Standing.of(loaded.state).finished(loaded.progress.samples_applied, total, marked)

    @property
    def finished(self) -> bool:
        """The run that was to be gone on with is at its end already: loops over batches are empty."""
        return self._running is not None and self._running.finished

    def ready(self) -> None:
        """Collective, once all is prepared: check it, go on from where the run stands, measure. Nothing is written yet.
        The first of loop and evaluation does it otherwise. A rank that joins while the job runs does it as late as it
        can, since the others are at rest for it."""
        if self.plane.newcomer is None:
            self._stand_ready()

    def _stand_ready(self) -> Running:
        if self._running is not None:
            return self._running
        prepared, parts, loaded = self._prepared, self._prepared.parts, self._at.loaded
        parts.check(self.device)
        self._check_told()
        prepared.rest_after_loops()
        data = data_described(prepared.training_data, prepared.test_loaders, prepared.total)
        described = {**parts_described(parts), **data}
        require_alike(self.plane, "the first loop or evaluation", described)
        if loaded is not None and loaded.state:
            checkpoint.check_model(loaded, parts.model)
            parts.restore_roles(loaded.state)
        if self.plane.newcomer is not None:
            require_as_told(summons_of(self.plane.newcomer).prepared, described)
        else:
            hosts = [place.host for place in self._at.places]
            require_same_samples(self.plane, hosts, prepared.training_data, prepared.test_loaders)
        if not self._at.seeded:
            self._take(replace(self.config, run=replace(self.config.run, seed=self._seed_of_script())))
        parts.make_rates(prepared.training_data.batch_size, prepared.interval_samples)
        finished = self.finished_at(prepared.total)
        if finished is not None:
            self.print(finished)
        elif loaded is not None:
            require_order(loaded, prepared.training_data.source.order(self._at.config.run.seed))
        self._running = Running(self._at, prepared, self._shown, finished is not None, described)
        return self._running

    def _check_told(self) -> None:
        """UserError where loops of its own number go on with a run, whose epochs only the job can count."""
        if self._prepared.told is not None:
            return
        goes_on = "fault.replace is true" if self.config.fault.replace else "resume was asked for"
        if self.config.fault.replace or self._resume is not False:
            raise UserError(
                f"{goes_on}, and nobody has told how long to train, so in which epoch a run stands is not known: loop"
                " within 'for epoch in job.epochs(N)', which goes on from there (called before a first evaluation and a"
                " first look at a batch), or give job.loader its epochs"
            )

    def _seed_of_script(self) -> int:
        """Collective: of the run that is gone on with, or what rank 0's script has set last."""
        if self.plane.newcomer is not None:
            return summons_of(self.plane.newcomer).seed
        kept = {} if self._at.loaded is None else self._at.loaded.state.get("order", {})
        return self.plane.broadcast_object(torch.initial_seed() % 2**63 if kept.get("seed") is None else kept["seed"])

    # The loop.

    def log(self, values: Mapping[str, float]) -> None:
        """Values of your own for the trackers, as rank 0 knows them: means over some seconds where it is called in the
        loop over batches, the values as they are where it is called at rest."""
        if self.folder is None and not self._shown.track:
            raise UserError("job.log has nowhere to write: give hetsync.join a run, or track a tracker of your own")
        if self._running is None or not self._running.is_open:
            raise UserError("job.log was called before the loop over batches: call it in the loop, or after an epoch")
        tracking = self._running.telling.tracking
        if tracking is not None:
            tracking.add(numbers("job.log", values))
            if not self._loop.in_batch:
                tracking.log_values()

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs, from where the run stands. All ranks come to rest at the end of each, with the
        same weights: what follows the loop over batches may evaluate, save, step schedulers, freeze and unfreeze."""
        return self._epochs(self._prepared.rest_after_epochs(count))

    def _epochs(self, samples: int) -> Iterator[int]:
        for epoch in self._loop.intervals(samples):
            self.epoch = epoch
            yield epoch

    def intervals(self, samples: int) -> Iterator[int]:
        """As `epochs`, of so many samples each: their numbers, from where the run stands, up to all that `loader` was
        told to train on."""
        if not isinstance(samples, int) or samples < 1:
            raise UserError(f"job.intervals got {samples} samples: give a whole number, 1 or more")
        if self._running is not None and samples != self._prepared.interval_samples:
            raise UserError("job.intervals was called after the loop had begun: call it once, around the loop")
        self._prepared.interval_samples = samples
        return self._loop.intervals(samples)

    @property
    def has_begun(self) -> bool:
        """Has a batch been asked for? Nothing more can be prepared then."""
        return self._loop.has_begun

    @property
    def in_batch(self) -> bool:
        """Is a batch out? Then ranks do not come together before the loop has asked for the next."""
        return self._loop.in_batch

    @property
    def samples(self) -> int:
        """Samples that the whole job had trained on when the batch that is out was given out, and at rest all. Over the
        batch size it is the step of one process: curricula go by it, and not by a rank's own batches."""
        if self._running is None:
            loaded = self._at.loaded
            return self._prepared.first_sample if loaded is None else loaded.progress.samples_applied
        work = self.session.tasks.work
        return self.session.applied if work is None else work.task.position

    @property
    def step_count(self) -> int:
        """Batches of B that one process would have trained on before the batch that is out, and at rest in all: ⌈N / B⌉
        an epoch. The same on all ranks at delay bound 0, whatever part of the batches a rank has had: what comes every
        n-th step goes by it. At a bound of 1 and more it counts what was handed out, and may leave numbers out."""
        if not (samples := self.samples) and self._running is None:
            return 0
        loader, work = self._prepared.training_data, None if self._running is None else self.session.tasks.work
        every = self._prepared.interval_samples or loader.source.epoch_samples
        before = batches_in(samples, loader.batch_size, every)
        return before + (len(work.task.slices) - work.slices_left if work is not None and work.synchronous else 0)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        """`loss.backward(**options)`, of the scaled loss where gradients are float16; the records keep it. Where
        the loss needs no gradient, or is a mean over nothing, the batch counts nothing.

        Args:
            loss: Of this rank's batch.
            weight: How many units it is a mean over, by which it counts among those of other ranks: labelled tokens,
                entries that are not masked, the sum of class weights. By default those are the batch's samples.
            reduction: What the loss is over the batch. Gradients of a `"sum"` become those of a sum over all ranks'
                samples of the batch. By default it is a mean, and what is plainly a sum is refused.
        """
        if not isinstance(loss, torch.Tensor):
            raise UserError(
                f"job.backward got a {type(loss).__name__}: give the loss that the model has made, a tensor"
            )
        scaler = self._prepared.parts.scaler
        if scaler is not None and scaler.has_made(loss):
            raise UserError("job.backward got a loss that is scaled already: give the loss itself, which it scales")
        if weight is not None and reduction == "sum":
            raise UserError(
                "job.backward got a weight, and reduction 'sum': a sum counts as what it is, so give a mean (the sum"
                " divided by the weight) with the weight, or the sum alone"
            )
        tasks = self.session.tasks
        match reduction:
            case None:
                tasks.check_loss(loss)
            case "sum":
                loss = tasks.as_of_batch(loss)
            case "mean":
                pass
            case _:
                raise UserError(f"job.backward got reduction {reduction!r}: give 'mean' or 'sum'")
        mean = loss.detach() / tasks.batch_samples if reduction == "sum" else loss.detach()
        # Where float16 overflows, that step is skipped: the records take the loss for 0.
        self.record_loss(mean.nan_to_num(0.0, 0.0, 0.0) if scaler is not None and scaler.is_enabled() else mean)
        factor = tasks.tell_backward(loss, weight, is_sum=reduction == "sum")
        scaled = loss if scaler is None else scaler.scale(loss)
        if factor:
            (scaled if factor == 1.0 else scaled * factor).backward(**options)
        tasks.end_backward(idle=not factor)

    def record_loss(self, loss: torch.Tensor) -> None:
        """What `backward` does beside its backward pass: the records keep this mean over the batch that is out. The
        losses of a batch add up. What is plainly a sum is refused."""
        self.session.tasks.check_loss(loss)
        self.session.tasks.add_loss(loss)

    def collect(self, optimizer: torch.optim.Optimizer) -> bool:
        """Before anything but the job's methods and the optimizer's step touches its gradients: they are now those of
        its step, at delay bound 0 summed over ranks. False where no step is due, and they are put aside."""
        due = self._loop.collect(optimizer, holds=True)
        if due:
            self._loop.hand_over(optimizer)
        return due

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The forward pass in `run.precision`."""
        return autocast(self.config.run.precision, self.device)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, **options: Any) -> torch.Tensor | None:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of the step: summed over ranks, and unscaled. None where
        accumulation makes no step due; 0 where a rank's death has left the batch without gradients."""
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(weight) for weight in weights}
        steps = self.session.tasks.steps
        numbers = [number for number, each in enumerate(steps) if any(id(weight) in known for weight in each.weights)]
        if not numbers:
            raise UserError("job.clip_grad_norm_ got weights that no prepared optimizer steps: prepare their optimizer")
        for number in numbers:
            if not self.session.tasks.collect(number, holds=True):
                return weights[0].new_zeros(()) if self.session.tasks.is_void else None
            if self._prepared.parts.scaler is not None:
                self._prepared.parts.scaler.unscale_once(self._prepared.parts.optimizers[number])
        clip = partial(steps[numbers[0]].clip, weights, max_norm, **options)
        self.session.tasks.note_clip(clip)
        norm = clip()
        for number in numbers:
            self.session.tasks.hand_over(number)
        return norm

    def step(self, *things: Any) -> bool:
        """After the last backward: the steps of these optimizers (of all, where none is named), whose gradients are
        then gone, and of these schedulers. Where accumulation at delay bound 0 makes no step due, gradients are added
        up, and it returns False; so it does where a rank's death has left the batch without gradients."""
        parts = self._prepared.parts
        optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)] or parts.optimizers
        schedulers = [thing for thing in things if not isinstance(thing, torch.optim.Optimizer)]
        for scheduler in schedulers:
            if not isinstance(scheduler, PreparedScheduler):
                raise UserError(
                    f"job.step got a {type(scheduler).__name__}: give optimizers, and schedulers as job.prepare"
                    " returned them"
                )
        stepped = [optimizer for optimizer in optimizers if self._collected_and_stepped(optimizer)]
        for optimizer in stepped:  # after all steps: two may step the same weights
            optimizer.zero_grad(set_to_none=True)
        for scheduler in schedulers:
            scheduler.step()
        return self.session.tasks.step_is_due

    def _collected_and_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        due, scaler = self._loop.collect(optimizer), self._prepared.parts.scaler
        if due and scaler is None:
            optimizer.step()
        elif due and scaler is not None:
            scaler.step(optimizer)
        return due

    # At rest.

    @property
    def metrics(self) -> dict[str, float]:
        """What the last evaluation has found, by name: rank 0's while training goes on, on all ranks at rest."""
        return {} if self._running is None else self._running.evaluations.metrics

    def evaluate(
        self, function: Callable[..., Any], *arguments: Any, combine: Combine | None = None, **options: Any
    ) -> Any:
        """Collective, at rest: what `function(*arguments, **options)` finds on all of the test data. Each rank runs it
        on its part (prepared DataLoaders of test data hold no more there), in evaluation mode and without gradients;
        afterwards modes are what they were.

        The function returns a pair (sum, count) of two numbers, or tensors of one, which becomes the sums of all ranks
        over their counts; a metric of `hetsync.metrics` or torchmetrics, which becomes its value; or these in tuples
        and dictionaries. `combine` gets the list of what the ranks have returned and does anything else.
        """
        check_callable("job.evaluate", function, *arguments, **options)
        self._check_all_can_call("evaluate")
        running = self._begin()
        self._loop.come_to_rest()
        self._check_unprepared("job.evaluate", names_in(function, *arguments, **options))
        result = running.found_by_all(lambda: function(*arguments, **options), combine)
        running.evaluated(named(result))
        return result

    def _check_all_can_call(self, method: str) -> None:
        """UserError before the first batch, where a rank may join the job later: it would make the call alone."""
        begun = self._running is not None and (self._running.finished or self._running.session.engine.started)
        if self.config.fault.replace and not begun:
            raise UserError(
                f"job.{method} was called before the first batch, and fault.replace is true: a rank that joins later"
                " would call it alone, so call it after a loop over batches, or give fault.replace false"
            )

    def _check_unprepared(self, who: str, models: Iterable[tuple[str, Any]]) -> None:
        """In the first evaluations, as a digest of large models takes seconds."""
        running = self._begin()
        self._looks_at_unprepared -= 1
        mine = digests_of(models, running.evaluations.model) if self._looks_at_unprepared >= 0 else {}
        require_same_unprepared(running.session.meet(who, mine), who)

    def gather(self, value: Any) -> list[Any]:
        """Collective, before the loop or at rest: every rank's value, in their order. Tensors come on the CPU."""
        self._check_all_can_call("gather")
        if self._running is None or not self._running.is_open:
            return self.plane.gather_objects(on_cpu(value))
        self._loop.come_to_rest()
        return self.session.meet("job.gather", on_cpu(value))

    def keep_best(self, value: float, mode: Mode = "max", model: torch.nn.Module | None = None) -> bool:
        """Collective, at rest: keep the weights in RUN/best if the value, the same on all ranks, is the best so far:
        those of what is trained, or of `model`, such as an average (`ema.module`)."""
        if self._best is None:
            raise UserError("job.keep_best needs a run folder: give hetsync.join a run")
        running = self._begin()
        self._loop.come_to_rest()
        told = running.session.meet("job.keep_best", comparable("job.keep_best", value))
        if len(set(told)) > 1:
            raise UserError(f"job.keep_best got {told} on the ranks: give all the same, as job.evaluate returns it")
        self._check_unprepared("job.keep_best", [("model", model)])
        better = self._best.improves(value := told[0], mode)
        if better and self.is_main:
            self._best.keep(value, mode, running.session.applied, running.session.model if model is None else model)
        running.session.meet("job.keep_best has kept them")
        return better

    def stop(self) -> None:
        """At rest, on all ranks: training is over, as if all its samples had been used."""
        self._loop.stop()

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
        running = self._stand_ready()
        if not self.finished and not running.is_open:
            running.open(self._stop)
        return running

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A failure on one rank ends the whole job; a mistake does so with one sentence."""
        if failure is not None and not isinstance(failure, StoppedByRequest | FinishedError):
            asked_on = isinstance(failure, StopIteration) and self._running is not None and not self._loop.in_batch
            told = UserError(ASKED_ON) if asked_on else failure
            if self._running is not None and self._running.is_open:
                self._running.failed(told)
            self.unclosed.fail(told)
            if asked_on:
                raise told from failure
            return
        try:
            self.close()
        except StoppedByRequest:  # at a rest on the way to the end, where it has saved
            self.close()
            raise
        except BaseException as late:
            self.unclosed.fail(late)
            raise

    def _is_over(self) -> bool:
        """Training, if it has begun: a script may only evaluate. Where nobody has told how long to train it is over
        after any epoch."""
        running, loop = self._running, self._loop
        if running is None or not running.is_open or not loop.has_begun:
            return True
        return loop.is_over or (running.told is None and loop.stage in (Stage.AFTER_LOOP, Stage.UNASKED))

    def _give_up(self, failure: BaseException) -> None:
        if self._running is not None:
            self._running.give_up(failure, release=self.size == 1)
        self._held.close()

    def close(self) -> None:
        """Collective: training comes to its end, where the loop has not brought it there; the summary is written."""
        running = self._running
        if running is not None and running.is_open:
            self._loop.come_to_an_end()
            running.close(self._loop.stage, self._loop.has_left)
        else:
            meet(self.plane, THE_END)
        self._held.close()
        if self._owns_plane:
            self.plane.close()
        self.unclosed.closed()
