"""A job once all is prepared: who the ranks are, the session, and what is kept and shown of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.balance.shares import choose_shares, makespan, solo_rates
from hetsync.config.schema import Config
from hetsync.control.process import ControlProcess
from hetsync.data import Data
from hetsync.data.loader import Source
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.device import emulated_rates, make_device
from hetsync.emulation.link import behind_link
from hetsync.errors import UserError
from hetsync.files import SUMMARY, write_atomically
from hetsync.plane.base import Plane
from hetsync.profiling.measure import Place, Subject, device_name, measure_ranks
from hetsync.stop_signal import StopSignal
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.milestones import CHECKPOINT, EPOCH, Marks, marks_every, rests_for
from hetsync.sync.observation import mean_staleness
from hetsync.sync.tail import travelling_values
from hetsync.telemetry import Telemetry
from hetsync.train import checkpoint
from hetsync.train.control_factory import control_factory
from hetsync.train.evaluation import Combine, EvaluationLoader, Evaluations, RankParts, combined, named, record
from hetsync.train.memory import slice_memory
from hetsync.train.parts import Parts
from hetsync.train.plan import ControlFactory, Plan
from hetsync.train.resumption import first_settings, kept_shares
from hetsync.train.run_folder import Status
from hetsync.train.saving import Saver
from hetsync.train.session import AtRest, Session
from hetsync.train.summary import JobFigures, RankFigures, RunFigures, first_summary, summarise
from hetsync.train.tasks import Trained
from hetsync.train.terminal import Display, Silence, Terminal
from hetsync.train.trackers import Tracked, trackers_of
from hetsync.train.tracking import Tracking

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
State = Callable[[], Mapping[str, Any]]
THE_END = "the end of the job"

LOWEST_SCALE = 1e-6  # of gradients: infinities in float16 have ended long before


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a job has found out and been given before its loop begins; `Job` says what each is."""

    config: Config
    plane: Plane
    folder: Path | None
    loaded: checkpoint.Loaded | None
    finished: bool
    cluster: Cluster | None
    place: Place
    model: torch.nn.Module
    parts: Parts
    source: Source
    total: int
    interval_samples: int | None  # all ranks rest after so many, again and again
    loss: Loss | None
    rank_parts: RankParts
    test_loaders: Sequence[EvaluationLoader]
    evaluation: tuple[int | None, Callable[[], Any], Combine | None] | None
    callbacks: Mapping[str, Sequence[Callable[[Any], None]]]
    track: Tracked
    began: float
    resume_by: str


