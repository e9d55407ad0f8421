"""A rank's part in a job: batches come, and between them moments at which all ranks are at rest.

    for item in session.course():
        if isinstance(item, AtRest):
            session.at_rest(work)
        else:
            ...  # backward on this batch, and the optimizers' steps

`loop.py` makes of it what a script's loop sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from hetsync.balance.device import Device
from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares
from hetsync.balance.speed_tracker import Speeds
from hetsync.config.schema import FaultConfig, SyncConfig
from hetsync.data.ledger import Ledger, Span, common
from hetsync.data.loader import Loader, Source
from hetsync.data.random_state import RankSeeds, seed_all
from hetsync.errors import UserError
from hetsync.plane.base import MembersLost, Plane
from hetsync.plane.numbered import NumberedPlane
from hetsync.processes import Process, Stacks
from hetsync.sync.coordinator import Coordinator, Deliver, Send, as_messages
from hetsync.sync.delay_guard import DelayGuard, Lost
from hetsync.sync.deltas import Snapshot, make_outer
from hetsync.sync.engine import Engine
from hetsync.sync.group_state import Settings as OptimizerSettings
from hetsync.sync.group_state import require_same_settings
from hetsync.sync.lost_books import Tally
from hetsync.sync.messages import (
    DrainRequested,
    Evaluated,
    Settings,
    SettingsChanged,
    StartRound,
    Task,
    TaskLeftOut,
    settings_of,
)
from hetsync.sync.milestones import ROLLBACK, STOP, TOO_FEW, Evaluation
from hetsync.sync.model_tensors import ModelTensors, all_trained
from hetsync.sync.optimizers import loses_by_delay
from hetsync.sync.rates import require_same_schedulers
from hetsync.sync.reals import reals, summed_in
from hetsync.sync.recovery import Books, Damage, Death, Decision, Report, first_standing, keepers, rebuilt
from hetsync.sync.rounds import Around
from hetsync.sync.rounds_rule import RoundsChange, rule_for
from hetsync.sync.shared_state import EngineOptions
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.sync.tail import trained_values
from hetsync.telemetry import Telemetry
from hetsync.train.accounts import RankTotals, TaskInWork, TrainingClock, Unstepped
from hetsync.train.meetings import Meetings
from hetsync.train.memory import SliceMemory
from hetsync.train.rest import CommonState, HeldAtRest, not_finite
from hetsync.train.tasks import TaskRunner, Trained
from hetsync.train.terms import ControlFactory, ControlledJob, Entry, JobControl, NoEvaluation, Scorer, Terms

MOST_NAMED = 32  # samples in a sentence


@dataclass(frozen=True)
class AtRest:
    """All ranks have come to rest, with the same weights."""

    reason: str
    final: bool
    evaluation_due: bool


def counted_out(rank: int, applied: int) -> UserError:
    """Of a loop that has left the job so, and is not meant to."""
    return UserError(
        f"after {applied:,} samples the loop on rank {rank} stopped at as many batches as len(loader) tells (by"
        " next, zip, islice or a count), but with delay a rank has as many as it has time for: loop over the loader"
        " itself (for batch in loader), or set sync.delay_bound to 0 (hetsync.join(delay_bound=0))"
    )


class Ready(NamedTuple):
    """What a rank tells before it goes on after a rest. `ending`: its loop has ended. `current`: it trains the same
    tensors as before. `settings`: of each optimizer. `schedulers`: settings of each. `changed`: the script has changed
    weights or buffers. `seed`: one that it has set at the rest. `counted_out`: it asks for another epoch, and had more
    batches in the last one than the loader's length, at which its loop has stopped."""

    rank: int
    ending: bool
    counted_out: bool
    current: bool
    rates: list[list[float]]
    settings: list[OptimizerSettings]
    schedulers: list[dict[str, str]]
    changed: bool
    seed: int | None
    process: Process


