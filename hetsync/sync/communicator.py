"""The communication thread of a rank: it takes in instructions, joins every round in order (with zeros where the rank
has nothing to give), and on rank 0 hosts the coordinator.

A rank alone has no such thread: its main thread polls.

It sleeps between two polls: for a fraction of the time for which nothing has happened. Where the main thread waits,
polling adds at most that fraction to the wait: while a sum moves, the shortest sleep would add more, and the thread
yields the processor instead. Where the main thread computes, seldom is often enough. A poll finds its code and
data no longer in the processor's cache, and costs a tenth of a millisecond and more of the core that computes. So a
rank that computes in delayed mode, where hardly anybody waits for it, never polls more often than
`SHORTEST_DELAYED_POLL_SECONDS`, but at the start of each task. The simulator follows the same rule but for this: of
rounds it draws the longest sleep anyway.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetsync.plane.base import LostError, MembersLost, Plane, Sums, WireFormat
from hetsync.plane.ending import end_job
from hetsync.sync.collectives import PendingCollectives
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.deltas import Deltas, Snapshot
from hetsync.sync.gradients import Gradients, Stage
from hetsync.sync.log import Coming, Joined, Landed
from hetsync.sync.lone import LoneDeltas, LoneGradients
from hetsync.sync.mending import Anchor, Mending, Recovered
from hetsync.sync.messages import (
    Alive,
    AssignTask,
    CapFound,
    DrainRequested,
    NormMeasured,
    Notice,
    RoundCompleted,
    SettingsChanged,
    StartRound,
    Task,
    TaskStarted,
)
from hetsync.sync.recovery import Action, Books, LandedRound, Report, decide
from hetsync.sync.router import Router
from hetsync.sync.segmented import SegmentedDeltas
from hetsync.sync.shared_state import EngineOptions, MainThread, Phase, SharedState, SumRequest
from hetsync.sync.tail import Tail
from hetsync.sync.watchdog import Watchdog
from hetsync.telemetry import Telemetry
from hetsync.threads import cpu_seconds, single_threaded

GRACE_SECONDS = 10.0  # for the main thread to take over a failure

POLL_FRACTION_WAITING = 0.1  # of the quiet, where the main thread waits
POLL_FRACTION_COMPUTING = 0.5
SHORTEST_POLL_SECONDS = 50e-6
SHORTEST_DELAYED_POLL_SECONDS = 4e-3
LONGEST_COLLECTIVE_POLL_SECONDS = 6e-3  # while a collective is under way
LONGEST_IDLE_POLL_SECONDS = 16e-3

COMPLETE = object()  # where a collective has nothing more to wait for


def poll_seconds(
    quiet_seconds: float, fraction: float, longest: float, shortest: float = SHORTEST_POLL_SECONDS
) -> float:
    """Until the next poll, after so many seconds without news."""
    return min(longest, max(shortest, fraction * quiet_seconds))


def pause_seconds(shared: SharedState, summing: bool, quiet_seconds: float) -> float:
    """The same on a rank that does what `shared` says, and has sums under way or not; 0 says to yield."""
    waiting = shared.main_thread is MainThread.WAITING
    longest = LONGEST_COLLECTIVE_POLL_SECONDS if summing else LONGEST_IDLE_POLL_SECONDS
    fraction = POLL_FRACTION_WAITING if waiting else POLL_FRACTION_COMPUTING
    calm = shared.deltas is not None and not waiting and shared.phase is not Phase.RESTING
    shortest = SHORTEST_DELAYED_POLL_SECONDS if calm else SHORTEST_POLL_SECONDS
    if waiting and summing and fraction * quiet_seconds < shortest:
        return 0.0
    return poll_seconds(quiet_seconds, fraction, longest, shortest)


def hand_over(failure: BaseException, shared: SharedState, plane: Plane) -> None:
    """Let the main thread end the job with the failure; if it cannot (it computes, or hangs), end it here."""
    with shared.changed:
        shared.failure, deadline = failure, time.monotonic() + GRACE_SECONDS
        shared.changed.notify_all()
    while not shared.failure_raised and shared.main_thread is not MainThread.STOPPED:
        if time.monotonic() > deadline:
            end_job(plane, failure)
        time.sleep(0.05)


@dataclass(frozen=True)
class Death:
    """Of a rank that the others have survived. `activity` is what it did, as far as rank 0 knew. It was noticed so many
    seconds after it had last begun a task; `recovered_seconds` after that the others went on, from `round`. Of its
    samples so many go out again."""

    rank: int
    round: int
    activity: str
    noticed_seconds: float
    recovered_seconds: float
    samples_returned: int


def first_books(coordinator: Coordinator) -> Books:
    """Before the first task, and at a rest."""
    machine = coordinator.machine
    applied = [(0, machine.ledger.applied)]
    return Books([machine.standing], applied, machine.version, samples_by_rank=dict(machine.samples_by_rank))


class Communicator:
    """All methods but the public ones run in its thread, where it has one."""

    def __init__(
        self,
        plane: Plane,
        options: EngineOptions,
        shared: SharedState,
        *,
        router: Router,
        coordinator: Coordinator | None,
        on_task: Callable[[Task], None],
        on_dropped: Callable[[Task], None],
        on_death: Callable[[Death], None],
        telemetry: Telemetry,
    ) -> None:
        """`coordinator` on rank 0. `on_task` is called with each task as soon as it is known, outside the lock, and
        `on_dropped` with those of them that will not be computed, since a rank has gone; `on_death` on rank 0."""
        self._plane = plane
        self._options = options
        self._shared = shared
        self._router = router
        self._coordinator = coordinator
        self._on_task = on_task
        self._on_dropped = on_dropped
        self._on_death = on_death
        self._telemetry = telemetry
        self._rounds: deque[StartRound] = deque()  # to be joined, in order
        self._collective: Iterator[None] | None = None  # under way: a round, or a request of the main thread
        self._pending = PendingCollectives(plane, options.measure_norms)  # of that collective
        self._keeps_going = plane.tolerant and plane.size > 1  # after a death, where that can be
        self._books = first_books(coordinator) if self._keeps_going and coordinator is not None else None
        self._newest: LandedRound | None = None  # that has landed here, in delayed mode
        self._requested: list[str] = []  # rests that this rank has asked for, and that have not come
        self._synchronous = False  # was the last round?
        self._heard: dict[int, float] = {}  # moments of the ranks' last events, on rank 0
        version = None if coordinator is None else lambda: coordinator.machine.version
        self._watchdog = Watchdog(plane, version, options.timeout_seconds)
        self.started = self.has_thread = False
        self._thread = threading.Thread(None, single_threaded(self._run), "hetsync-communication", daemon=True)

    # For the main thread.

    def use(self, gradients: Gradients | LoneGradients) -> None:
        """Before the start, or at rest."""
        self._gradients = gradients

    def start(self) -> None:
        self.started = True
        self.has_thread = self._plane.size > 1
        if self.has_thread:
            self._thread.start()
        elif self._coordinator is not None:
            self._coordinator.start()

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end, if it runs; False if it has not."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self._thread)

    @property
    def bytes_sent(self) -> int:
        return self._pending.bytes_sent

    # The loop.

    def _run(self) -> None:
        try:
            with self._shared.order.beside():
                self._poll_on()
        except BaseException as failure:
            hand_over(failure, self._shared, self._plane)

    def _poll_on(self) -> None:
        shared = self._shared
        if self._coordinator is not None:
            self._coordinator.start()
        news_at = time.monotonic()
        while shared.main_thread is not MainThread.STOPPED:
            shared.wake.clear()
            shared.polls += 1
            try:
                moved = self.poll()
            except MembersLost as lost:
                self._recover(lost)
                moved = True
            now = time.monotonic()
            news_at = now if moved else news_at
            seconds = self._sleep_seconds(now - news_at)
            if not seconds:
                os.sched_yield()
            if shared.wake.wait(seconds):
                news_at = now

    def poll(self) -> bool:
        """Take in, send, and move collectives on; True where that was anything. On a rank alone the main thread calls
        it where it would wait: nobody else is waited for, and two threads would take each other's processor."""
        moved = self._receive() + self._flush() + self._proceed() > 0
        self._watch(moved)
        return moved

    def _watch(self, moved: bool) -> None:
        shared = self._shared
        resting = shared.phase is Phase.RESTING and self._collective is None
        if moved or resting or shared.main_thread is MainThread.EVALUATING:
            self._watchdog.moved()
        else:
            self._watchdog.check(self._sign)

    def _sleep_seconds(self, quiet_seconds: float) -> float:
        return pause_seconds(self._shared, self._pending.under_way, quiet_seconds)

    @property
    def _sign(self) -> Alive:
        waiting = self._shared.main_thread is MainThread.WAITING
        return Alive(self._plane.rank, self._shared.landed + (self._collective is not None), waiting)

    # Messages.

    def _receive(self) -> int:
        """Take in what arrived; returns how much of it is news (signs of life are not)."""
        inbox = self._router.receive()
        for sign in inbox.signs:
            self._watchdog.answer(sign, self._sign)
        for events in inbox.events:
            assert self._coordinator is not None
            began = [event.rank for event in events if isinstance(event, TaskStarted)]
            self._heard |= dict.fromkeys(began, time.monotonic())
            self._coordinator.handle(events)
        batches = [*inbox.instructions, *self._router.pop_own()]
        for instructions in batches:
            self._follow(instructions)
        heard, requests = self._shared.followers.receive()
        self._shared.outbox.extend(requests)
        return inbox.passed_on + len(inbox.events) + len(batches) + heard

    def _follow(self, instructions: Sequence[Notice]) -> None:
        if self._books is not None:
            synchronous = any(isinstance(told, StartRound) and told.synchronous for told in instructions)
            if not synchronous:  # see `_renew_books`
                self._books.follow(instructions)
            instructions = [notice for notice in instructions if self._is_own(notice)]
        for instruction in instructions:
            if isinstance(instruction, AssignTask):
                self._on_task(instruction.task)
                self._shared.followers.tell(Coming(instruction.task))
        with self._shared.changed:
            for instruction in instructions:
                if isinstance(instruction, AssignTask):
                    self._shared.worker.assign(instruction.task)
                elif isinstance(instruction, StartRound):
                    self._rounds.append(instruction)
                    self._shared.worker.announce(instruction.number)
                    if instruction.synchronous and instruction.evaluate and not instruction.drain:
                        self._shared.marked.append(instruction.number)
            self._shared.changed.notify_all()

    def _is_own(self, notice: Notice) -> bool:
        """Is it for this rank, and not for the copy of the books that it keeps?"""
        return not isinstance(notice, AssignTask) or notice.rank == self._plane.rank

    def _flush(self) -> int:
        """Send what is in the outbox; returns how many events."""
        outbox = self._shared.outbox
        events = [outbox.popleft() for _ in range(len(outbox))]
        self._requested += [event.reason for event in events if isinstance(event, DrainRequested)]
        if self._coordinator is None:
            self._router.send_events(events)
        elif events:
            self._coordinator.handle(events)
        self._shared.followers.send()
        return len(events)

    # Collectives.

    def _proceed(self) -> int:
        """Move the collective under way, and those behind it once it is complete; returns how much has moved.

        At rest, rounds wait for the main thread, since what it asks for comes first on every rank. Otherwise

            rank 0: round 8 ...                      rank 1: allreduce of the optimizer state, round 8 ...
        """
        shared = self._shared
        completed = 0
        before = shared.landed + self._plane.moves
        while (collective := self._collective or self._next_collective()) is not None:
            self._collective = collective
            if next(collective, COMPLETE) is not COMPLETE:
                break
            self._collective = None
            completed += 1
        return completed + shared.landed + self._plane.moves - before

    def _next_collective(self) -> Iterator[None] | None:
        if self._rounds and self._shared.phase is not Phase.RESTING:
            return self._begin_round(self._rounds.popleft())
        if self._shared.requests:
            return self._serve(self._shared.requests.popleft())
        return None

    def _begin_round(self, start: StartRound) -> Iterator[None]:
        self._pending.begin_round()
        self._synchronous = start.synchronous
        with self._shared.changed:
            self._shared.phase = Phase.TRAINING if start.drain is None else Phase.DRAINING
            self._shared.worker.join(start.number)
            self._shared.changed.notify_all()  # a task may start that was not to be in this round
        return self._synchronous_round(start) if start.synchronous else self._delayed_round(start)

    def _delayed_round(self, start: StartRound) -> Iterator[None]:
        shared = self._shared
        contribute = self._plane.rank in start.contributors
        wire: WireFormat = "float32" if start.drain else self._options.wire
        began = time.monotonic()
        with shared.changed:
            deltas = shared.delayed_mode()
            staleness = None
            if contribute:
                contributed, staleness = shared.worker.contribute(start.number)
                shared.outbox.append(contributed)
            with shared.order:
                gives = contribute or (start.drain is not None and deltas.take_leftover())
                addends = [part.pack(gives, self._options.batch, wire) for part in deltas.parts]
            shared.followers.tell(Joined(start, contribute))
        self._pending.post_addends(deltas.parts, addends, wire)
        if contribute:
            self._report_norm(start, *deltas.packed)
        self._flush()
        yield from self._sum_tails(*((part.tail, part.sums) for part in deltas.parts))
        while not shared.followers.have_summed(start.number):
            yield
        with shared.changed, shared.order:
            deltas.apply_sum()
            shared.followers.tell(Landed(start))
            self._note_landed(start, deltas)
            if start.drain:
                deltas.reset_to_anchor()
                shared.worker.version = start.number + 1
            elif start.evaluate:
                shared.snapshot = deltas.snapshot(start.number)
                shared.evaluating = start.number
        yield from self._complete_round(start, began, staleness)

    def _note_landed(self, start: StartRound, deltas: Deltas | LoneDeltas | SegmentedDeltas) -> None:
        if isinstance(deltas, Deltas) and self._keeps_going:
            self._newest = LandedRound(start, deltas.samples_given())
            if self._books is not None:
                self._books.land(self._newest)
        if start.drain is not None:
            self._requested.clear()

    def _synchronous_round(self, start: StartRound) -> Iterator[None]:
        shared = self._shared
        began = time.monotonic()
        if start.drain:
            with shared.changed:
                shared.deltas = None
                shared.worker.version = start.number + 1
        else:
            for stage in self._gradients.stages:
                yield from self._sum_stage(stage, start)
            if start.evaluate:  # the main thread makes its step before it asks for its next task
                with shared.changed:
                    shared.snapshot = Snapshot(shared.marked.popleft(), time.monotonic())
        yield from self._complete_round(start, began, 0, None if start.drain else self._gradients.summed_samples)

    def _sum_stage(self, stage: Stage, start: StartRound) -> Iterator[None]:
        gradients, wire = self._gradients, self._options.wire
        for index in range(stage.first, stage.stop):
            yield from self._until_released()
            with self._shared.order:
                addend = gradients.pack(index, wire)
            self._pending.post(addend, wire, gradients.buckets[index].residual)
        yield from self._until_released()
        last = stage is gradients.stages[-1]
        if last:
            self._report_norm(start, gradients.samples, 0)
        yield from self._sum_tails((stage.tail, None))
        if not last:
            with self._shared.changed:
                self._shared.stages_summed += 1
                self._shared.changed.notify_all()

    def _until_released(self) -> Iterator[None]:
        while not self._gradients.released():
            self._pending.poll()
            yield

    def _sum_tails(self, *tails: tuple[Tail, Sums | None]) -> Iterator[None]:
        """Until the round's sums are all in."""
        self._shared.order.follow()  # whoever packed them
        yield from self._pending.sum_tails(tails)
        self._shared.order.leave()

    def _report_norm(self, start: StartRound, samples: int, steps: int) -> None:
        if self._options.measure_norms:
            norm = self._pending.addends_norm
            self._shared.outbox.append(NormMeasured(self._plane.rank, start.number, samples, steps, norm))

    def _serve(self, request: SumRequest) -> Iterator[None]:
        self._shared.order.follow()
        self._pending.post(request.tensor, "float32")
        yield from self._pending.wait()
        request.done.set()

    def _complete_round(
        self, start: StartRound, began: float, staleness: int | None, samples: int | None = None
    ) -> Iterator[None]:
        shared = self._shared
        with shared.changed:
            shared.worker.complete_round(start.number)
            shared.landed = start.number + 1
            shared.changed.notify_all()
        seconds = round(time.monotonic() - began, 6)
        self._telemetry.record("round", round=start.number, seconds=seconds, staleness=staleness)
        if self._coordinator is not None:  # a sum is no rank's event: it passes by the outbox
            self._coordinator.handle([RoundCompleted(start.number, self._pending.sums_norm, samples)])
        if start.drain:
            while self._coordinator is not None and self._coordinator.machine.version <= start.number:
                yield  # until every `Contributed` is in: the books must be closed before anybody reads them
            self._renew_books(start)
            with shared.changed:
                shared.drained, shared.phase = start, Phase.RESTING
                shared.changed.notify_all()

    # A death.

    def _renew_books(self, drain: StartRound) -> None:
        """A death in synchronous mode ends the job, so that nobody keeps its books; they are those of delayed mode."""
        if drain.synchronous and self._books is not None and self._coordinator is not None:
            self._books = replace(first_books(self._coordinator), attempt=self._books.attempt)

    def _recover(self, lost: MembersLost) -> None:
        """Go on with those who are left. Raises LostError where that cannot be."""
        began = time.monotonic()
        self._require_recoverable(lost)
        before = self._plane.members
        mending = Mending(
            self._plane,
            self._report,
            lambda reports: decide(reports, len(before)),
            self._anchor,
            self._options.timeout_seconds,
        )
        recovered = mending.run()
        if recovered.decision.action is not Action.GO_ON:
            left = len(recovered.decision.survivors)
            raise LostError(f"{left} of {len(before)} ranks are left, which is no more than half of them")
        self._rounds.clear()
        self._collective = None
        self._pending.drop()
        self._tell_deaths(before, began, recovered)
        self._go_on(recovered)

    def _require_recoverable(self, lost: MembersLost) -> None:
        """What is done at a rest cannot begin anew, nor can a synchronous round."""
        shared = self._shared
        synchronous = self._synchronous or shared.worker.synchronous
        controlled = self._options.measure_norms  # by what has seen the machine that is to be made anew
        # What 16-bit weights could not take over yet is lost where a contribution returns.
        rounded = isinstance(shared.deltas, Deltas) and not shared.deltas.exact
        if synchronous or controlled or rounded or shared.phase is Phase.RESTING or not self._keeps_going:
            raise LostError(str(lost)) from lost

    def _report(self) -> Report:
        shared = self._shared
        with shared.changed:
            told = [shared.outbox.popleft() for _ in range(len(shared.outbox))]
            self._requested += [event.reason for event in told if isinstance(event, DrainRequested)]
            shared.outbox.extend(event for event in told if isinstance(event, SettingsChanged | CapFound))
            holding = shared.worker.holding()
            if self._books is not None and self._coordinator is not None:
                for notices in self._router.pop_own():
                    self._books.follow(notices)
                self._books.follow([self._coordinator.machine.standing])
            return Report(
                self._plane.rank,
                shared.landed,
                holding,
                self._newest,
                evaluating=shared.evaluating,
                requested=tuple(self._requested),
                books=self._books,
            )

    def _anchor(self) -> Anchor:
        with self._shared.changed, self._shared.order:
            deltas = self._shared.delayed_mode()
            assert isinstance(deltas, Deltas)
            return Anchor(deltas.anchor, deltas.velocity, tuple(deltas.tail.travel))

    def _tell_deaths(self, before: Sequence[int], began: float, recovered: Recovered) -> None:
        if self._books is None or self._coordinator is None:
            return
        decision, now = recovered.decision, time.monotonic()
        newest = recovered.reports[decision.donor].newest
        landed = newest.samples if newest is not None and self._books.version < decision.version else {}
        for rank in sorted(set(before).difference(decision.survivors)):
            held = sum(task.samples for task in self._books.tasks.get(rank, ()))
            death = Death(
                rank=rank,
                round=decision.version,
                activity=self._coordinator.machine.members[rank].activity.name.lower(),
                noticed_seconds=round(began - self._heard.get(rank, began), 6),
                recovered_seconds=round(now - began, 6),
                samples_returned=held - landed.get(rank, 0),
            )
            self._on_death(death)

    def _go_on(self, recovered: Recovered) -> None:
        shared, decision = self._shared, recovered.decision
        behind = self._plane.rank in decision.behind
        with shared.changed, shared.order:
            dropped = shared.worker.recover(decision.version, behind).dropped
            if isinstance(shared.deltas, Deltas):
                if recovered.adopted is not None:
                    shared.deltas.catch_up(*recovered.adopted)
                else:
                    shared.deltas.take_back()
            shared.landed, shared.phase = decision.version, Phase.TRAINING
            shared.changed.notify_all()
        self._router.begin_anew(recovered.early)
        self._watchdog.moved()
        for task in dropped:
            self._on_dropped(task)
        if self._coordinator is not None:
            assert decision.books is not None
            self._books = decision.books
            self._coordinator.go_on(decision, recovered.reports)
