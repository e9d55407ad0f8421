"""What a script tells a job before its loop: what is trained, on which data, and what is done beside it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from hetsync.config.schema import Config
from hetsync.data.handed_over import shuffles, source_of, total_samples
from hetsync.data.random_state import seed_all
from hetsync.data.stream import Stream
from hetsync.data.workers import Collate
from hetsync.emulation.cluster import load_cluster
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.profiling.measure import choose_device, find_place, limit_threads
from hetsync.sync.optimizers import check_needs_no_closure, check_scheduler
from hetsync.train import checkpoint
from hetsync.train.alike import data_described, parts_described, require_alike
from hetsync.train.evaluation import Combine, EvaluationLoader, RankParts, check_callable
from hetsync.train.parts import Factor, Parts, add
from hetsync.train.prepared import PreparedScaler, PreparedScheduler, TrainingLoader, unwrapped
from hetsync.train.run_folder import Status, status_of
from hetsync.train.running import Loss, Running, Setup
from hetsync.train.trackers import Tracker

EVENTS = ("evaluation", "checkpoint", "round", "end")


class Preparation(ABC):
    """The first half of a `Job`."""

    def __init__(self, config: Config, plane: Plane, show: bool, resume_by: str) -> None:
        self.config = config
        self.plane = plane
        self.rank, self.size = plane.rank, plane.size
        self._parts = Parts()
        self._rank_parts = RankParts(plane.rank, plane.size)
        self._test_loaders: list[EvaluationLoader] = []
        self._loader: TrainingLoader | None = None
        self._loss: Loss | None = None
        self._evaluation: tuple[int | None, Callable[[], Any], Combine | None] | None = None
        self._callbacks: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        self._total: int | None = None
        self.finished = False
        self.folder: Path | None = None
        self.loaded: checkpoint.Loaded | None = None  # where this job goes on from
        self._began = time.monotonic()
        self._shows = show
        self._resume_by = resume_by
        self._track: list[str | Tracker] = []
        self._interval_samples: int | None = None  # all ranks rest after so many, again and again
        self._reopened = False  # a resumed run stands at an interval's end, whose last lines have not been run
        self._running: Running | None = None
        self._own_scaler = False  # the loop's, in place of ours

    def _take_place(self) -> None:
        """This rank's cluster, cores and device."""
        config, profile = self.config, self.config.emulation.profile
        self.cluster = load_cluster(profile) if profile is not None else None
        if self.cluster is not None:
            self.cluster.device_of(self.size - 1)  # is there one for every rank?
        self.place = find_place(self.plane)
        limit_threads(self.place, self.cluster is not None)
        self.device = choose_device(config.run.device, self.place)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a script's plain "cuda" is this one
        self.plane.settle(self.device)
        self.local_rank = self.place.local_rank
        seed_all(config.run.seed)
        if config.run.precision == "float16":
            self._parts.scaler = PreparedScaler(torch.amp.GradScaler(self.device.type), self._collect_for)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, *values: Any, **named: Any) -> None:
        """On rank 0 only. Where progress is shown, below what is shown."""
        if self.is_main:
            if named or self._running is None or not self._shows:
                print(*values, **named)
            else:
                self._running.display.say(" ".join(map(str, values)))

    # What the second half has to do with it.

    @abstractmethod
    def _batches(self) -> Iterator[Any]:
        """A loop over this rank's batches."""

    @abstractmethod
    def _collect_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Its gradients are now those of its step; False where none is due."""

    @abstractmethod
    def _settle(self) -> None:
        """Come to rest where the loop has been left."""

    @abstractmethod
    def _slices_so_far(self) -> int | None:
        """Batches that have come to this loop, the one that is out among them; None where none is out."""

    def prepare(self, *things: Any) -> Any:
        """Models, optimizers, schedulers, GradScalers, averages of weights (`AveragedModel`) and DataLoaders: what the
        loop uses in their place, in the same order. Models and optimizers are returned as they are.

        A DataLoader that shuffles is the job's training data, one that does not is test data, of which each rank
        evaluates its part. UserError for anything else.
        """
        self._check_before("prepare")
        found = [self._prepared(thing) for thing in things]
        return found[0] if len(found) == 1 else tuple(found)

    def _check_before(self, method: str) -> None:
        """UserError once the loop has begun."""
        if self._running is not None:
            raise UserError(f"job.{method} was called after the loop had begun: prepare everything before it")

    def _prepared(self, thing: Any) -> Any:
        match thing:
            case AveragedModel():
                add(self._parts.averages, thing)
            case torch.nn.Module():
                add(self._parts.models, unwrapped(thing))
            case torch.optim.Optimizer():
                check_needs_no_closure(thing, f"optimizer is a {type(thing).__name__}")
                add(self._parts.optimizers, thing)
            case LRScheduler():
                check_scheduler(thing, self._parts.optimizers)
                self._parts.schedulers.append(PreparedScheduler(thing, self._slices_so_far, self._settle))
                return self._parts.schedulers[-1]
            case torch.amp.GradScaler():
                if self._own_scaler:
                    raise UserError("job.prepare got two GradScalers: give one, which scales all losses")
                self._own_scaler = True
                self._parts.scaler = PreparedScaler(thing, self._collect_for)
                return self._parts.scaler
            case DataLoader():
                return self.loader(thing) if shuffles(thing) else self.test_loader(thing)
            case _:
                raise UserError(
                    f"job.prepare got a {type(thing).__name__}: give models, optimizers, their schedulers, GradScalers"
                    " and DataLoaders (data sets go to job.loader, other state to job.register)"
                )
        return thing

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
    ) -> TrainingLoader:
        """This rank's batches of the training data: a map-style or iterable data set, or a DataLoader of one.

        Args:
            data: The same on every rank.
            batch_size: Samples of a batch of all ranks together.
            epochs: Passes over the data, for a loop that is not inside `epochs`.
            samples: Samples in all, instead of epochs. Of an iterable data set: those of an epoch, in its own order;
                each is used once, and each rank reads all of them, unless the data set has `read(start, stop)`.
            collate_fn: Samples to a batch.
            workers: Processes of each rank that load.
            costs: Work that each sample takes, where they differ.
        """
        self._check_before("loader")
        if self._loader is not None:
            raise UserError(
                "the job was given training data twice: give one data set (a ConcatDataset joins several), and test"
                " data that are shuffled to job.test_loader"
            )
        source, batch_size = source_of(data, batch_size, collate_fn, workers, costs, samples)
        self._loader = TrainingLoader(source, batch_size, self._batches)
        of_an_epoch = isinstance(source.dataset, Stream)  # are the samples of a stream
        self._total = total_samples(None if of_an_epoch else samples, epochs, source.epoch_samples)
        return self._loader

    def test_loader(self, loader: DataLoader[Any]) -> EvaluationLoader:
        """Batches of this rank's part of the test data, as large as its share, in the data set's own order."""
        if not isinstance(loader, DataLoader):
            raise UserError(f"job.test_loader got a {type(loader).__name__}: give a DataLoader of the test data")
        shuffles(loader)  # or its order is one that this cannot stand for
        self._test_loaders.append(EvaluationLoader(loader, self._rank_parts, self.device))
        return self._test_loaders[-1]

    def register(self, name: str, state: Any) -> None:
        """Checkpoints keep what `state.state_dict()` returns on rank 0; all ranks' `load_state_dict` get it back."""
        self._check_before("register")
        self._parts.register(name, state)

    def schedule(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """What the optimizer's learning rates are multiplied by after so many samples of the whole job."""
        self._check_before("schedule")
        self._parts.schedule(optimizer, factor)

    def measure(self, loss: Loss) -> None:
        """Measure each rank's speed before training, on a copy of the model: `loss(model, batch)` is a batch's mean
        loss. Without it ranks start with equal shares, and no efficiency can be told."""
        self._check_before("measure")
        self._loss = loss

    def evaluate_every(self, samples: int | None, function: Callable[[], Any], combine: Combine | None = None) -> None:
        """Evaluate after so many samples, again and again, while training goes on, and at its end (None: only there):
        as `evaluate`, of the weights that all ranks share then. Results are in the records, and on rank 0 in `metrics`.
        """
        self._check_before("evaluate_every")
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise UserError(f"job.evaluate_every got {samples} samples: give a whole number, 1 or more")
        check_callable("job.evaluate_every", function)
        self._evaluation = samples, function, combine

    def on(self, event: Literal["evaluation", "checkpoint", "round", "end"], callback: Callable[[Any], None]) -> None:
        """Call on rank 0, between two batches: after an "evaluation" with its metrics, after a "checkpoint" with its
        samples, after a "round" with the number of rounds, at the "end" with the summary."""
        if event not in EVENTS:
            raise UserError(f"job.on got {event!r}: use one of {', '.join(EVENTS)}")
        check_callable("job.on", callback)
        self._callbacks[event].append(callback)

    # Once all is prepared.

    @property
    def is_at_its_end(self) -> bool:
        """Collective: does the run that is to be gone on with call itself finished?"""
        at_its_end = self.is_main and self.folder is not None and status_of(self.folder) == Status.FINISHED
        return self.plane.broadcast_object(at_its_end)

    @property
    def _no_training_data(self) -> str:
        if self._test_loaders:
            return (
                "the job has test data only, for which job.prepare takes DataLoaders that do not shuffle: give the"
                " training data with shuffle=True, or, in their own order, to job.loader"
            )
        return "the job has no training data: give a DataLoader to job.prepare, or a data set to job.loader"

    def ready(self) -> Running:
        """Collective, once all is prepared: check it, go on from where the run stands, measure. Nothing is written yet.
        The first of loop and evaluation does it otherwise."""
        if self._running is not None:
            return self._running
        self._parts.check(self.device)
        if self._loader is None:
            raise UserError(self._no_training_data)
        if self._total is None and isinstance(self._loader.dataset, Stream):
            self._total = self._loader.source.epoch_samples
        if self._total is None:
            raise UserError(
                "the job does not know how long to train: loop within 'for epoch in job.epochs(N)', or give"
                " job.loader epochs or samples"
            )
        data = data_described(self._loader, self._test_loaders, self._total)
        require_alike(self.plane, "the first loop or evaluation", {**parts_described(self._parts), **data})
        model = self._parts.join()
        if self.loaded is not None and self.loaded.state:
            checkpoint.check_model(self.loaded, model)
            self._parts.restore_roles(self.loaded.state)
        self._parts.make_rates(self._loader.batch_size, self._interval_samples)
        self._restore(model)
        config = replace(self.config, data=replace(self.config.data, batch_size=self._loader.batch_size))
        setup = Setup(
            config=config,
            plane=self.plane,
            folder=self.folder,
            loaded=self.loaded,
            finished=self.finished,
            cluster=self.cluster,
            place=self.place,
            model=model,
            parts=self._parts,
            source=self._loader.source,
            total=self._total,
            interval_samples=self._interval_samples,
            loss=self._loss,
            rank_parts=self._rank_parts,
            test_loaders=self._test_loaders,
            evaluation=self._evaluation,
            callbacks=self._callbacks,
            track=self._track,
            began=self._began,
            resume_by=self._resume_by,
        )
        self._running = Running(setup, self._shows and self.is_main)
        return self._running

    def _restore(self, model: torch.nn.Module) -> None:
        loaded, total = self.loaded, self._total
        if loaded is None or total is None:
            return
        applied = loaded.progress.samples_applied
        if applied > total:
            raise UserError(
                f"the job is to train on {total} samples, but this run has trained on {applied} already: raise its"
                " epochs or samples, or begin another run"
            )
        self.finished = self.is_at_its_end and (applied == total or bool(loaded.state.get("ended")))
        if self._interval_samples is not None and not self.finished:
            self._reopened = bool(loaded.state.get("reopened")) or applied == total
        checkpoint.restore(loaded, model, self._parts.optimizers)
        if loaded.state:  # of the first version there is none
            self._parts.restore(loaded.state)
        if self.finished and self.is_main:
            remedy = "raise its epochs or samples to go on" if applied == total else "begin another run"
            self.print(f"this run is finished after {applied} samples: {remedy}")
