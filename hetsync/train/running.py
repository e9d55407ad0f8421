"""A job once all is prepared: who the ranks are, the session, and what is kept and shown of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import makespan, solo_rates
from hetsync.config.faults import InjectedFault, When
from hetsync.control.process import ControlProcess
from hetsync.emulation.link import behind_link
from hetsync.errors import UserError, complain, one_sentence
from hetsync.files import SUMMARY, write_atomically
from hetsync.launchers import write_status
from hetsync.plane.base import CutOffError, LateError, LostError, Newcomer, Plane, StalledError
from hetsync.plane.wire import encoded_bytes, of_gradients
from hetsync.profiling.interconnect import measure_sum
from hetsync.stop_signal import StopSignal
from hetsync.sync.messages import NO_BOUND, Settings
from hetsync.sync.milestones import (
    CALL,
    CHECKPOINT,
    EPOCH,
    JOIN,
    ROLLBACK,
    Marks,
    at_ends_of_batches,
    checkpoints_every,
    marks_every,
    rests_for,
)
from hetsync.sync.rounds_rule import RoundsChange, begun_behind
from hetsync.sync.tail import trained_values, travelling_bytes, travelling_values
from hetsync.telemetry import Telemetry
from hetsync.train import checkpoint, ranks
from hetsync.train.alike import Description, settings_described
from hetsync.train.carried import CarriedState, keeps_columns
from hetsync.train.control_factory import control_factory
from hetsync.train.display import Shows
from hetsync.train.evaluation import Combine, Evaluations, by_rank, named
from hetsync.train.figures import Figures
from hetsync.train.injection import InjectedDevice, Injection, require_struck
from hetsync.train.last_good import LastGood, copied
from hetsync.train.last_words import of_a_death
from hetsync.train.memory import slice_memory
from hetsync.train.notice import posted
from hetsync.train.plan_figures import compared, predicted
from hetsync.train.preparation import Preparation
from hetsync.train.replacing import Replacements, Summons, Welcome
from hetsync.train.resumption import Standing, first_settings
from hetsync.train.rollback import Rollbacks
from hetsync.train.run_folder import mark_failed, taken_over
from hetsync.train.saving import Saver, progress_of
from hetsync.train.session import AtRest, Session
from hetsync.train.stage import Stage
from hetsync.train.summary import (
    Join,
    first_summary,
    summarise,
)
from hetsync.train.tasks import Trained
from hetsync.train.telling import Telling
from hetsync.train.terms import ControlFactory, Terms
from hetsync.train.trackers import Tracked, trackers_of
from hetsync.train.tracking import Tracking
from hetsync.train.workplace import Workplace

if TYPE_CHECKING:  # it loads what only plans need
    from hetsync.plan.assignment import Assignment

THE_END = "the end of the job"

NO_COPY = (
    "no copy of weights and optimizers can be kept in memory, which is short, or they hold what no checkpoint can keep:"
    " where delay loses training, all go back to the newest checkpoint"
)
COUNTED_BY_SCRIPT = "the same command, with 'for epoch in job.epochs(N)' in the script, where resume is 'auto'"
COUNTED = " (a loop that counts its batches leaves some: with delay a rank has as many as it has time for)"
LOWEST_SCALE = 1e-6  # of gradients: infinities in float16 have ended long before


@dataclass(frozen=True)
class Shown:
    """What is told of a job while it runs, and to whom.

    Args:
        shows: How the first rank tells progress and summary.
        track: What gets figures.
        resume_by: What goes on with a stopped run, {} being its folder.
    """

    shows: Shows
    track: Tracked
    resume_by: str


class Running:
    """Attributes:
    config: The job's, with the batch size of its loader.
    model: All that is trained.
    told: Samples to train on, if anybody has told before the first loop or evaluation.
    total: As many, or more than anybody trains on.
    finished: The run that was to be gone on with is at its end already.
    assignment: Of a data-parallel plan that it follows.
    lines_due: The run that is gone on with stood at an interval's end, whose last lines in the script had not been run.
    looped_from: Samples applied when the loop over batches began.
    """

    def __init__(
        self, at: Workplace, prepared: Preparation, shown: Shown, finished: bool, described: Description
    ) -> None:
        """Collective. `described`: what is prepared, as it was before it was touched."""
        self._described = described
        loader = prepared.training_data
        self.at = at
        self._newcomer = at.plane.newcomer
        self.prepared = prepared
        self.plane = at.plane
        self.config = replace(at.config, data=replace(at.config.data, batch_size=loader.batch_size))
        self._rollbacks = Rollbacks(self.config.fault, at.folder)
        self._kept = LastGood()
        self._told_of_no_copy = False
        self.model = prepared.parts.model
        self.source = loader.source
        self.told, self.total = prepared.told, prepared.total
        self.finished = finished
        self.lines_due = False
        self._shown = shown if self.told is not None else replace(shown, resume_by=COUNTED_BY_SCRIPT)
        self._welcome: Welcome | None = None  # of a rank that joins while the job runs
        self.joins: list[Join] = []
        if self._newcomer is None:
            self._restore()
        self.is_open = False
        self.looped_from = self._samples_checked = 0
        self._saved_last = False
        self._saver: Saver | None = None
        self._leading = False
        self._held = ExitStack()  # the run folder, where the rank that did has died
        self.profiles = ranks.find_profiles(at, self.config, prepared, finished)
        self.assignment: Assignment | None = None
        if prepared.assigns is not None and not finished:
            self.assignment = prepared.assigns(self.profiles, at.cluster)
            self.profiles = self.assignment.profiles_of(self.profiles)
        self._is_measured = ranks.are_measured(at, prepared)
        self._memory = None if self._is_measured else slice_memory(self.plane, at.place, self._device)
        if self._newcomer is not None:
            self._enter(self._newcomer)
        self._progress = self.at.loaded.progress if self.at.loaded else None
        self._seconds_before = self._progress.train_seconds if self._progress else 0.0  # of training
        rank, folder = at.plane.rank, at.folder
        self.timer = ranks.device_of(at, self.profiles[rank], self.assignment, self._device)
        self.telemetry = Telemetry(None if folder is None else folder / "telemetry" / f"rank-{rank:04d}.jsonl")
        faults = self._faults()
        self._injection = Injection(faults, self.plane, self.model) if faults else None
        self.evaluations = Evaluations(
            parts=prepared.rank_parts,
            model=self.model,
            loaders=prepared.test_loaders,
            averages=prepared.parts.averages,
            # Emulated devices evaluate at the speed of the machine: by shares, fast ranks would be out of training for
            # longer than slow ones.
            equal=at.cluster is not None,
            before=self._injecting("evaluation"),
        )
        if prepared.evaluation is not None:
            self.evaluations.use(*prepared.evaluation[1:])
        self.session = self._make_session()
        if self.at.loaded is not None:
            prepared.parts.freeze_again(self.at.loaded.state)  # the session counts what ranks share
        told = (self.session, self.profiles, self.telemetry, prepared.callbacks, self.told)
        self.telling = Telling(*told, self.config.fault.goes_back)
        self.telling.solo = self._solo_rates()
        self._figures = Figures(
            at=self.at,
            config=self.config,
            total=self.told,
            session=self.session,
            device=self.timer,
            profiles=self.profiles,
            evaluations=self.evaluations,
            telling=self.telling,
            rollbacks=self._rollbacks,
            joins=self.joins,
            joined=self.has_joined,
            assignment=self.assignment,
        )
        watched = () if keeps_columns(self.config.sync, self.plane.ranks_at_start) else prepared.parts.models
        self.carried = CarriedState(watched, self.plane.ranks_at_start)
        self.leaving = self._leaving()
        self.status = 0  # another one of a job that has been asked to stop
        self._replacements = Replacements(self.plane, self._summons) if self.config.fault.replace else None

    def _injecting(self, when: When) -> Callable[[], None]:
        """What is to be called at such a moment."""
        return (lambda: None) if self._injection is None else partial(self._injection.at, when)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _restore(self) -> None:
        """What was prepared is as it stands in the checkpoint."""
        loaded, parts = self.at.loaded, self.prepared.parts
        if loaded is None:
            return
        if self.prepared.interval_samples is not None and not self.finished and self._welcome is None:
            at_the_end = loaded.progress.samples_applied == self.total
            self.lines_due = Standing.of(loaded.state).lines_due or at_the_end
        checkpoint.restore(loaded, self.model, parts.optimizers)
        if loaded.state:  # of the first version there is none
            parts.restore(loaded.state, loaded.progress.samples_applied)

    # A rank that joins while the job runs.

    def _summons(self) -> Summons:
        return Summons(
            folder=str(self.at.folder),
            settings=settings_described(self.at.config, keep=True, resume=False, seeded=self.at.seeded),
            seed=self.config.run.seed,
            prepared=self._described,
            places=self.at.places,
            profiles=self.profiles,
        )

    def _enter(self, newcomer: Newcomer) -> None:
        """Come to the others' rest, and stand where they stand."""
        rank, parts = self.plane.rank, self.prepared.parts
        address, welcome = newcomer.knock(self.profiles[rank])
        self._welcome = welcome
        self.plane.enter(welcome.members, address)
        loaded = checkpoint.load(Path(welcome.checkpoint))
        checkpoint.check_model(loaded, self.model)
        parts.restore_roles(loaded.state)
        self.at = replace(self.at, loaded=loaded)
        self.profiles, self.joins = list(welcome.profiles), list(welcome.joins)
        self._rollbacks.known = list(welcome.rollbacks)
        self._restore()

    def _faults(self) -> tuple[InjectedFault, ...]:
        """Those that are still to come, of a rank that joins: others have struck the one that it replaces."""
        faults = self.config.fault.injected()
        if self._welcome is None:
            return faults
        assert self._progress is not None
        version = self._progress.version
        return tuple(fault for fault in faults if fault.round is not None and fault.round >= version)

    def _admit(self) -> None:
        """Collective, the last at a rest: one joins, if it is ready and there is a checkpoint of this rest."""
        assert self._replacements is not None
        session, saved, arrival = self.session, self._saver and self._saver.newest, None
        if saved is None:
            self._replacements.put_off()
        elif session.coordinator is not None:
            samples = session.coordinator.machine.samples_by_rank

            def welcome(join: Join, profile: RankProfile) -> Welcome:
                return Welcome(
                    members=(*self.plane.members, join.rank),
                    checkpoint=str(saved),
                    shares=session.shares,
                    profiles=[profile if n == join.rank else other for n, other in enumerate(self.profiles)],
                    entry=session.entry,
                    deaths=session.deaths,
                    joins=[*self.joins, join],
                    rollbacks=self._rollbacks.known,
                )

            arrival = self._replacements.invite(welcome, session.version, samples)
        arrival = self.plane.broadcast_object(arrival)
        if arrival is None:
            return
        join, self.profiles[arrival.join.rank] = arrival.join, arrival.profile
        try:
            session.admit(join.rank, arrival.profile, arrival.address)
        finally:  # another may die as soon as all have agreed
            if join.rank in self.plane.members:
                self.joins.append(join)
                self.telling.solo = self._solo_rates()
        if self.plane.leads:
            self.telemetry.record("join", **join.entry())
        self.telling.join(join)

    @property
    def has_joined(self) -> bool:
        """While the job ran, at a rest of its own: where an epoch had ended there, its last lines had been run."""
        return self._welcome is not None

    def _solo_rates(self) -> list[float] | None:
        batch, least = self.config.data.batch_size, self.config.sync.least_slice
        return solo_rates(batch, self.profiles, least) if self._is_measured else None

    # Making the session.

    def _make_session(self) -> Session:
        at, config = self.at, self.config
        # An emulated link is as fast as it was before a resume, whatever shares have become.
        before = None if at.cluster is not None else self._progress
        by_recipe = ranks.first_shares(config, self.profiles, self.assignment, before)
        slice_seconds = makespan(by_recipe, [profile.time for profile in self.profiles])
        injection = self._injection
        plane: Plane = self.plane if injection is None else injection.plane
        linked = behind_link(plane, at.cluster, travelling_bytes(self.model), slice_seconds)
        several = linked is not plane or len({profile.host for profile in self.profiles}) > 1
        settings = first_settings(config, self._progress, trained_values(self.model))
        begun = self._begun_behind(linked, settings, slice_seconds) if several else None
        if self._welcome is not None:
            shares = tuple(self._welcome.shares)
        elif begun is None:
            shares = ranks.first_shares(config, self.profiles, self.assignment, self._progress)
        else:
            settings = begun.applied_to(settings)
            delayed = replace(config, sync=replace(config.sync, delay_bound=begun.delay_bound))
            shares = ranks.first_shares(delayed, self.profiles, self.assignment, self._progress)
        session = Session(
            plane=linked,
            trained=Trained(
                model=self.model,
                optimizers=self.prepared.parts.optimizers,
                rates=self.prepared.parts.rates,
                averages=self.prepared.parts.averages,
                scaler=self.prepared.parts.scaler,
                shared=self.prepared.parts.shared,
                constraints=self.prepared.parts.constraints,
            ),
            source=self.source,
            sync=config.sync,
            terms=self._make_terms(shares, settings, begun),
            device=self.timer if injection is None else InjectedDevice(self.timer, injection),
            telemetry=self.telemetry,
            timeout_seconds=config.run.timeout_seconds,
            make_control=self._start_control(),
            scorer=self.evaluations if self.prepared.evaluation is not None else None,
            memory=self._memory,
            fault=config.fault,
            goes_back=at.folder is not None and config.control.name == "fixed",  # no controller knows of steps back
            keep_copy=self._keep_copy,
            around=injection.around if injection is not None else lambda start, steps: steps,
        )
        loaded = at.loaded
        if loaded is not None and session.outer is not None and loaded.outer is not None:
            session.outer.velocity = loaded.outer.to(self._device)
        session.deaths += [] if self._welcome is None else self._welcome.deaths
        return session

    @property
    def _checkpoints(self) -> Marks:
        every, step = self.config.run.checkpoint_every, self.config.step_samples
        return checkpoints_every(every, step, self.prepared.interval_samples, self.total)

    @property
    def _calls(self) -> list[tuple[Callable[[], None], Marks]]:
        """What is called at rests within the loop, and where these are."""
        batch, interval = self.config.step_samples, self.prepared.interval_samples
        return [
            (function, at_ends_of_batches(marks, batch, interval, self.total))
            for function, marks in self.prepared.calls
        ]

    def _begun_behind(self, plane: Plane, settings: Settings, slice_seconds: float) -> RoundsChange | None:
        """Collective, as a job begins that has a link between its ranks and a delay bound by rule, or goes on with
        delay: how slow is it? Where ranks have not been measured they learn that in rounds, and so they do where they
        had none, as it may have lost training."""
        sync = self.config.sync.for_model(trained_values(self.model))
        goes_on = self._progress is None or not settings.synchronous
        begins = goes_on and self._welcome is None and self._is_measured and not self.finished
        ruled = sync.delay_bound == "auto" and self.config.control.name == "fixed" and self.assignment is None
        if not (begins and ruled and slice_seconds > 0):
            return None
        wire, n_bytes = of_gradients(sync.first_wire), travelling_bytes(self.model)
        if wire != "float32":
            n_bytes = encoded_bytes(travelling_values(self.model), wire)
        n_bytes = plane.broadcast_object(n_bytes)
        seconds = measure_sum(plane, n_bytes, self.config.run.timeout_seconds, self._device)
        version = self._progress.version if self._progress else 0
        return begun_behind(sync, settings, plane.broadcast_object(seconds / slice_seconds), version)

    def _make_terms(self, shares: tuple[int, ...], settings: Settings, begun: RoundsChange | None) -> Terms:
        run, progress = self.config.run, self._progress
        rests: dict[str, Marks] = {CHECKPOINT: self._checkpoints}
        if self.prepared.interval_samples is not None:
            rests[EPOCH] = marks_every(self.prepared.interval_samples, self.total)
        rests |= {f"{CALL} {number}": marks for number, (_, marks) in enumerate(self._calls)}
        return Terms(
            batch_size=self.config.data.batch_size,
            total_samples=self.total,
            ranks=self.profiles,
            milestones=rests_for(rests, self.total),
            seed=run.seed,
            applied=progress.samples_applied if progress else self.prepared.first_sample,
            version=progress.version if progress else 0,
            shares=shares,
            settings=settings,
            begun=begun,
            evaluations=marks_every(self.prepared.evaluation[0] if self.prepared.evaluation else None, self.total),
            entry=None if self._welcome is None else self._welcome.entry,
        )

    def _start_control(self) -> ControlFactory | None:
        at, config = self.at, self.config
        if config.control.name == "fixed" or self.finished:
            return None
        if at.folder is None or not self._is_measured:
            raise UserError(
                f"control.name is {config.control.name}, which needs a run folder and the ranks' speeds: give"
                " hetsync.join a run, and job.measure the loss"
            )
        log = at.folder / "control.log"

        def process() -> ControlProcess:
            return ControlProcess(config.control, config.run.seed, config.data.batch_size, log)

        # The first rank's is to be ready by the first window; elsewhere there is one only once that rank has died.
        begun = process() if self.plane.leads else None
        parts = self.prepared.parts
        return control_factory(lambda: begun or process(), self.profiles, parts.optimizers[0], parts.factor(0))

    def _asked_to_stop(self) -> None:
        """In a signal handler."""
        session, folder = self.session, self.at.folder
        if session.under_way:
            words = of_a_death(session.engine.processes, self.plane.rank, folder, self._shown.resume_by)
            if words is not None:
                complain(words)
        session.request_stop()

    def open(self, stop: StopSignal | None) -> None:
        """Training is about to begin: from now on signals save and stop, and there is something on disk."""
        at, self.is_open = self.at, True
        if self.assignment is not None and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # from now on it is training's
        if stop is not None:
            stop.listen(self._asked_to_stop)
        if at.folder is not None:
            before = (lambda: None) if self._injection is None else self._injection.checkpoint
            self._saver = Saver(self.session, at.folder, self.config.run, self._seconds_before, before)
            if self.plane.leads:
                write_atomically(at.folder / SUMMARY, json.dumps(first_summary(self._figures.job()), indent=1))
            self._saver.start_timer()
        if self.plane.leads:
            self._lead()
        if at.folder is not None:
            self.telling.say(f"the run folder is {at.folder}")
        self._record_profile()
        if self.plane.size > 1:
            self.telling.say(self.plane.described)
        self.telling.ranks()
        if self.session.terms.begun is not None:
            self.telling.say(self.session.terms.begun.sentence)
        if self.assignment is not None:
            self.telling.say(predicted(self.assignment))

    def _lead(self) -> None:
        """The first rank tells and tracks."""
        coordinator = self.session.coordinator
        assert coordinator is not None
        self._leading = True
        self.telling.begin(self._shown.shows)
        if self._replacements is not None and self.plane.asked_at is not None and self.at.folder is not None:
            self._held.enter_context(posted(self.at.folder, self.plane.asked_at))
        trackers = trackers_of(self._shown.track, self.at.folder, coordinator.machine.ledger.applied)
        if trackers:
            self.telling.tracking = Tracking(trackers, self.session, self._device, self._seconds_before)

    def _succeed(self) -> None:
        """Once all ranks before this one have died it is the first, and holds the run folder."""
        if self._leading or self.session.coordinator is None:
            return
        if self.at.folder is not None:
            self._held.enter_context(taken_over(self.at.folder))
        self.telling.leave_to_others()
        self._lead()
        if self._saver is not None:
            self._saver.start_timer()

    def _record_profile(self) -> None:
        """In telemetry: who looks on while the job runs has no summary yet."""
        rank, settings = self.plane.rank, self.session.settings
        profile = self.profiles[rank]
        self.telemetry.record(
            "profile",
            host=profile.host,
            device=profile.device,
            share=self.session.shares[rank],
            solo_samples_per_second=self.telling.solo_of(rank),
            solo_uncertainty=profile.uncertainty,
            samples_applied=self.session.applied,
            delay_bound=None if settings.delay_bound == NO_BOUND else settings.delay_bound,
            accumulation=settings.accumulation,
        )

    # While training runs.

    @property
    def saved(self) -> bool:
        """Has this process written a checkpoint?"""
        return self._saver is not None and self._saver.saved

    def between_batches(self) -> None:
        self._succeed()
        if self._replacements is not None and self._replacements.wants_rest():
            self.session.request_rest(JOIN)
        self._take_evaluations()
        self.telling.between_batches()

    def _take_evaluations(self) -> None:
        for applied, seconds, metrics in self.evaluations.take():
            self.telling.evaluation(applied, self._seconds_before, seconds, metrics)

    # At rest.

    def check_steps(self) -> None:
        """Collective, after each loop over batches. UserError where batches have come, and nobody has stepped on
        any."""
        tasks, seen = self.session.tasks, self.session.totals.samples
        told = self.plane.gather_objects((seen - self._samples_checked, tasks.was_stepped, tasks.has_learned))
        samples, stepped, learned = map(sum, zip(*told, strict=True))
        if samples and not stepped:
            raise UserError(
                f"no optimizer has made a step on {samples} samples of a loop over the job's batches: call job.step (or"
                " optimizer.step) after backward, prepare all optimizers before the first loop, and loop over a plain"
                " DataLoader for anything but training (accuracy, update_bn, a list of batches)"
            )
        tasks.was_stepped, self._samples_checked = False, seen
        if samples and not learned:
            raise UserError(
                f"no loss of {samples} samples had anything to learn: each needed no gradient (as of a model under"
                " torch.no_grad), or was a mean over a weight of 0 units: look at the model, and at labels and masks"
            )

    def rest(self, rest: AtRest, standing: Standing) -> None:
        """Collective: save and evaluate where that is due."""
        session = self.session
        self._succeed()
        if rest.reason == ROLLBACK:
            self._go_back()
            return
        self._share_scale()
        self._take_evaluations()
        over = rest.final or session.stopping
        marked = self._checkpoints(session.applied - 1) == session.applied
        if over or marked or rest.reason in (CHECKPOINT, JOIN):
            self._save(standing, last=over)  # before an evaluation, which may fail
            self._saved_last = over
        if rest.evaluation_due and self.prepared.evaluation is not None:
            mine, gather = self.evaluations.score(session.shares), self.plane.gather_objects
            parts = by_rank(self.plane.members, gather(mine))
            (result,) = self.evaluations.agreed_result(parts, self.prepared.evaluation[2], mine, gather)
            self.evaluated(named(result))
        if rest.reason == JOIN and not over and self._replacements is not None:
            self._admit()

    def call(self, reason: str) -> None:
        """Collective, at a rest within the loop: what the script wants to do there, where it is due."""
        applied = self.session.applied
        for function, marks in self._calls:
            if reason == CALL or marks(applied - 1) == applied:
                function()

    def _go_back(self) -> None:
        """Collective: to the newest checkpoint."""
        every = self.prepared.interval_samples
        epoch_from = 0 if every is None else self.looped_from // every * every
        hosts = [profile.host for profile in self.profiles]
        loaded, rollback = self._rollbacks.decide(self.plane, self.session, hosts, epoch_from, self._kept)
        if rollback is not None and self.plane.leads:
            self.telemetry.record("rollback", **asdict(rollback))
            self.telling.rollback(rollback)
        checkpoint.restore(loaded, self.model, self.prepared.parts.optimizers)
        self.prepared.parts.restore(loaded.state, loaded.progress.samples_applied)
        velocity = None if loaded.outer is None else loaded.outer.to(self._device)
        self.session.go_back(loaded.progress.samples_applied, velocity)

    def _keep_copy(self) -> None:
        """Delayed training goes on from here: where it is lost, all go back to what they hold now, if it is finite."""
        if not all(weight.isfinite().all() for weight in self.model.parameters() if weight.requires_grad):
            return
        session, parts = self.session, self.prepared.parts
        progress, state = progress_of(session, self._seconds_before), parts.state(session.tasks.tensors.frozen)
        velocity = None if session.outer is None else session.outer.velocity
        hosts = [process.host for process in session.engine.processes.values()]
        ranks_here = hosts.count(session.engine.processes[self.plane.rank].host)
        copy = copied(progress, self.model, parts.optimizers, velocity, state, ranks_here)
        on_all = all(session.meet("whether there is a copy in memory", copy is not None))
        self._kept.keep(copy if on_all else None, session.good)
        if not on_all and self.plane.leads and not self._told_of_no_copy:
            self._told_of_no_copy = True
            self.telling.say(NO_COPY)

    def break_off_rest(self) -> None:
        """A rank has died, and the rest begins anew."""
        self._saved_last = False

    def _share_scale(self) -> None:
        """Collective. Ranks that have stepped on their own, or have missed a step for want of samples, have scales of
        their own: the lowest is one that none has found too high."""
        scaler = self.prepared.parts.scaler
        if scaler is not None and scaler.is_enabled():
            states = self.plane.gather_objects(scaler.state_dict())
            lowest = min(states, key=lambda state: (state["scale"], state["_growth_tracker"]))
            if lowest["scale"] < LOWEST_SCALE:
                raise UserError(
                    f"the scale of gradients has fallen to {lowest['scale']:.0e}, since step after step was infinite or"
                    " nan: lower the learning rate, look at the data, or take bfloat16"
                )
            scaler.load_state_dict(lowest)

    def _save(self, standing: Standing, last: bool) -> None:
        if self._saver is not None:
            frozen = self.session.tasks.tensors.frozen
            order = self.source.order(self.config.run.seed)
            self._saver.save(lambda: {**self.prepared.parts.state(frozen), **standing.state(), "order": order}, last)
            self.telling.call_back("checkpoint", self.session.applied)
        else:
            self.session.require_finite()

    def found_by_all(self, function: Callable[[], Any], combine: Combine | None) -> Any:
        """Collective, at rest: what an evaluation finds; once more where a rank has died before its part was known."""
        evaluations, meet_at = self.evaluations, partial(self.session.meet, "job.evaluate")
        while True:
            members = self.plane.members
            mine = evaluations.part_of(function, self.session.shares_left)
            told = meet_at((members, mine))
            if all(len(theirs) == len(told) for theirs, _ in told):
                parts = by_rank(members, [part for _, part in told])
                for result in evaluations.agreed_result(parts, combine, mine, meet_at):
                    return result

    def _evaluate_at_end(self) -> None:
        """Collective, where the script has ended training at a rest: what is evaluated beside it is so at its end."""
        if self.prepared.evaluation is None or not self.session.engine.started:
            return
        every, function, combine = self.prepared.evaluation
        if not every or self.session.applied % every:
            self.evaluated(named(self.found_by_all(function, combine)))

    def evaluated(self, metrics: dict[str, float]) -> None:
        """At rest, with the same metrics on all ranks."""
        self.evaluations.metrics = metrics
        if self.plane.leads:
            seconds = self.session.totals.train_seconds
            self.telling.evaluation(self.session.applied, self._seconds_before, seconds, metrics)

    # Leaving, and the end.

    def _leaving(self) -> Iterator[AtRest]:
        yield from self.session.leave()

    def close(self, stage: Stage, has_left: bool) -> None:
        """Collective, at rest: the end of training, and its summary."""
        session, at = self.session, self.at
        before_all = session.applied < self.total and not session.stopping
        # By all ranks, at a rest; or the script has only evaluated.
        ended = before_all and (has_left or stage is Stage.OVER)
        if before_all and not self._saved_last:
            self._save(Standing(ended, stage is Stage.LINES_DUE), last=True)
        if before_all and stage is not Stage.OVER:
            self._evaluate_at_end()
        session.meet(THE_END)
        waiting = []
        if self.config.fault.inject:  # a rank that has joined may have none left
            waiting = self.plane.gather_objects([] if self._injection is None else self._injection.never_struck())
        if self._saver is not None:
            self._saver.stop_timer()
        self._succeed()
        self.telling.losses()
        figures = self._figures.run()
        if self.telling.tracking is not None:
            self.telling.tracking.log_figures()
        session.close()
        if self.telling.tracking is not None:
            self.telling.tracking.close()  # it may take long, and ranks that have ended give no sign of life
        summary = summarise(figures) if figures is not None else None
        if summary is not None and at.folder is not None:
            write_atomically(at.folder / SUMMARY, json.dumps(summary, indent=1))
        self.telling.display.close(summary)
        if figures is not None and figures.plan is not None and figures.plan.measured_step_seconds is not None:
            assert self.assignment is not None
            self.telling.say(compared(self.assignment, figures.plan.measured_step_seconds))
        if session.stopping and at.folder is not None:
            self.telling.say(f"stopped and saved; go on with: {self._shown.resume_by.format(at.folder)}")
        elif ended:
            of_all = "" if self.told is None else f" of {self.told:,}"
            self.telling.say(
                f"training ended after {session.applied:,}{of_all} samples, as all ranks left their loops or called"
                f" job.stop{'' if session.settings.synchronous else COUNTED}"
            )
        if summary is not None:
            self.telling.call_back("end", summary)
        self._held.close()
        if self.config.fault.inject and self.plane.leads:  # whose word ends the others
            require_struck(
                self.config.fault.injected(), [each for some in waiting for each in some], self.plane.members
            )
        if self._replacements is not None and self.plane.leads:
            write_status(self.status)

    def failed(self, failure: BaseException) -> None:
        """The job is about to end by this."""
        error = one_sentence(f"{type(failure).__name__}: {failure}")
        self.telemetry.record("failure", error=error)
        self.telemetry.close()
        self.telling.display.failed(error)

    def give_up(self, failure: BaseException, release: bool) -> None:
        """The job has failed by this; with `release` the model may be trained in another."""
        if self._saver is not None:
            self._saver.stop_timer()
        if self.is_open and self.at.folder is not None and not self._may_go_on_elsewhere(failure):
            mark_failed(self.at.folder)
        self.telling.display.close(None)
        self._held.close()
        if release:
            self.session.release()

    def _may_go_on_elsewhere(self, failure: BaseException) -> bool:
        """May ranks that this one does not reach live, and go on? Then the summary is theirs."""
        if (
            not self.plane.tolerant
            or not self.plane.outlives_first
            or not isinstance(failure, LostError | LateError | StalledError)
        ):
            return False
        return isinstance(failure, CutOffError) or not self._leading
