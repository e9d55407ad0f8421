"""A job by a plan that cuts the model: each rank trains its stage of a replica, slice by slice. Replicas are in step
(`planned_in_step.py`), or train on their own up to D rounds apart (`planned_delayed.py`).

What is saved is the whole model by its names, as any job saves it: a run goes on under another plan, or under none.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from hetsync import data, models
from hetsync.config.schema import Config
from hetsync.data.evaluation import check_evaluation, metrics_of
from hetsync.data.ledger import total_samples
from hetsync.data.loader import Loader, Source
from hetsync.data.random_state import seed_all
from hetsync.errors import Trouble, UserError
from hetsync.files import DiskError
from hetsync.plan.assignment import GivenPlan, assign, check_model
from hetsync.plan.recipe import check_cut_settings, weight_refused
from hetsync.plane.base import Plane
from hetsync.replica.base import MicroBatches
from hetsync.stop_signal import STATUSES, StopSignal
from hetsync.sync.agreement import Agreement
from hetsync.sync.digests import Digests, weights_sha256
from hetsync.sync.group_state import GroupState
from hetsync.sync.messages import settings_of
from hetsync.sync.milestones import CHECKPOINT, EPOCH, Marks, Milestones, checkpoints_every, marks_every, rests_for
from hetsync.sync.optimizer_state import state_by_place
from hetsync.sync.optimizers import build_optimizer
from hetsync.sync.steps import set_rates
from hetsync.sync.tail import shared_buffers
from hetsync.train import checkpoint, data_facts
from hetsync.train.best import Best, Patience
from hetsync.train.display import Shows
from hetsync.train.evaluation import RankParts
from hetsync.train.frozen_file import FrozenFile
from hetsync.train.parts import Parts
from hetsync.train.planned_books import IN_STEP, Books
from hetsync.train.planned_delayed import DelayedReplicas
from hetsync.train.planned_in_step import ReplicasInStep
from hetsync.train.planned_ranks import cluster_of, make_replica, measured, open_channels
from hetsync.train.planned_terms import STAGE, WHOLE_MODEL, PlannedTerms, Replicas, Rest, memory_of_plans
from hetsync.train.resumption import FinishedError, Standing, require_order
from hetsync.train.run_folder import Status, opened_folder, recorded, status_of
from hetsync.train.trainer import check_metrics
from hetsync.train.workplace import Workplace, take_place


def train_planned(
    plane: Plane, config: Config, plan: GivenPlan, resume: Path | None, stop: StopSignal, shows: Shows
) -> int:
    """Collective: one training job by the recipe's plan, which cuts the model, from its recipe to its summary; returns
    the exit status.

    FinishedError where there is nothing left to do.
    """
    check_cut_settings(config)
    with opened_folder(plane, config.run, resume or False) as (folder, resumed):
        loaded = checkpoint.load_agreed(folder, plane) if resumed else None
        job = PlannedJob(take_place(config, plane, folder, loaded), plan, shows if plane.rank == 0 else "nothing")
        kept = recorded(folder, config, plan.text, job.data.model_options, lambda: job.saved)
        writes = kept if plane.rank == 0 else contextlib.nullcontext()
        try:
            with writes:
                return job.train(stop)
        except BaseException as failure:
            job.books.failed(failure)
            raise
        finally:
            job.close()


class PlannedJob:
    """One rank's part. Methods are collective where they do not say otherwise."""

    def __init__(self, at: Workplace, plan: GivenPlan, shows: Shows) -> None:
        """Build, measure, go on from where the run stands. Nothing is written.

        Raises:
            UserError: Something in recipe or plan cannot work, or does not fit the run that is to be gone on with.
            FinishedError: That run is at its end.
        """
        self.at, self.config, self.plane = at, at.config, at.plane
        began_with = {} if at.loaded is None or at.folder is None else data_facts.kept(at.folder)
        self.data = data.build(self.config.data.name, self.config.data.options, began_with)
        data.check_batch_size(self.data, self.config.data.batch_size)
        run = self.config.run
        self.total = total_samples(run.samples, run.epochs, len(self.data.train))  # type: ignore[arg-type]
        self._check_unfinished()
        self.config.schedule.check(self.total)
        self.model = models.build_for(self.data, self.config.model.name, self.config.model.options).to(at.device)
        check_model(plan, self.config, self.model, self.plane.size)
        if models.going_by_steps(self.model):
            raise UserError(
                f"model.name is {self.config.model.name}, which goes by the job's steps, and a plan that cuts the model"
                " keeps those of its first one: use a data-parallel plan"
            )
        if (refused := weight_refused(self.model)) is not None:
            raise UserError(refused)
        self.optimizer = build_optimizer(self.config.optimizer, self.model)
        stop = run.early_stop
        self.patience = Patience(stop.metric, stop.mode, stop.patience)
        self.parts = self._prepared()
        self._start_alike()
        with memory_of_plans(WHOLE_MODEL if at.cluster is None else STAGE):
            profiles = measured(at, self.model, self.data, self.optimizer)
        self.assignment = assign(
            plan, self.config, self.data, self.model, cluster_of(at, profiles), profiles, self.plane
        )
        profiles = self.assignment.profiles_of(profiles)
        self._index = self.assignment.place_of(self.plane.rank)[0]
        self._channels = open_channels(at)
        self.replica = make_replica(at, self.assignment, self.model, self.data, self._channels)
        self._forget_others()
        self._loader = self._make_loader()
        check_metrics(self.config, check_evaluation(self.model, self.data))
        settings = settings_of(self.config.sync.settled) if self._delayed else IN_STEP
        self.books = Books(at, self.assignment, self.replica, profiles, self.total, shows, settings)
        self.replica.release()
        self.replica.memory.begin()
        assert at.folder is not None
        self._best = Best(at.folder)
        self._whole: torch.nn.Module | None = None  # at rest, on rank 0
        self._unsaved = Trouble()
        self._agreement = Agreement(self.plane, self.model, [self.optimizer])
        self._groups = GroupState(self.optimizer)
        self._frozen = FrozenFile(Digests())  # of the whole model, which is made anew at each rest
        self.saved = False

    # Making it.

    def _check_unfinished(self) -> None:
        loaded, folder = self.at.loaded, self.at.folder
        if loaded is None:
            return
        marked = self.plane.rank == 0 and folder is not None and status_of(folder) == Status.FINISHED
        marked = self.plane.broadcast_object(marked)
        why = Standing.of(loaded.state).finished(loaded.progress.samples_applied, self.total, marked)
        if why is not None:
            raise FinishedError(why)
        require_order(loaded, self._order())

    def _order(self) -> dict[str, Any]:
        return Source(self.data.train, costs=self.data.costs).order(self.config.run.seed)

    def _prepared(self) -> Parts:
        """As a recipe's job without a plan prepares them: checkpoints of either are read by the other."""
        parts, config = Parts(), self.config
        parts.models.append(self.model)
        parts.optimizers.append(self.optimizer)
        parts.schedule(self.optimizer, partial(config.schedule.factor, total=self.total))
        parts.register("early_stop", self.patience)
        parts.check(self.at.device)
        parts.make_rates(config.data.batch_size, None)
        return parts

    def _start_alike(self) -> None:
        """With the checkpoint's weights and state, or with rank 0's first weights."""
        loaded = self.at.loaded
        if loaded is None:
            state = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
            self.model.load_state_dict(self.plane.broadcast_object(state if self.plane.rank == 0 else None))
            return
        checkpoint.check_model(loaded, self.model)
        if loaded.outer is not None:
            raise UserError(
                "the run was trained with sync.outer nesterov, which jobs by a plan that cuts the model do not"
                " know: resume it without a plan (--plan null)"
            )
        if loaded.state:
            self.parts.restore_roles(loaded.state)
        checkpoint.restore(loaded, self.model, [self.optimizer])
        if loaded.state:
            self.parts.restore(loaded.state, loaded.progress.samples_applied)

    def _forget_others(self) -> None:
        """The optimizer's state of weights that other stages hold is theirs; so is that of a checkpoint."""
        if self.at.loaded is not None:
            self.at.loaded.model.clear()
            self.at.loaded.optimizer.clear()
        held = set(self.replica.parameters)
        for weight in [weight for weight in self.optimizer.state if weight not in held]:
            del self.optimizer.state[weight]

    def _make_loader(self) -> Loader:
        built, rank = self.data, self.plane.rank
        micro_batches, division = self.assignment.replica_of(rank).micro_batches, self.assignment.division_of(rank)
        source = Source(
            dataset=cast(Dataset[int], range(len(built.train))),  # type: ignore[arg-type]
            collate=MicroBatches(built.train, built.collate, micro_batches, division),
            costs=built.costs,
            workers=self.config.data.workers,
        )
        run = self.config.run
        return Loader(source, run.seed, self.at.device, run.timeout_seconds)

    @property
    def _delayed(self) -> bool:
        """Do replicas train on their own between rests? One replica has nobody to be apart from."""
        return len(self.assignment.placement.replicas) > 1 and self.config.sync.most_delay_bound != 0

    # When it rests, and when it evaluates: as a job without a plan does.

    @property
    def _judges(self) -> bool:
        """Do all ranks rest for evaluations, which decide something?"""
        run = self.config.run
        return run.keep_best.metric is not None or run.early_stop.metric is not None

    def _milestones(self) -> Milestones:
        rests = {}
        if self._interval is not None:  # where they meet, checkpoints are due by their own mark, too
            rests[EPOCH] = marks_every(self._interval, self.total)
        rests[CHECKPOINT] = self._checkpoints
        return rests_for(rests, self.total)

    @property
    def _interval(self) -> int | None:
        """Samples after which all rest, again and again, whatever is saved."""
        return self.config.run.evaluate_every or self.total if self._judges or self._delayed else None

    @property
    def _checkpoints(self) -> Marks:
        every, batch = self.config.run.checkpoint_every, self.config.data.batch_size
        return checkpoints_every(every, batch, self._interval, self.total)

    def _evaluations(self, before: int) -> int | None:
        """The next mark after so many samples; none where it is a milestone already, since something is decided."""
        return None if self._judges else marks_every(self.config.run.evaluate_every, self.total)(before)

    # Training.

    def train(self, stop: StopSignal) -> int:
        """Up to the last sample, or to where a signal or an evaluation ends it; the exit status."""
        stop.listen(lambda: None)
        self.books.open()
        self._saved_at = time.monotonic()
        self._gather()
        if self._ends_where_it_stands():
            return self._end(None)
        replicas = self._replicas(self._save_due)
        self._go_on()
        for rest in replicas.rests(stop):
            if self._rest(rest):
                replicas.close()
                return self._end(rest.caught)
        raise AssertionError("the last rest ends training")

    def _replicas(self, save_due: Callable[[], bool]) -> Replicas:
        terms = PlannedTerms(
            at=self.at,
            assignment=self.assignment,
            replica=self.replica,
            optimizer=self.optimizer,
            rates=self.parts.rates[0],
            loader=self._loader,
            channels=self._channels,
            books=self.books,
            milestones=self._milestones(),
            total=self.total,
            save_due=save_due,
        )
        return DelayedReplicas(terms) if self._delayed else ReplicasInStep(terms, self._evaluations)

    def rehearse(self) -> float:
        """Collective: seconds of a step. Replicas that train on their own have the rates that they reach together.
        Nothing is written, and the job has ended."""
        moments: list[float] = []

        def looks() -> bool:  # after each task
            moments.append(time.monotonic())
            return False

        self._gather()
        replicas = self._replicas(looks)
        self._go_on()
        next(iter(replicas.rests(None)))  # the first one is at the end
        replicas.close()
        # The first task warms up; a replica that had no time for a second one counts for nothing.
        seconds = (moments[-1] - moments[0]) / (len(moments) - 1) if moments[1:] else math.inf
        told = self.plane.gather_objects(seconds)
        if self._channels is not None:
            self._channels.close()
        shares = {replica.leader: replica.share or 0 for replica in self.assignment.placement.replicas}
        return self.config.data.batch_size / sum(share / told[leader] for leader, share in shares.items())

    # At rest.

    def _ends_where_it_stands(self) -> bool:
        """Does the run that this one goes on from have nothing left to train on? It may have been ended between its
        checkpoint and the evaluation there, which is made first."""
        loaded = self.at.loaded
        if loaded is None:
            return False
        final = self.books.applied == self.total
        judge = self._judges and (final or Standing.of(loaded.state).lines_due)
        return self._ends_by_evaluation(judge, final) if final or judge else False

    def _rest(self, rest: Rest) -> bool:
        """Save and evaluate where that is due; whether training ends here."""
        final, caught = rest.applied == self.total, rest.caught
        ending = final or caught is not None
        mark = self._evaluations(rest.before)
        save = ending or rest.save or self._checkpoints(rest.applied - 1) == rest.applied
        judge = self._judges and (final or rest.reason == EPOCH)
        evaluate = final or judge or (mark is not None and rest.applied >= mark)
        began = self.books.clock.stop()
        self._gather()
        if save:
            self._save(Standing(lines_due=judge), last=ending)
        if evaluate:
            ending = self._ends_by_evaluation(judge, ending)
        self.books.rested(rest.reason or CHECKPOINT, began)
        if not ending:
            self._go_on()
        return ending

    def _go_on(self) -> None:
        """Dropout and augmentation draw alike after a resume and in the uninterrupted run."""
        self._whole = None
        seed, applied = self.config.run.seed, self.books.applied
        seed_all(hash((seed, self.plane.rank, applied)) & (2**63 - 1))
        self.replica.seed_losses(hash((seed, self._index, applied)) & (2**63 - 1))
        self.books.clock.start()

    def _gather(self) -> None:
        """The whole model on rank 0; its holders have each weight the same."""
        set_rates(self.optimizer, self.parts.rates[0].owners(self.books.applied))
        self._groups.require_nothing_own()
        shared = {id(buffer) for buffer in shared_buffers(self.model)}
        held = {
            name: tensor
            for name, tensor in self.replica.held.items()
            if isinstance(tensor, torch.nn.Parameter) or id(tensor) in shared
        }
        self._agreement.reach_by_name(held, self.at.device)
        self._whole = self.replica.whole({0})

    def _save_due(self) -> bool:
        """By time; rank 0 knows."""
        longest = self.config.run.checkpoint_seconds
        return self.plane.rank == 0 and longest is not None and time.monotonic() - self._saved_at >= longest

    def _save(self, standing: Standing, last: bool) -> None:
        """Training goes on without a checkpoint that cannot be written, unless it is the last. DiskError for that."""
        if self._index == self.assignment.place_of(0)[0]:
            optimizer_state = self.replica.merged(state_by_place([self.optimizer]))
            if self.plane.rank == 0:
                try:
                    self._write(standing, optimizer_state)
                    self.saved = True
                except DiskError as error:
                    if last:
                        raise
                    self._unsaved.tell(f"{error}; training goes on")
        self.plane.barrier()
        self._saved_at = time.monotonic()

    def _write(self, standing: Standing, optimizer_state: dict[int, dict[str, Any]]) -> None:
        assert self.at.folder is not None
        assert self._whole is not None
        books, untrained = self.books, {id(weight) for weight in self.model.parameters() if not weight.requires_grad}
        progress = checkpoint.Progress(
            samples_applied=books.applied,
            version=books.steps,
            ranks=self.plane.size,
            shares=tuple(self.assignment.share_of(rank) for rank in range(self.plane.size)),
            train_seconds=books.train_seconds,
            **asdict(books.settings),
        )
        whole = build_optimizer(self.config.optimizer, self._whole)
        whole.load_state_dict({**self.optimizer.state_dict(), "state": optimizer_state})
        state = {**self.parts.state(untrained), **standing.state(), "order": self._order()}
        keep = self.config.run.keep_checkpoints
        folder = self.at.folder / "checkpoints"
        checkpoint.save(folder, progress, self._whole, [whole], None, keep, state, frozen=self._frozen)

    def _ends_by_evaluation(self, judge: bool, ending: bool) -> bool:
        """Evaluate; whether training ends here, as it does where it is `ending` anyway."""
        metrics = self._evaluated()
        if judge and self._judge(metrics) and not ending:
            self._save(Standing(ended=True), last=True)
            return True
        return ending

    def _evaluated(self) -> dict[str, float]:
        """Metrics of the whole test data, of which each replica looks at a part."""
        count = len(self.data.evaluated)  # type: ignore[arg-type]
        part = RankParts(self._index, len(self.books.shares)).of(count)
        parts = self.plane.gather_objects(self.replica.evaluate(self.data, part.start, part.stop))
        metrics = metrics_of(self.data, parts, count) if count else {}
        self.books.evaluated(metrics)
        return metrics

    def _judge(self, metrics: dict[str, float]) -> bool:
        """Keep the best weights; whether training gains nothing any more."""
        best, stop = self.config.run.keep_best, self.config.run.early_stop
        found = None if best.metric is None else metrics[best.metric]
        if found is not None and self._best.improves(found, best.mode) and self._whole is not None:
            self._best.keep(found, best.mode, self.books.applied, self._whole)
        if stop.metric is None or not self.patience.ends_with(metrics[stop.metric]):
            return False
        self.books.say(f"{stop.metric} has not got better for {stop.patience} evaluations: training ends")
        return True

    # The end.

    def _end(self, caught: signal.Signals | None) -> int:
        stopped = caught is not None and self.books.applied < self.total
        if self._channels is not None:
            self._channels.close()
        self.books.memory_bytes = self.replica.memory.bytes(self.optimizer)
        whole = self._whole
        digest = "" if whole is None else weights_sha256([*whole.parameters(), *shared_buffers(whole)])
        self.books.close(Status.STOPPED if stopped else Status.FINISHED, digest)
        return STATUSES[caught] if caught is not None and stopped else 0

    def close(self) -> None:
        """At any end, in order or not; on this rank alone."""
        self._loader.close()