class Running:
    def __init__(self, setup: Setup, show: bool) -> None:
        """Collective."""
        self.setup = setup
        self.over = False  # training, at rest
        self.is_open = False
        self.left = False  # by the loop: this rank takes part in rounds and rests only
        self.display: Display = Silence()
        self._show = show
        self._saved_last = False
        self._resting = False  # at a rest where the script's own lines run
        self._saver: Saver | None = None
        self.tracking: Tracking | None = None  # on rank 0, where something is tracked
        self._progress = setup.loaded.progress if setup.loaded else None
        self._seconds_before = self._progress.train_seconds if self._progress else 0.0  # of training
        self._round = -1  # that callbacks have been told of
        self.profiles = self._profiles()
        self._solo = solo_rates(setup.config.data.batch_size, self.profiles) if self._is_measured else None
        rank, folder = setup.plane.rank, setup.folder
        self.timer = make_device(
            setup.cluster, rank, self.profiles[rank].time.rate(1), setup.config.run.seed, self._device
        )
        self.telemetry = Telemetry(None if folder is None else folder / "telemetry" / f"rank-{rank:04d}.jsonl")
        self.evaluations = Evaluations(
            parts=setup.rank_parts,
            model=setup.model,
            loaders=setup.test_loaders,
            averages=setup.parts.averages,
            # Emulated devices evaluate at the speed of the machine: by shares, fast ranks would be out of training for
            # longer than slow ones.
            equal=setup.cluster is not None,
        )
        if setup.evaluation is not None:
            self.evaluations.use(*setup.evaluation[1:])
        self.session = self._make_session()
        self.leaving = self._leaving()

    @property
    def _device(self) -> torch.device:
        return next(self.setup.model.parameters()).device

    # Making the session.

    @property
    def _is_measured(self) -> bool:
        return self.setup.cluster is not None or self.setup.loss is not None

    def _profiles(self) -> list[RankProfile]:
        """How fast every rank is: measured, or the same for all until it is known."""
        setup = self.setup
        if setup.loss is not None and not setup.finished:
            material = Data(setup.source.dataset, setup.source.dataset, setup.loss, collate=setup.source.collate)
            what = (setup.plane, setup.config, setup.model, material, setup.place, setup.parts.optimizers)
            return measure_ranks(Subject(*what), setup.cluster)
        host = setup.place.host
        if setup.cluster is None or setup.finished:
            mine = RankProfile(device_name(self._device), host, StepTime(0.0, 1.0), uncertainty=None)
            return setup.plane.gather_objects(mine)
        total, ranks = setup.config.emulation.samples_per_second, range(setup.plane.size)
        if total is None:
            raise UserError(
                f"emulation.profile is {setup.config.emulation.profile}, of a speed that nothing tells: give"
                " emulation.samples_per_second, or job.measure the loss"
            )
        rates = emulated_rates(setup.cluster, len(ranks), "", total, total)
        names = [f"{setup.cluster.device_of(rank).name} (emulated)" for rank in ranks]
        return [RankProfile(names[rank], host, StepTime(0.0, 1 / rates[rank]), True) for rank in ranks]

    def _make_session(self) -> Session:
        setup, config = self.setup, self.setup.config
        shares = kept_shares(config, self._progress, setup.plane.size)
        shares = shares or choose_shares(config.sync, config.data.batch_size, self.profiles)
        slice_seconds = makespan(shares, [profile.time for profile in self.profiles])
        session = Session(
            plane=behind_link(setup.plane, setup.cluster, 4 * travelling_values(setup.model), slice_seconds),
            trained=Trained(
                model=setup.model,
                optimizers=setup.parts.optimizers,
                rates=setup.parts.rates,
                averages=setup.parts.averages,
                scaler=setup.parts.scaler,
            ),
            source=setup.source,
            sync=config.sync,
            plan=self._make_plan(shares),
            device=self.timer,
            telemetry=self.telemetry,
            timeout_seconds=config.run.timeout_seconds,
            make_control=self._start_control(),
            evaluator=self.evaluations if setup.evaluation is not None else None,
            memory=None if self._is_measured else slice_memory(setup.plane, setup.place, self._device),
        )
        loaded = setup.loaded
        if loaded is not None and session.outer is not None and loaded.outer is not None:
            session.outer.velocity = loaded.outer.to(self._device)
        return session

    def _make_plan(self, shares: tuple[int, ...]) -> Plan:
        setup, run, progress = self.setup, self.setup.config.run, self._progress
        rests: dict[str, Marks] = {CHECKPOINT: marks_every(run.checkpoint_every, setup.total)}
        if setup.interval_samples is not None:
            rests[EPOCH] = marks_every(setup.interval_samples, setup.total)
        return Plan(
            batch_size=setup.config.data.batch_size,
            total_samples=setup.total,
            ranks=self.profiles,
            milestones=rests_for(rests, setup.total),
            seed=run.seed,
            applied=progress.samples_applied if progress else 0,
            version=progress.version if progress else 0,
            shares=shares,
            settings=first_settings(setup.config, progress),
            evaluations=marks_every(setup.evaluation[0] if setup.evaluation else None, setup.total),
        )

    def _start_control(self) -> ControlFactory | None:
        setup, config = self.setup, self.setup.config
        if setup.plane.rank != 0 or config.control.name == "fixed" or setup.finished:
            return None
        if setup.folder is None or not self._is_measured:
            raise UserError(
                f"control.name is {config.control.name}, which needs a run folder and the ranks' speeds: give"
                " hetsync.join a run, and job.measure the loss"
            )
        process = ControlProcess(config.control, config.run.seed, config.data.batch_size, setup.folder / "control.log")
        return control_factory(process, self.profiles, setup.parts.optimizers[0], setup.parts.factor(0))

    def open(self, stop: StopSignal | None) -> None:
        """Training is about to begin: from now on signals save and stop, and there is something on disk."""
        setup, self.is_open = self.setup, True
        if self._show:
            self.display = Terminal(setup.total, self.session.plan.applied)
        if stop is not None:
            stop.listen(self.session.request_stop)
        if setup.folder is not None:
            self._saver = Saver(self.session, setup.folder, setup.config.run, self._seconds_before)
            if setup.plane.rank == 0:
                write_atomically(setup.folder / SUMMARY, json.dumps(first_summary(self._job_figures()), indent=1))
            self._saver.start_timer()
            self.display.say(f"the run folder is {setup.folder}")
        self.display.ranks(self.profiles, self.session.shares, self._solo)
        trackers = trackers_of(setup.track, setup.folder, self.session.plan.applied)
        if trackers and setup.plane.rank == 0:
            solo = None if self._solo is None else sum(self._solo)
            self.tracking = Tracking(trackers, self.session, solo, self._device, self._seconds_before)

    # While training runs.

    @property
    def saved(self) -> bool:
        """Has this process written a checkpoint?"""
        return self._saver is not None and self._saver.saved

    def between_batches(self) -> None:
        coordinator = self.session.coordinator
        if coordinator is not None:
            if self.display.due():
                show_progress(self.display, coordinator, self.session.seconds_training())
            if self.setup.callbacks.get("round") and coordinator.machine.version > self._round + 1:
                self._round = coordinator.machine.version - 1
                self._tell("round", self._round)
        self._take_evaluations()
        if self.tracking is not None:
            self.tracking.between_batches()

    def _take_evaluations(self) -> None:
        for applied, seconds, metrics in self.evaluations.take():
            self._show_evaluation(applied, seconds, metrics)

    def _show_evaluation(self, applied: int, seconds: float, metrics: dict[str, float]) -> None:
        sentence = record(self.telemetry, applied, self._seconds_before + seconds, metrics)
        if self.tracking is not None:
            self.tracking.log_metrics(metrics, applied, seconds)
        if applied < self.setup.total:  # the closing lines have the last one
            self.display.say(sentence)
        self._tell("evaluation", metrics)

    def _tell(self, event: str, value: Any) -> None:
        if self.setup.plane.rank == 0:
            for callback in self.setup.callbacks.get(event, ()):
                callback(value)

    # At rest.

    def rest(self, rest: AtRest, state: State) -> None:
        """Collective: save and evaluate where that is due. `state`: what else a checkpoint keeps."""
        session, every = self.session, self.setup.config.run.checkpoint_every
        self._resting = True
        self._share_scale()
        self._take_evaluations()
        self.over |= rest.final or session.stopping
        if self.over or rest.reason == CHECKPOINT or (every is not None and session.applied % every == 0):
            self._save(state, last=self.over)  # before an evaluation, which may fail
            self._saved_last = self.over
        if rest.evaluation_due and self.setup.evaluation is not None:
            part = self.evaluations.score(session.shares)
            self.evaluated(named(combined(self.setup.plane.gather_objects(part), self.setup.evaluation[2])))

    def _share_scale(self) -> None:
        """Collective. Ranks that have stepped on their own, or have missed a step for want of samples, have scales of
        their own: the lowest is one that none has found too high."""
        scaler = self.setup.parts.scaler
        if scaler is not None and scaler.is_enabled():
            states = self.setup.plane.gather_objects(scaler.state_dict())
            lowest = min(states, key=lambda state: (state["scale"], state["_growth_tracker"]))
            if lowest["scale"] < LOWEST_SCALE:
                raise UserError(
                    f"the scale of gradients has fallen to {lowest['scale']:.0e}, since step after step was infinite or"
                    " nan: lower the learning rate, look at the data, or take bfloat16"
                )
            scaler.load_state_dict(lowest)

    def _save(self, state: State, last: bool) -> None:
        if self._saver is not None:
            self._saver.save(state, last)
            self._tell("checkpoint", self.session.applied)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """At rest, with the same metrics on all ranks."""
        self.evaluations.metrics = metrics
        if self.setup.plane.rank == 0:
            self._show_evaluation(self.session.applied, self.session.totals.train_seconds, metrics)

    # Leaving, and the end.

    def leave(self) -> None:
        """The loop wants no more batches."""
        self.left, self._resting = True, False

    def go_on(self) -> None:
        """A loop that was left before begins anew, and is empty: on to the next rest."""
        self._resting = False

    @property
    def on_its_way(self) -> bool:
        """Has the loop been left between two rests?"""
        return self.left and not self._resting and not self.over

    def _leaving(self) -> Iterator[AtRest]:
        yield from self.session.leave()

    def stop_here(self) -> None:
        """At rest: as if all samples had been used."""
        self.left = self.over = True

    def close(self, state: State) -> None:
        """Collective, at rest or after `leave`: the end of training, and its summary."""
        session, setup = self.session, self.setup
        if session.applied < setup.total and not session.stopping and not self._saved_last:
            self._save(state, last=True)  # all ranks have ended it at a rest
        session.meet(THE_END)
        if self._saver is not None:
            self._saver.stop_timer()
        figures = self._run_figures()
        if self.tracking is not None:
            self.tracking.log_figures()
            self.tracking.close()
        session.close()
        summary = summarise(figures) if figures is not None else None
        if summary is not None and setup.folder is not None:
            write_atomically(setup.folder / SUMMARY, json.dumps(summary, indent=1))
        self.display.close(summary)
        if session.stopping and setup.folder is not None:
            self.display.say(f"stopped and saved; go on with: {setup.resume_by.format(setup.folder)}")
        if summary is not None:
            self._tell("end", summary)

    def give_up(self, release: bool) -> None:
        """The job has failed; with `release` the model may be trained in another."""
        if self._saver is not None:
            self._saver.stop_timer()
        self.display.close(None)
        if release:
            self.session.release()

    # Figures, for the summary.

    def _job_figures(self, status: Status = Status.RUNNING) -> JobFigures:
        setup = self.setup
        return JobFigures(
            status=status,
            ranks=setup.plane.size,
            emulated=setup.cluster is not None,
            emulate=setup.config.emulation.profile,
            samples_applied=self.session.applied,
            samples_expected=setup.total,
            shares=self.session.shares,
            seed=setup.config.run.seed,
        )

    def _run_figures(self) -> RunFigures | None:
        """Collective, at rest; on rank 0."""
        session = self.session
        per_rank = self.setup.plane.gather_objects(self._rank_figures())
        if session.coordinator is None:
            return None
        return RunFigures(
            job=self._job_figures(Status.STOPPED if session.stopping else Status.FINISHED),
            per_rank=per_rank,
            samples_before=session.plan.applied,
            rounds=session.version,
            staleness=session.coordinator.machine.staleness,
            settings=session.settings,
            metrics=self.evaluations.metrics,
            anchor_sha256=session.totals.anchor_sha256,
            wall_seconds=time.monotonic() - self.setup.began,
            control=session.control.summary() if session.control is not None else None,
        )

    def _rank_figures(self) -> RankFigures:
        session, rank, totals, engine = self.session, self.setup.plane.rank, self.session.totals, self.session.engine
        return RankFigures(
            rank=rank,
            profile=self.profiles[rank],
            share=session.shares[rank],
            samples=totals.samples,
            solo_samples_per_second=None if self._solo is None else self._solo[rank],
            train_seconds=totals.train_seconds,
            compute_seconds=totals.compute_seconds,
            wait_seconds=engine.timer.wait_seconds,
            data_seconds=totals.data_seconds,
            runtime_cpu_seconds=engine.cpu_seconds(),
            bytes_sent=engine.bytes_sent,
            slices=self.timer.slices,
            real_seconds=self.timer.real_seconds,
            overruns=self.timer.overruns,
        )


def show_progress(display: Display, coordinator: Coordinator, seconds_training: float) -> None:
    """While the communication thread goes on counting."""
    machine = coordinator.machine
    staleness = mean_staleness(dict(machine.staleness))  # a copy, made in one step
    display.progress(machine.ledger.applied, seconds_training, coordinator.take_loss(), staleness)