class Session:
    def __init__(
        self,
        *,
        plane: Plane,
        trained: Trained,
        source: Source,
        sync: SyncConfig,
        terms: Terms,
        device: Device,
        telemetry: Telemetry | None = None,
        timeout_seconds: float = 600.0,
        make_control: ControlFactory | None = None,
        scorer: Scorer | None = None,
        memory: SliceMemory | None = None,
        around: Around = lambda start, steps: steps,
        fault: FaultConfig | None = None,
        goes_back: bool = False,
        keep_copy: Callable[[], None] | None = None,
    ) -> None:
        """Collective. The model's weights may differ between ranks: all start from rank 0's.

        What the first rank's `make_control` makes may change the settings while the job runs; the session closes it.
        After a death another rank may be the first, and makes its own. `around`
        is given the steps of each round. `fault`: what becomes of deaths, of gradients that are not finite, and of
        ranks that are silent or slow; None ends the job. `goes_back`: where nobody is left who kept the books, all come
        to a rest for that, and `go_back` to a checkpoint is called there; otherwise the job ends.
        `keep_copy`: called on every rank before delayed training goes on after a rest, where the delay bound is by
        rule; where delay has lost training all come to a rest to go back to what was kept. Without it the job ends.
        """
        self.plane = plane = NumberedPlane(plane)
        self.model = trained.model
        self.optimizers = list(trained.optimizers)
        self._shared_before = trained.shared
        self._constraints = trained.constraints
        self.terms = terms
        self.totals = RankTotals()
        self.control: JobControl | None = None  # on the first rank, where there is one
        self.rounds_changes: list[RoundsChange] = []  # by rule, on rank 0; how the job has begun on all
        self.deaths: list[tuple[Death, float]] = []  # and the seconds of training before each
        self.damages: list[Damage] = []  # of messages, that all have gone on after
        self.outer = make_outer(sync, terms.batch_size)
        self._sync = sync
        self._keep_copy = keep_copy if sync.delay_bound == "auto" else None
        self._begin_at()
        self._device = device
        self._make_control = make_control
        self._around = around
        self._fault = fault or FaultConfig(silent_seconds=None)
        self._skips = self._fault.not_finite != "stop"
        self._tally = Tally(self.settings, terms.evaluations, terms.applied) if goes_back else None
        self._check_skipping()
        self._scorer = scorer or NoEvaluation()
        self._telemetry = telemetry or Telemetry(None)
        self._clock = TrainingClock()
        self._loader = Loader(source, terms.seed, next(self.model.parameters()).device, timeout_seconds)
        self.engine = self._make_engine(timeout_seconds)
        self.tasks = TaskRunner(
            trained=trained,
            batch_size=terms.batch_size,
            ranks=self.plane.ranks_at_start,
            device=device,
            loader=self._loader,
            engine=self.engine,
            totals=self.totals,
            record=self.record,
            memory=memory,
            skips=self._skips,
        )
        self._common = CommonState(
            plane,
            self.model,
            self.optimizers,
            trained.averages,
            self.engine,
            [steps.groups for steps in self.tasks.steps],
        )
        self.digests = self._common.digests
        self._stacks: Stacks | None = None  # once slices have begun
        self._held: HeldAtRest | None = None  # since the last rest
        self._seeds = RankSeeds(terms.seed, plane.rank)
        self._snapshot_seconds = 0.0  # of training, when the newest snapshot was made
        self._under_way = False  # slices have begun, and the job has not come to its end
        self._rest_began: float | None = None  # the moment, while all ranks are at rest
        self._again = False  # a rank has died at the rest, and all come to it once more
        self._carrying_out = False  # what is to be done at a rest
        self.counted_out = False  # see `Ready`
        self._meetings = Meetings(plane, None if terms.entry is None else terms.entry.held)

    def _check_skipping(self) -> None:
        in_turn = self._sync.delay_bound in (0, "auto")
        if self._skips and in_turn and len(self.optimizers) > 1:
            raise UserError(
                f"fault.not_finite is {self._fault.not_finite}, but at sync.delay_bound"
                f" {self._sync.delay_bound} the loop has {len(self.optimizers)} optimizers, of which one has stepped"
                " before the other's gradients are known: use stop, or a delay bound of 1 or more"
            )
        weights = list(self.model.parameters())
        kinds = {weight.dtype for weight in weights if reals(weight.detach()).dtype is not summed_in(weights)}
        if self._skips and self._sync.delay_bound != 0 and kinds:
            raise UserError(
                f"fault.not_finite is {self._fault.not_finite}, but weights are {', '.join(map(str, kinds))}, which"
                " with a delay bound of 1 or more cannot be put back exactly: use stop, weights that are all of"
                " float32 or all of float64, or sync.delay_bound 0"
            )

    @property
    def _sync_of_model(self) -> SyncConfig:
        """For the weights that are trained now: a freeze makes them fewer."""
        return self._sync.for_model(trained_values(self.model))

    def _begin_at(self) -> None:
        """What is known at rest, as it is before the first slice."""
        terms = self.terms
        self.settings = terms.settings or settings_of(self._sync_of_model)
        self.shares = terms.shares or choose_shares(self._sync, terms.batch_size, terms.ranks)
        self.applied = terms.applied
        self.version = terms.version
        self.stopping = False
        self.rest_reason = ""
        self.good = 0  # samples applied as losses were good, where delay is guarded
        self.evaluation_due = False

    def _make_engine(self, timeout_seconds: float) -> Engine:
        plane, terms, sync = self.plane, self.terms, self._sync
        return Engine(
            plane,
            self.model,
            EngineOptions(
                batch=terms.batch_size,
                bucket_bytes=sync.bucket_bytes,
                overlap=sync.overlap,
                timeout_seconds=timeout_seconds,
                measure_norms=self._make_control is not None,
                on_host=self._device.on_host,
                least_ranks=self._fault.least_ranks,
                fragments_for=lambda values: sync.for_model(values).most_fragments,
                skips=self._skips,
                guarded=self._keep_copy is not None,
                silent_seconds=self._fault.silent_seconds,
                slow_factor=self._fault.slow_factor if self._fault.slow == "exclude" else None,
            ),
            coordinator=self._make_coordinator,
            books=self._first_books(),
            tally=self._tally,
            outer=self.outer,
            pace=self._device.pace,
            on_task=self._loader.prefetch,
            on_dropped=self._loader.drop,
            on_death=self._on_death,
            on_damage=self._on_damage,
            around=self._around,
            telemetry=self._telemetry,
            version=terms.version,
            stages=lambda: [steps.weights for steps in self.tasks.steps],
            state=lambda: {**self._common.given(), **self.tasks.scale()},
            take_state=self._take_state,
            constraints=self._constraints,
        )

    def _take_state(self, given: Mapping[str, Any]) -> None:
        """In synchronous mode: what another rank's step has made."""
        self._common.take(given)
        self.tasks.take_scale(given)

    def _first_books(self) -> Books | None:
        plane, terms = self.plane, self.terms
        if not plane.tolerant or terms.entry is not None or plane.rank not in keepers(plane.members):
            return None  # who joins is told the books
        standing = first_standing(self.settings, terms.milestones, terms.evaluations, terms.version, terms.applied)
        return Books([standing], [(0, terms.applied)], terms.version)

    def _make_coordinator(self, send: Send) -> Coordinator:
        """On the first rank; where that has died, on the next, with speeds as they were when the job began. Caps that
        were found since are in reports."""
        terms, sync = self.terms, self._sync
        ledger = Ledger(terms.total_samples, terms.applied)
        shares = dict(enumerate(self.shares))
        marks, least = (terms.milestones, terms.version, terms.evaluations), sync.least_slice
        machine = RoundStateMachine(shares, self.settings, ledger, *marks, least)
        caps = {rank: profile.cap for rank, profile in enumerate(terms.ranks)}
        speeds = Speeds({rank: profile.time for rank, profile in enumerate(terms.ranks)}, caps, sync.pins)
        if self._make_control is not None:
            self.control = self._make_control(ControlledJob(machine, self.seconds_training, self._telemetry))
        rebalance = sync.rebalance and sync.shares == "speed"
        several = self.plane.ranks_at_start > 1  # or there will be again, by replacement
        ruled = self.control is None and several
        tolerant = self.plane.tolerant and several
        adaptive = loses_by_delay(self.optimizers)

        def deliver_for(machine: RoundStateMachine) -> Deliver:
            return as_messages(machine, send, keepers(self.plane.members) if tolerant else ())

        def rebuild(
            decision: Decision, reports: Mapping[int, Report], shares: Mapping[int, int]
        ) -> tuple[RoundStateMachine, Deliver]:
            total, milestones = terms.total_samples, terms.milestones
            made = rebuilt(decision, reports, shares, total, milestones, terms.evaluations, least)
            return made, deliver_for(made)

        return Coordinator(
            machine,
            speeds,
            deliver_for(machine),
            rebalance=rebalance,
            control=self.control,
            on_evaluation=self._report,
            rule=rule_for(self._sync_of_model, terms.version, adaptive, terms.begun) if ruled else None,
            on_rounds_change=self._on_rounds_change,
            rebuild=rebuild,
            on_left_out=self._on_left_out,
            goes_back=self._fault.goes_back,
            guard=DelayGuard(terms.batch_size) if ruled and self._keep_copy is not None else None,
            batch=terms.batch_size,
        )

    def _on_rounds_change(self, change: RoundsChange) -> None:
        self.rounds_changes.append(change)
        self.record("rounds_change", **change.told)

    @property
    def left_out(self) -> Sequence[TaskLeftOut]:
        """So far, on the first rank."""
        return () if self.coordinator is None else self.coordinator.left_out

    @property
    def lost(self) -> Sequence[Lost]:
        """On the first rank: each time that delay had lost training."""
        return () if self.coordinator is None else self.coordinator.lost

    @property
    def books_lost(self) -> Sequence[Death]:
        """On the first rank: those that have died as nobody was left who kept the books, the last time."""
        lost_at = None if self.coordinator is None else self.coordinator.lost_at
        return [death for death, _ in self.deaths if death.round == lost_at]

    def _on_left_out(self, left: TaskLeftOut) -> None:
        """In the first rank's communication thread. UserError where samples that go out once more have spoiled
        gradients before."""
        before = [] if self._fault.goes_back else [span for known in self.left_out for span in known.spans]
        if again := common(left.spans, before):
            raise UserError(
                f"gradients were not finite for the second time with these samples of the data set, on rank"
                f" {left.rank} now: {self.named(again)}; look at them, or lower optimizer.learning_rate"
            )
        self.record("left_out", rank=left.rank, round=left.round, samples=left.samples)

    def named(self, spans: Iterable[Span]) -> str:
        """Samples of the data set, for a sentence."""
        found = self._loader.indices(spans)
        return ", ".join(map(str, found[:MOST_NAMED])) + (" and others" if len(found) > MOST_NAMED else "")

    def _on_death(self, death: Death) -> None:
        if any((known.rank, known.round) == (death.rank, death.round) for known, _ in self.deaths):
            return  # before this rank joined
        self.deaths.append((death, self.seconds_training()))
        if self.plane.leads:
            self.record("death", **asdict(death))

    def _on_damage(self, damage: Damage) -> None:
        self.damages.append(damage)
        if self.plane.leads:
            self.record("damage", **asdict(damage))

    @property
    def under_way(self) -> bool:
        """Have slices begun, without their end?"""
        return self._under_way

    @property
    def is_carrying_out(self) -> bool:
        """Is something being done at a rest?"""
        return self._carrying_out

    @property
    def coordinator(self) -> Coordinator | None:
        """On the first rank."""
        return self.engine.coordinator

    def at_rest(self, work: Callable[[], None]) -> bool:
        """Collective: what is to be done at a rest, before training goes on or the loop's own lines come. False where a
        rank has died meanwhile, and the course comes to the same rest once more."""
        self._carrying_out = True
        try:
            work()
            if self.plane.tolerant:
                self.plane.barrier()  # whoever comes out of it knows that all have done their part
        except MembersLost:
            self._again = self.engine.recover()
        else:
            self._again = self.engine.end_rest()
        self._carrying_out = False
        self._under_way |= self._again
        return not self._again

    def require_finite(self) -> None:
        """At rest, where nothing is saved, which would refuse it. Gradients that were finite do not make weights so."""
        if (culprit := not_finite(self.model, {})) is not None:
            raise UserError(
                f"{culprit} is not finite any more after {self.applied} samples: lower the learning rate or look at the"
                " data"
            )

    def begin_loop(self, until: float) -> None:
        """A script's loop over batches begins, and ends at this place in the stream."""
        self._loader.begin_loop(until)

    def course(self) -> Iterator[Any | AtRest]:
        """This rank's batches, and between them the moments at which all ranks are at rest: until the next item is
        asked for, they stay so."""
        self._start()
        for item in self._tasks():
            if isinstance(item, AtRest):
                yield item
            else:
                yield from self.tasks.slices(item)

    def _start(self) -> None:
        if self.terms.entry is not None:
            self._join(self.terms.entry)
            return
        if self.terms.begun is not None:  # all know of it, who may be the first one day
            self.rounds_changes.append(self.terms.begun)
            if self.plane.leads:
                self.record("rounds_change", **self.terms.begun.told)
        self.meet("the first batch")
        self._seeds.begin_loop(self.applied)
        self._constraints.check(self.model)
        self.engine.order.wait()  # for what the script has queued before, on whatever stream
        plane = self.plane
        self._share_weights(lambda make: plane.gather_objects(make()), lambda make: plane.broadcast_object(make()))
        self._stacks = Stacks()
        told = self.plane.gather_objects(self._stacks.process)
        with all_trained(self._shared_before):
            self.tasks.renew_tensors()  # as the engine finds them
            self.engine.start(dict(zip(self.plane.members, told, strict=True)))
        self._under_way = True
        self._clock.start()
        for steps in self.tasks.steps:
            steps.start()
        if self._keep_copy is not None and not self.settings.synchronous:
            self._keep_copy()

    def _share_weights(
        self, gather: Callable[[Callable[[], Any]], list[Any]], share: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Those that all begin from. In delayed mode they are within the constraints, or each rank's first step would
        bring them there, and all of these were merged; at D = 0, and alone, a loop's first step does, as in one
        process."""
        self._common.share_first_weights(gather, share)
        if not self.settings.synchronous and self.plane.ranks_at_start > 1:
            self._constraints.project()

    def _join(self, entry: Entry) -> None:
        """Come to the others, who are at rest, and go on with them."""
        self._common.remember_counters()
        self._stacks = Stacks()
        for steps in self.tasks.steps:
            steps.start()
            steps.show_owner(self.applied)
        with all_trained(self._shared_before):
            self.tasks.renew_tensors()  # as the engine finds them
            self.at_rest(lambda: self.engine.join(entry.travel))
        self._under_way = True
        self._go_on()

    def admit(self, rank: int, profile: RankProfile, address: str) -> None:
        """Collective, and the last that is done at a rest: another process joins as this rank, which has gone."""
        ranks = list(self.terms.ranks)
        ranks[rank] = profile
        self.terms = replace(self.terms, ranks=ranks)
        if self.coordinator is not None:
            self.coordinator.speeds.join(rank, profile.time, profile.cap)
        self.engine.admit(lambda: self.plane.admit(rank, address))

    @property
    def entry(self) -> Entry:
        """For a rank that joins at this rest."""
        return Entry(self.engine.travel, self._meetings.held)

    def _tasks(self) -> Iterator[Task | AtRest]:
        """Work until the job ends, with rests between; evaluations beside."""
        while True:
            work = self.engine.next_work()
            if isinstance(work, Task):
                yield work
            elif isinstance(work, Snapshot):
                self._score(work)
            else:
                self._rest_began = self._stop_clock()
                try:
                    self._come_to_rest(work)
                except MembersLost:
                    self.engine.recover()
                    continue
                self._under_way = not (work.final or self.stopping)
                yield AtRest(self.rest_reason, work.final, self.evaluation_due)
                if self._again:
                    self._again, self._under_way = False, True
                    continue
                if not self._under_way or not self._go_on():
                    return

    def meet(self, what: str, value: Any = None, make: Callable[[], Any] | None = None) -> list[Any]:
        """Collective, at rest; see `hetsync.plane.base.meet`. Where a rank dies meanwhile the others meet once more,
        with what `make` makes by then, if it is given."""
        while True:
            try:
                return self._meetings.hold(what, value if make is None else make())
            except MembersLost:
                if self._carrying_out or not self.engine.started:
                    raise
                self.engine.recover()

    def _go_on(self, ending: bool = False) -> bool:
        """Collective: training begins anew after a rest, with what was set meanwhile; False where all ranks are
        `ending` it."""
        assert self._stacks is not None
        rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        moved = not self.engine.holds_anchor
        changed = moved or (self._held is not None and self._held.changed())
        if self._constraints and moved:
            self._constraints.project()
        mine = Ready(
            self.plane.rank,
            ending,
            self.counted_out,
            self.tasks.tensors.is_current(),
            rates,
            [steps.groups.settings() for steps in self.tasks.steps],
            [scheduler for steps in self.tasks.steps for scheduler in steps.rates.settings()],
            changed,
            self._seeds.by_script(),
            self._stacks.process,
        )
        told: list[Ready] = self.meet("the next batch or the end of training", mine)
        self._end_rest()
        if all(theirs.ending for theirs in told):
            self._under_way = False
            return False
        for theirs in told:
            if theirs.counted_out:
                raise counted_out(theirs.rank, self.applied)
        if not all(theirs.current for theirs in told):
            self._renew()
        if any(theirs.rates != rates for theirs in told):
            raise UserError(
                f"learning rates are {', '.join(f'{theirs.rates} on rank {theirs.rank}' for theirs in told)}:"
                " change them, or step their schedulers, on all ranks alike"
            )
        require_same_settings({theirs.rank: theirs.settings for theirs in told})
        require_same_schedulers({theirs.rank: theirs.schedulers for theirs in told})
        if any(theirs.changed for theirs in told):
            self._take_over_changes()
        self.engine.processes = {theirs.rank: theirs.process for theirs in told}
        self.tasks.tensors.begin()
        for steps in self.tasks.steps:
            steps.start()
        if self._keep_copy is not None and not self.settings.synchronous:
            self._keep_copy()
        self._seeds.begin_loop(self.applied, told[0].seed, self.plane.size == 1)
        self._clock.start()
        return True

    def _take_over_changes(self) -> None:
        """What the script has made of weights and buffers at rest is what all go on from."""
        told = self.meet("what was changed at rest", (self._held or self._held_now()).sha256())
        first, *_ = members = self.plane.members
        odd = [rank for rank, digest in zip(members, told, strict=True) if digest != told[0]]
        if odd:
            raise UserError(
                f"weights or buffers were changed at rest, and ranks {odd} have others than rank {first} now: change"
                " them on all ranks alike"
            )
        self.engine.adopt_weights()

    def _end_rest(self) -> None:
        if self._rest_began is not None:
            seconds = time.monotonic() - self._rest_began
            self.record("rest", reason=self.rest_reason, seconds=round(seconds, 6))
            self._rest_began = None

    def _renew(self) -> None:
        """Other tensors are trained from now on."""
        if self.outer is not None and self.outer.velocity is not None:
            raise UserError(
                "what is trained has changed, and sync.outer nesterov has a momentum of what was trained before:"
                " take sync.outer identity"
            )
        layouts = self.meet("a change of what is trained", ModelTensors(self.model, self.optimizers).layout)
        if any(layout != layouts[0] for layout in layouts):
            first, *_ = members = self.plane.members
            odd = [rank for rank, layout in zip(members, layouts, strict=True) if layout != layouts[0]]
            raise UserError(
                f"ranks {odd} train other weights than rank {first}: freeze, unfreeze and add weights on all ranks"
                " alike"
            )
        if not any(weight.requires_grad for weight in self.model.parameters()):
            raise UserError(
                "no weight requires a gradient any more: leave some unfrozen, or end training by job.stop()"
            )
        meet = partial(self.meet, "the weights that are trained now")
        self._share_weights(lambda make: meet(make=make), lambda make: meet(make=make)[0])
        self.tasks.renew_tensors()  # as the engine finds them
        self.engine.renew()

    def leave(self) -> Iterator[AtRest]:
        """The loop has ended early. What is computed counts; then this rank takes part in rounds and rests alone."""
        self.tasks.left = True
        if self._rest_began is not None and not self._go_on(ending=True):
            return
        self.tasks.settle()
        begun = self.engine.withdraw()
        self._loader.stop()
        if begun is not None:
            self.tasks.finish(TaskInWork(begun))
        for item in self._tasks():
            if isinstance(item, AtRest):
                yield item
            else:
                self.tasks.finish(TaskInWork(item))

    def _stop_clock(self) -> float:
        """What follows is not training; returns the moment."""
        moment = self._clock.stop()
        self.totals.train_seconds = self._clock.seconds()
        return moment

    def _score(self, snapshot: Snapshot) -> None:
        """This rank's part of an evaluation, between two tasks."""
        began = self._stop_clock()
        self._snapshot_seconds = self.totals.train_seconds - (began - snapshot.made_at)
        with self.engine.showing(snapshot), torch.random.fork_rng(devices=[]):
            sums = self._scorer.score(self.shares_left)
        ended = self._clock.start()
        self.record("score", round=snapshot.round, seconds=round(ended - began, 6))
        self.engine.report(Evaluated(self.plane.rank, snapshot.round, sums))

    @property
    def shares_left(self) -> tuple[int, ...]:
        """Those of ranks that have gone are 0."""
        members = self.plane.members
        return tuple(share if rank in members else 0 for rank, share in enumerate(self.shares))

    def _report(self, evaluation: Evaluation) -> None:
        self._scorer.report(evaluation, self._snapshot_seconds)

    def record(self, kind: str, **fields: Any) -> None:
        """One line of this rank's telemetry."""
        self._telemetry.record(kind, **fields)

    def seconds_training(self) -> float:
        """Seconds from the first slice on, less those at rest."""
        return self._clock.seconds()

    def tune(self, settings: Settings) -> None:
        """On any rank: new K, D and q for the work handed out from now on. All else stays as it is, and no rule
        changes anything any more (the controller's handle)."""
        self.engine.report(SettingsChanged(settings))

    # At rest.

    def request_stop(self) -> None:
        """Come to rest as soon as possible and end `course` there; a resume goes on from that point.

        May be called from a signal handler.
        """
        self.engine.report_from_signal(DrainRequested(STOP))

    def request_rest(self, reason: str) -> None:
        """Come to rest as soon as possible, and go on; from any thread."""
        self.engine.report(DrainRequested(reason))

    def go_back(self, applied: int, velocity: torch.Tensor | None) -> None:
        """At a rest for that, on every rank, where model, optimizers and what else is trained are as in a checkpoint of
        so many samples, and the outer optimizer's `velocity` is: training goes on from there. MembersLost where a rank
        has died meanwhile."""
        self.applied = applied
        self.model.zero_grad(set_to_none=True)  # a loop may add to what it finds
        self.tasks.unstepped = Unstepped()
        if self.outer is not None:
            self.outer.velocity = velocity
        self._common.remember_counters()
        for steps in self.tasks.steps:
            steps.show_owner(applied)
        with all_trained(self.tasks.tensors.shared):
            self.tasks.renew_tensors()  # as the engine finds them
            self.engine.go_back(applied)

    def _come_to_rest(self, drained: StartRound) -> None:
        self.tasks.tensors.check()
        self.version = drained.number + 1
        self.stopping = drained.drain in (STOP, TOO_FEW)
        self.rest_reason = drained.drain or ""
        self.evaluation_due = drained.evaluate or drained.final
        told = self.plane.broadcast_object(self._booked())
        self.applied, self.settings, self.shares, self.good = told
        if self._tally is not None:
            self._tally.settings = self.settings
        going_back = drained.drain == ROLLBACK  # what they have is thrown away, and some may have done so
        for steps in self.tasks.steps:
            if not going_back:
                steps.rates.agree(self.plane.gather_objects)
            steps.show_owner(self.applied)
        if not going_back:
            self._agree(drained)
        self.totals.since_rest = self.totals.loop_steps = 0

    def _agree(self, drained: StartRound) -> None:
        if not drained.synchronous:
            self._common.average(self.totals.since_rest)
        else:
            self._common.even_averages_out(self.totals.since_rest, self.totals.loop_steps)
        velocity = self.outer.velocity if self.outer is not None else None
        totals = self.totals
        self._common.agree(velocity, self.version, totals.loop_steps, totals.since_rest)
        self._held = self._held_now()
        self.begin_lines()

    def _held_now(self) -> HeldAtRest:
        return HeldAtRest(self.model, self.digests)

    def _booked(self) -> tuple[int, Settings, tuple[int, ...], int] | None:
        """Samples applied, settings, shares, and samples applied as losses were good, on the first rank."""
        if self.coordinator is None:
            return None
        machine = self.coordinator.machine
        # Those of ranks whose loops have ended are 0 now, and are no measure of their speed.
        if any(member.withdrawn for member in machine.members.values()):
            shares = self.shares_left
        else:
            shares = tuple(machine.members[n].share if n in machine.members else 0 for n in range(len(self.shares)))
        return machine.ledger.applied, machine.settings, shares, self.coordinator.good

    def begin_lines(self) -> None:
        """The script's lines come, at a rest."""
        self._seeds.begin_rest(self.applied)

    def close(self) -> None:
        """Collective at a regular end; where the loop was left early, once all ranks are at their end."""
        if self._under_way:
            for _ in self.leave():
                pass
        self.release()

    def release(self) -> None:
        """The end, regular or not: nothing of this job runs on, and nobody is waited for. The process draws from the
        job's seed again, and no longer from this rank's, which a later job would take for the script's."""
        seed_all(self.terms.seed)
        self._end_rest()
        self.engine.stop()
        if self._stacks is not None:
            self._stacks.close()
        for steps in self.tasks.steps:
            steps.close(self.applied)
        if self.control is not None:
            self.control.close()
        self._loader.close()
        self._telemetry.close()
