"""Carries the state machine's instructions out on one rank: the main thread's side.

The main thread asks for work (`next_work`), computes, and hands over (`finish`); meanwhile the communication thread
(`communicator.py`) joins the rounds. What both touch, and under which lock, stands in `shared_state.py`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch

from hetsync.data.ledger import Span
from hetsync.plane.base import MembersLost, Plane, StalledError
from hetsync.processes import Process
from hetsync.sync.communicator import Communicator
from hetsync.sync.constraints import NO_CONSTRAINTS, Constraints
from hetsync.sync.coordinator import Coordinator, Send
from hetsync.sync.deltas import Nesterov, Snapshot, Stepped
from hetsync.sync.device_order import DeviceOrder, device_order
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.gradients import Gradients
from hetsync.sync.log import Applied, Began, Closed, Finished, Followers
from hetsync.sync.lone import LoneGradients
from hetsync.sync.loop_report import STEPS, LoopReport
from hetsync.sync.lost_books import Tally
from hetsync.sync.messages import CapFound, Evaluated, Event, StartRound, Task, TaskSpoiled, WentBack
from hetsync.sync.overhead import MainThreadTimer, Overhead
from hetsync.sync.polling import SHORTEST_POLL_SECONDS
from hetsync.sync.recovery import Books, Damage, Death, spans_of
from hetsync.sync.rounds import Around
from hetsync.sync.router import Router
from hetsync.sync.segmented import Segment, SegmentedDeltas
from hetsync.sync.shared_state import EngineOptions, MainThread, Phase, SharedState, SumRequest
from hetsync.sync.steps import require_finite
from hetsync.sync.tail import added_buffers, shared_buffers
from hetsync.sync.units import Count
from hetsync.sync.worker import Worker
from hetsync.telemetry import Telemetry

LONGEST_PATIENCE = 4  # rounds: staler contributions cost progress
NOBODY: Mapping[int, Process] = MappingProxyType({})


class Engine:
    def __init__(
        self,
        plane: Plane,
        model: torch.nn.Module,
        options: EngineOptions,
        *,
        coordinator: Callable[[Send], Coordinator] | None = None,
        books: Books | None = None,
        tally: Tally | None = None,
        outer: Nesterov | None = None,
        pace: Callable[[float], None] = lambda fraction: None,
        on_task: Callable[[Task], None] = lambda task: None,
        on_dropped: Callable[[Task], None] = lambda task: None,
        on_death: Callable[[Death], None] = lambda death: None,
        on_damage: Callable[[Damage], None] = lambda damage: None,
        around: Around = lambda start, steps: steps,
        telemetry: Telemetry | None = None,
        version: int = 0,
        stages: Callable[[], Sequence[Sequence[torch.nn.Parameter]]] = lambda: (),
        state: Callable[[], Mapping[str, Any]] = lambda: {},
        take_state: Callable[[Mapping[str, Any]], None] = lambda state: None,
        segments: Sequence[Segment] | None = None,
        followers: Followers | None = None,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        """`coordinator` makes that of the first member: rank 0's, and another's once those below it have died. `books`:
        those of a keeper (`recovery.py`); `tally`, where all can go back to a checkpoint once nobody is left who kept
        any. `on_task` is called with each task as soon as it is known (to load its data),
        from the communication thread, and `on_dropped` with those that are not to be computed after all, as another
        rank has died (`on_death` tells of that) or a message was not what it should be (`on_damage`). `around` is given
        the steps of each round. `stages` tells the parameters of each optimizer, in the order of their steps. `state`
        tells all that these have made, for a rank that is behind at a death and takes it over by `take_state`. Of a
        replica on several ranks the engine is its leader's, with the `segments` that this rank holds (it may be none),
        for delayed mode only. In delayed mode the anchor is within the `constraints`."""
        self.worker = Worker(plane.rank, version)
        self.timer = MainThreadTimer()
        router = Router(plane)

        def succeed() -> Coordinator:
            assert coordinator is not None
            return coordinator(router.send_instructions)

        self._plane = plane
        self._options = options
        self._model = model
        self._pace = pace
        self._stages = stages
        self._take_state = take_state
        self._recoveries = 0  # that the main thread knows of
        one = plane.size == 1
        alone = one and not options.measure_norms
        counted = plane.ranks_at_start if plane.tolerant and not alone else 0
        self._shared = SharedState(
            self.worker, outer, options, alone, one, counted, segments, followers, plane.allocate, constraints
        )
        self._shared.order = device_order(next(model.parameters()).device)
        self._delayed_only = segments is not None
        self._communicator = Communicator(
            plane,
            options,
            self._shared,
            router=router,
            coordinator=succeed() if coordinator is not None and plane.leads else None,
            on_task=on_task,
            on_dropped=on_dropped,
            on_death=on_death,
            on_damage=on_damage,
            around=around,
            telemetry=telemetry or Telemetry(None),
            state=state,
            books=books,
            tally=tally,
            succeed=succeed,
        )
        self.look: Callable[[int], None] = lambda stage: None  # called before a loop looks at a stage's gradients
        self._missed_seconds = 0.0  # without a poll, while the main thread waited
        self._overhead = Overhead(self.timer, self.cpu_seconds, options.on_host)  # since a rest

    def start(self, processes: Mapping[int, Process] = NOBODY) -> None:
        """Call once, on every rank, with identical weights: what travels depends on them. `processes` of all ranks."""
        self._communicator.watchdog.processes = processes
        self._take_stock()
        self._shared.order.leave()
        self._communicator.start()

    def join(self, travel: Sequence[int]) -> None:
        """In place of `start`, on a rank that joins the others at their rest, with the weights that they have, and with
        the buffers that travel there. MembersLost where one has died before all had agreed."""
        shared = self._shared
        shared.travel = travel
        self._take_stock()
        self._gradients.tail.travel = list(travel)
        shared.phase = Phase.RESTING
        shared.order.leave()
        shared.admit = lambda: None  # it has entered
        self._communicator.start()
        self._wait_for_agreement()

    def admit(self, admit: Callable[[], None]) -> None:
        """Collective, at rest: another rank joins, by what `admit` does in the communication thread. MembersLost where
        one has died meanwhile, so that the rest begins anew."""
        self._shared.order.leave()
        with self._shared.changed:
            self._check_members()
            self._shared.admit = admit
        self._shared.bell.ring()
        self._wait_for_agreement()

    def _wait_for_recovery(self) -> None:
        """Under the lock: until all have agreed on how to go on."""
        while self._shared.recoveries == self._recoveries:
            self._raise_failure()
            self._wait(self._shared.changed.wait)

    def _wait_for_agreement(self) -> None:
        shared = self._shared
        with shared.changed:
            self._wait_for_recovery()
            if shared.rest_again or shared.recoveries > self._recoveries + 1:
                raise MembersLost("another rank has gone")
            self._heed()

    @property
    def order(self) -> DeviceOrder:
        """Of what this rank's threads, and the script, queue on its device."""
        return self._shared.order

    @property
    def travel(self) -> Sequence[int]:
        """At rest: buffers that travel in rounds."""
        deltas = self._shared.deltas
        assert not isinstance(deltas, SegmentedDeltas)
        return list((self._gradients if deltas is None else deltas).tail.travel)

    @property
    def processes(self) -> Mapping[int, Process]:
        """Of all members, as far as this one knows."""
        return self._communicator.watchdog.processes

    @processes.setter
    def processes(self, processes: Mapping[int, Process]) -> None:
        self._communicator.watchdog.processes = processes

    def _take_stock(self) -> None:
        """Of the model as it is now."""
        shared, options = self._shared, self._options
        shared.weights = [p for p in self._model.parameters() if p.requires_grad]
        shared.buffers, shared.added = shared_buffers(self._model), len(added_buffers(self._model))
        self._gradients: Gradients | LoneGradients
        if shared.alone or self._delayed_only:  # no gradient travels
            self._gradients = LoneGradients(self._model, shared.bell.ring, self._stages(), options.skips)
        else:
            self._gradients = Gradients(
                self._model,
                options.bucket_bytes,
                self._pace,
                shared.bell.ring,
                options.overlap,
                self._stages(),
                shared.order.leave,
                self._plane.rank,
                shared.ranks_counted,
                self._plane.ranks_at_start,
                options.skips,
                allocate=self._plane.allocate,
            )
        self._gradients.look = lambda stage: self.look(stage)
        self._gradients.adopt_buffers()
        self._communicator.use(self._gradients)

    def go_back(self, applied: int) -> None:
        """At rest, on every rank: the model is as in a checkpoint of so many samples, and nothing else of what has been
        done since is kept. The first rank's coordinator goes on from there."""
        self.renew()
        shared = self._shared
        with shared.changed:
            self._check_members()
            if shared.recovering:  # all come to this rest once more
                raise MembersLost("another rank has gone")
            self._communicator.go_back(applied)
            if self.coordinator is not None:
                shared.outbox.append(WentBack(applied))
        shared.bell.ring()

    def renew(self) -> None:
        """At rest, on every rank, with identical weights: other ones are trained from now on."""
        with self._shared.changed:  # a rank may die meanwhile
            self._gradients.close()
            self._shared.deltas, self._shared.travel = None, ()
            self._take_stock()

    # Tasks.

    def next_work(self) -> Task | Snapshot | StartRound:
        """Wait for the next task, for a snapshot to evaluate, or for the drain round that brought all to rest."""
        shared = self._shared
        with shared.changed, self.timer.waiting:
            if shared.phase is Phase.RESTING and shared.drained is None:
                shared.phase = Phase.TRAINING
                with shared.order:
                    self._gradients.adopt_buffers()
            while True:
                self._raise_failure()
                self._heed()
                self._take_over()
                if shared.snapshot is not None:
                    shared.order.follow()
                    snapshot, shared.snapshot = shared.snapshot, None
                    return snapshot
                if shared.drained is not None:
                    shared.order.follow()
                    drained, shared.drained = shared.drained, None
                    self._overhead.forget()
                    return drained
                self._apply()
                if self.worker.may_start() and shared.phase is not Phase.DRAINING and not self._owes_snapshot:
                    return self._start_task()
                self._wait(shared.changed.wait)

    @property
    def _owes_snapshot(self) -> bool:
        """Synchronous mode, on a rank alone, which waits for no round: the weights now are those of a round that is to
        be evaluated, and has not landed."""
        marked = self._shared.marked
        return bool(marked) and marked[0] < self.worker.version

    def _start_task(self) -> Task:
        shared = self._shared
        task, started = self.worker.start_task()
        if task.synchronous_round is None:
            self._gradients.close()
            shared.delayed_mode().open_task(len(task.slices), task.samples, self._options.batch)
        else:
            shared.deltas = None
            shared.stages_summed = 0
            self._gradients.open_task()
        shared.outbox.append(started)
        shared.acted_at = time.monotonic()
        shared.followers.tell(Began(task))
        shared.bell.ring()
        return task

    def open_slice(self, task: Task, samples: int, last: bool) -> None:
        """Before the forward pass of a slice of `samples`."""
        if task.synchronous_round is not None:
            self._gradients.open_slice(samples, last)

    def tell_units(self, units: float | None, loss: torch.Tensor | None = None, is_sum: bool = False) -> None:
        """Synchronous mode: of the backward calls from now on (`TaskUnits.tell`)."""
        self._gradients.tell_units(units, loss, is_sum)

    @property
    def arrived(self) -> bool:
        """Synchronous mode: has the slice that is out brought any gradient?"""
        return self._gradients.arrived

    @property
    def is_skipped(self) -> bool:
        """Synchronous mode, once a stage's sums are in: has some rank skipped its slice, and makes others' steps?"""
        return self._gradients.skipped

    @property
    def clips_unknown(self) -> bool:
        """Synchronous mode, once a stage's sums are in: is some rank to step that does not know how loops clip?"""
        return self._gradients.clips_unknown

    @property
    def looks_differ(self) -> bool:
        """Synchronous mode, once a stage's sums are in: do some ranks look at gradients before a step, and others not,
        as they have none of their own?"""
        return self._gradients.looks_differ

    @property
    def is_made_up(self) -> bool:
        """Synchronous mode, once a stage's sums are in: does some rank make this step without its loop?"""
        return self._gradients.made_up

    def fill(self, idle: bool) -> None:
        """Synchronous mode: a backward pass of the job's is over, or is left out, as there is nothing to learn."""
        self._gradients.fill(idle)

    def hold(self, stage: int, held: bool) -> None:
        """Synchronous mode: the loop has been given this stage's gradients to look at, or steps on them now."""
        self._gradients.hold(stage, held)

    def is_stepped(self, stage: int) -> bool:
        """Synchronous mode, once the stage's sums are in: does some rank step on them?"""
        return self._gradients.is_stepped(stage)

    def take(self, task: Task, stage: int) -> None:
        """Synchronous mode: what the slice has brought this stage is whole."""
        self._gradients.take(stage)

    def drop_absent(self, weights: Sequence[torch.nn.Parameter]) -> None:
        """Synchronous mode, before their step: gradients that no rank has."""
        if isinstance(self._gradients, Gradients):
            self._gradients.drop_absent(weights)

    def is_collected(self, stage: int) -> bool:
        """Synchronous mode: have this stage's gradients become the mean over the round's samples?"""
        return self._gradients.is_collected(stage)

    def close_slice(self, task: Task) -> None:
        """After a slice's last backward, in delayed mode after its inner step: take over what rounds have brought."""
        if task.synchronous_round is not None:
            self._gradients.close_slice()
            return
        with self._shared.changed, self.timer.working:
            self._apply()
            self._shared.followers.tell(Closed())

    def reduce(self, task: Task, stage: int | None = None, scaled: bool = False, report: LoopReport = STEPS) -> int:
        """Synchronous mode, in the task's last slice: gradients up to this stage's, which the loop steps next, become
        the mean over the round's samples (None: all, and it steps none). What is `scaled` may be infinite.
        `report`: what else the loop says.

        Returns the number of samples: 0 where all have withdrawn, or the task is void, and there are no gradients.
        There are none, either, where the round is spoiled.
        """
        gradients = self._gradients
        if self.is_void:
            return 0
        last = len(gradients.stages) - 1
        total = gradients.flush(task.samples, stage, scaled, report)
        stage = last if stage is None else stage
        if not scaled and not math.isfinite(total):
            if not self._options.skips:
                require_finite(total, self._plane.rank, task)
            self._tell_spoiled(task)
        samples = 0
        for each in [place for place in range(stage) if not gradients.is_collected(place)] + [stage]:
            self._wait_for_stage(task, each, each == last)
            if self.is_void:
                return 0
            with self._shared.order:
                samples = gradients.collect(each)
        return samples

    def _wait_for_stage(self, task: Task, stage: int, last: bool) -> None:
        """Until its sums are there, or the task is void. What one stage tells of a mistake all ranks hear, also those
        that wait for the next."""
        assert task.synchronous_round is not None
        shared = self._shared
        if shared.alone:  # they are whole
            return
        with shared.changed, self.timer.waiting:
            while shared.landed <= task.synchronous_round and (last or shared.stages_summed <= stage):
                self._raise_failure()
                if shared.void:
                    return
                self._wait(shared.changed.wait)

    def _tell_spoiled(self, task: Task) -> None:
        shared = self._shared
        with shared.changed:
            # Reported already, as a rank has died: who goes on may know of no such task.
            if not shared.recovering and not shared.void:
                shared.outbox.append(TaskSpoiled(self._plane.rank, task.number, tuple(spans_of([task]))))

    @property
    def is_void(self) -> bool:
        """Has a rank died, so that the synchronous task that is computed is no more to be finished, but given up?"""
        return self._shared.void

    def give_up(self, task: Task) -> bool:
        """A void task's gradients are gone. True where its round counts, and its step has been taken over from another
        rank; otherwise its samples come again."""
        shared = self._shared
        assert task.synchronous_round is not None
        with shared.changed:
            assert isinstance(self._gradients, Gradients)
            with shared.order:
                self._gradients.give_up()
            shared.void = False
            self._take_over()
            return self.worker.version > task.synchronous_round

    def _take_over(self) -> None:
        """What another rank's step has made, where this one was behind at a death."""
        shared = self._shared
        state, shared.adopted = shared.adopted, None
        if state is not None:
            assert isinstance(self._gradients, Gradients)
            with shared.order:
                self._take_state(state)
                self._gradients.take_over_buffers(state["shared buffers"], state["travel"])
            self.worker.version = shared.landed

    def finish(
        self,
        task: Task,
        seconds: float,
        loss_sum: float,
        lift: float = 1.0,
        lossless: int = 0,
        units: tuple[Count, ...] = (),
        stepped: Stepped | None = None,
    ) -> None:
        """The task is computed; `seconds` of device time, `loss_sum` over its samples, of which `lossless` told none,
        `lift` and `stepped` of its progress, as in `Deltas.finish`; `units` as in `TaskFinished`."""
        shared = self._shared
        shared.acted_at = time.monotonic()
        if self._options.on_host:
            shared.patience_seconds = seconds * min(task.delay_bound, LONGEST_PATIENCE)
        with shared.changed, self.timer.working:
            if task.synchronous_round is None:
                assert shared.deltas is not None
                self._apply()
                with shared.order:
                    total = shared.deltas.finish(task.samples, len(task.slices), lift, stepped)
                shared.followers.tell(Finished(task.number))
                if not self._options.guarded:
                    require_finite(total, self._plane.rank, task)
                elif not math.isfinite(total):
                    loss_sum = math.nan
            else:
                self.worker.version = task.synchronous_round + 1
                shared.order.leave()  # after a death the other thread may read what the step has made
            work, waits = self._overhead.since(seconds)
            finished = self.worker.finish_task(seconds, loss_sum, work, waits)
            finished = finished._replace(lossless=lossless, units=units)
            if self.is_spoiled(task):
                finished = finished._replace(samples=0, loss_sum=0.0, lossless=0, units=())
            shared.outbox.append(finished)

    def is_spoiled(self, task: Task) -> bool:
        """Synchronous mode: does the task's round bring nothing, as some of it was not finite?"""
        return task.synchronous_round is not None and self._gradients.spoiled

    def leave_out(self, task: Task, spans: Sequence[Span]) -> None:
        """Delayed mode: the task is computed, and was not finite in slices of these spans. It is undone."""
        shared = self._shared
        with shared.changed, self.timer.working:
            with shared.order:
                deltas = shared.delayed_mode()
                assert not isinstance(deltas, SegmentedDeltas), "jobs by a plan skip nothing"
                deltas.undo()
            shared.outbox.append(self.worker.spoil_task(tuple(spans)))
        shared.bell.ring()

    @property
    def has_released(self) -> bool:
        """Have gradients of the synchronous task that is computed left for the other ranks?"""
        return self._gradients.has_released

    def withdraw(self) -> Task | None:
        """Work on no more samples. Returns what is left of a synchronous task that has started, to be finished."""
        with self._shared.changed:
            begun = self.worker.current
            self._shared.outbox.append(self.worker.withdraw())
            task = self.worker.current
            if self._shared.deltas is not None and begun is not None:
                self._shared.deltas.drop_task()
            if task is not None:
                self._gradients.discard()
        self._shared.bell.ring()
        return task

    def _apply(self) -> None:
        shared = self._shared
        if shared.deltas is None or self.worker.version >= shared.landed:
            return
        with shared.order.applying():
            if shared.deltas.apply():
                self.worker.version = shared.landed
                shared.followers.tell(Applied(shared.landed))

    @contextmanager
    def showing(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, the model holds the snapshot's weights. No drain begins before this rank has reported its part, so
        nothing else touches local weights meanwhile."""
        shared = self._shared
        shared.main_thread, shared.acted_at = MainThread.EVALUATING, time.monotonic()
        try:
            with ExitStack() as shown:
                if snapshot.weights is not None:
                    assert shared.deltas is not None
                    shared.order.keep(snapshot.weights)
                    shown.enter_context(shared.deltas.showing(snapshot.weights))
                shared.order.lead_script()
                yield
                shared.order.follow_script()
        finally:
            shared.main_thread = MainThread.COMPUTING

    # Events.

    def report(self, event: Event) -> None:
        """Tell the coordinator, from any thread but not from a signal handler."""
        shared = self._shared
        with shared.changed:  # after a death a report says what is in the outbox, or what is to come there
            if isinstance(event, Evaluated):
                shared.evaluating = None
            elif isinstance(event, CapFound):
                shared.cap = event.samples
            shared.outbox.append(event)
        shared.bell.ring()

    def report_from_signal(self, event: Event) -> None:
        """The same from a signal handler: it takes no lock, and the event leaves with the next poll."""
        self._shared.outbox.append(event)

    # A death, while the main thread meets others at a rest.

    def _heed(self) -> None:
        if self._shared.recoveries != self._recoveries:
            self._recoveries = self._shared.recoveries
            self._plane.heed()

    def _check_members(self) -> None:
        if self._shared.recoveries != self._recoveries:
            raise MembersLost("another rank has gone")

    def recover(self) -> bool:
        """After MembersLost in the main thread: wait until those who are left go on. True where the rest that this rank
        is at has been broken off: `next_work` comes to it once more."""
        shared = self._shared
        with shared.changed:
            self._wait_for_recovery()
            self._heed()
            again, shared.rest_again = shared.rest_again, False
            return again

    def end_rest(self) -> bool:
        """All have done what there was to do at a rest. True where this has been broken off after all."""
        shared = self._shared
        with shared.changed:
            while shared.recovering:
                self._raise_failure()
                self._wait(shared.changed.wait)
            if shared.recoveries == self._recoveries:
                shared.at_rest = False
                return False
        return self.recover()

    # At rest, and the end.

    def allreduce(self, tensor: torch.Tensor) -> None:
        """Sum a flat tensor of float32 or float64 over all ranks, which must all be at rest at the same drain."""
        done = threading.Event()
        shared = self._shared
        shared.order.leave()
        with shared.changed:
            self._check_members()
            shared.requests.append(SumRequest(tensor, done))
        while not done.is_set():
            self._raise_failure()
            self._check_members()
            self._wait(done.wait)

    def adopt(self) -> None:
        """At rest: the model's weights have been set, on all ranks alike."""
        if self._shared.deltas is not None:
            with self._shared.order:
                self._shared.deltas.adopt()

    @property
    def holds_anchor(self) -> bool:
        """At rest: are the weights still what all ranks hold? Always in synchronous mode, which has no anchor."""
        deltas = self._shared.deltas
        return deltas is None or deltas.holds_anchor

    def adopt_weights(self) -> None:
        """At rest: they have been changed, on all ranks alike. Buffers are what rounds make of them."""
        deltas = self._shared.deltas
        if deltas is not None:
            with self._shared.order:
                deltas.adopt_weights()

    @property
    def anchor(self) -> list[torch.Tensor]:
        """The weights that all ranks share, at rest."""
        shared = self._shared
        if isinstance(shared.deltas, FragmentedDeltas):  # of all together there would be a copy
            return [part.anchor for part in shared.deltas.parts]
        return [*shared.weights, *shared.buffers] if shared.deltas is None else [shared.deltas.anchor]

    def stop(self) -> None:
        """After the final drain, or when giving up."""
        self._shared.main_thread = MainThread.STOPPED
        self._shared.bell.ring()
        if not self._communicator.join(self._options.timeout_seconds):
            raise self._hung
        if self._communicator.started:
            self._gradients.close()

    @property
    def coordinator(self) -> Coordinator | None:
        """On the first member."""
        return self._communicator.coordinator

    @property
    def started(self) -> bool:
        return self._communicator.started

    @property
    def keeps_going(self) -> bool:
        """After another rank's death, where that can be?"""
        return self._communicator.keeps_going

    @property
    def bytes_sent(self) -> int:
        return self._communicator.bytes_sent

    @property
    def fragments(self) -> int:
        """That the weights are cut into now, for rounds that sum some of them."""
        deltas = self._shared.deltas
        return len(deltas.parts) if isinstance(deltas, FragmentedDeltas) else 1

    @property
    def buffer_bytes(self) -> int:
        """Memory that delayed mode takes on this rank."""
        deltas = self._shared.deltas
        return 0 if deltas is None else deltas.buffer_bytes

    def cpu_seconds(self) -> float:
        """What synchronisation has cost this rank so far: its thread, and the main thread's part."""
        return self.timer.cpu_seconds + self._communicator.cpu_seconds

    # Waiting.

    def _wait(self, wait: Callable[[float], bool]) -> None:
        """Wait a moment for others. The watchdog bounds how long they take; this, how long the communication thread
        does not poll.

        Seconds without a poll count, and not those by the clock: the whole process may have been stopped.
        """
        shared = self._shared
        assert shared.main_thread is not MainThread.STOPPED  # the communication thread would never end
        if not self._communicator.has_thread:
            with self.timer.working:
                if not self._communicator.poll():
                    time.sleep(SHORTEST_POLL_SECONDS)
            return
        polls, shared.main_thread = shared.polls, MainThread.WAITING
        shared.bell.ring()
        came = wait(1.0)
        shared.main_thread = MainThread.COMPUTING
        self._missed_seconds = 0.0 if came or shared.polls != polls else self._missed_seconds + 1.0
        if self._missed_seconds > self._options.timeout_seconds:
            raise self._hung

    @property
    def _hung(self) -> StalledError:
        seconds = self._options.timeout_seconds
        return StalledError(
            f"the communication thread of rank {self._plane.rank} has not come back for {seconds:.0f} s"
        )

    def _raise_failure(self) -> None:
        if self._shared.failure is not None:
            self._shared.failure_raised = True
            raise self._shared.failure
