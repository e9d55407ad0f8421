"""The communication thread of a rank: it takes in instructions, moves the rounds on that it joins (`rounds.py`), and
on rank 0 hosts the coordinator.

A rank alone has no such thread: its main thread polls.
When it polls says `polling.py`.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hetsync.errors import complain
from hetsync.plane.base import CutOffError, DamagedError, LostError, MembersLost, Plane
from hetsync.plane.ending import end_job
from hetsync.processes import own_stack
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.gradients import Gradients
from hetsync.sync.log import Coming
from hetsync.sync.lone import LoneGradients
from hetsync.sync.lost_books import BOOKS_LOST, Tally, begun_anew
from hetsync.sync.mending import MOST_IN_VAIN, Anchor, Mending, Part, Recovered, parts_of, parts_of_state
from hetsync.sync.messages import (
    Alive,
    AssignTask,
    DrainRequested,
    Event,
    Notice,
    RoundCompleted,
    SettingsChanged,
    StartRound,
    Task,
    TaskDropped,
    TaskFinished,
    TaskLeftOut,
    TaskStarted,
)
from hetsync.sync.milestones import TOO_FEW
from hetsync.sync.polling import pause_seconds
from hetsync.sync.recovery import Action, Books, Damage, Death, Decision, LandedRound, Report, decide, too_few, unseen
from hetsync.sync.rounds import Around, ModeTensors, Rounds
from hetsync.sync.router import Router
from hetsync.sync.segmented import SegmentedDeltas
from hetsync.sync.shared_state import EngineOptions, MainThread, Phase, SharedState
from hetsync.sync.slowness import SlowRanks
from hetsync.sync.watchdog import Watchdog
from hetsync.telemetry import Telemetry
from hetsync.threads import cpu_seconds, single_threaded

TAKE_OVER_SECONDS = 10.0  # for the main thread to take over a failure


def hand_over(failure: BaseException, shared: SharedState, plane: Plane) -> None:
    """Let the main thread end the job with the failure; if it cannot (it computes, or hangs), end it here."""
    with shared.changed:
        shared.failure, deadline = failure, time.monotonic() + TAKE_OVER_SECONDS
        shared.changed.notify_all()
    while not shared.failure_raised and shared.main_thread is not MainThread.STOPPED:
        if time.monotonic() > deadline:
            end_job(plane, failure)
        time.sleep(0.05)


class Communicator:
    """All methods but those for the main thread run in its own, where it has one."""

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
        on_damage: Callable[[Damage], None],
        telemetry: Telemetry,
        state: Callable[[], Mapping[str, Any]],
        books: Books | None,
        tally: Tally | None,
        succeed: Callable[[], Coordinator],
        around: Around = lambda start, steps: steps,
    ) -> None:
        """`coordinator` on rank 0; `succeed` makes one here, once all lower ranks have died. `books` are those of a
        keeper; by the `tally` all go back to a checkpoint where nobody is left who kept any, None ends the job.
        `on_task` is called with each task as soon as it is known, outside the lock, and `on_dropped` with those of them
        that will not be computed, since a rank has gone (`on_death` tells of it) or a message (`on_damage`).
        `around` is given the steps of each round. `state`: all that this rank's steps have made, for one that is
        behind."""
        self._plane = plane
        self._options = options
        self._shared = shared
        self._router = router
        self._coordinator = coordinator
        self._on_task = on_task
        self._on_dropped = on_dropped
        self._on_death = on_death
        self._on_damage = on_damage
        self._state = state
        self._rounds = Rounds(plane, options, shared, self, telemetry, around)
        self._keeps_going = plane.tolerant and plane.size > 1  # after a death, where that can be
        self._books = books if self._keeps_going else None
        self._tally = tally
        self._succeed = succeed
        self._deaths: dict[int, Death] = {}
        self._damaged: int | None = None  # rank of which a message was, as this one has noticed
        self._in_vain = 0  # recoveries without a death
        self._newest: LandedRound | None = None  # that has landed here, where deaths are survived
        self._requested: list[str] = []  # rests that this rank has asked for, and that have not come
        self._heard: dict[int, float] = {}  # moments of the ranks' last events, on rank 0
        self.watchdog = self._make_watchdog()
        self._slow = None if options.slow_factor is None else SlowRanks(options.slow_factor)
        self.started = self.has_thread = False
        self._thread = threading.Thread(None, single_threaded(self._run), "hetsync-communication", daemon=True)

    def _make_watchdog(self) -> Watchdog:
        hosted = self._coordinator
        version = None if hosted is None else lambda: hosted.machine.version
        return Watchdog(self._plane, version, self._options.timeout_seconds, self._options.silent_seconds)

    # For the main thread.

    @property
    def keeps_going(self) -> bool:
        """Do ranks go on when another dies, where nothing else keeps them from it?"""
        return self._keeps_going

    @property
    def coordinator(self) -> Coordinator | None:
        """On the first member."""
        return self._coordinator

    def go_back(self, applied: int) -> None:
        """At rest, under the lock: this rank holds what a checkpoint of so many samples holds."""
        if self._tally is not None:
            self._tally.applied = applied
        if self._books is not None:
            self._books.go_back(applied)

    def use(self, gradients: Gradients | LoneGradients) -> None:
        """Before the start, or at rest."""
        self._rounds.gradients = gradients

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
        return self._rounds.bytes_sent

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
            shared.polls += 1
            try:
                moved = self._admit() or self.poll()
            except (MembersLost, DamagedError) as failure:
                self._recover(failure)
                moved = True
            now = time.monotonic()
            news_at = now if moved else news_at
            seconds = self._sleep_seconds(now - news_at)
            if not seconds:
                os.sched_yield()
            if shared.bell.wait(seconds):
                news_at = now

    def poll(self) -> bool:
        """Take in, send, and move collectives on; True where that was anything. On a rank alone the main thread calls
        it where it would wait: nobody else is waited for, and two threads would take each other's processor."""
        moved = self._receive() + self.flush() + self._rounds.proceed() > 0
        self._watch(moved)
        self.watchdog.watch_silence()
        return moved

    def _watch(self, moved: bool) -> None:
        shared = self._shared
        resting = shared.phase is Phase.RESTING and not self._rounds.under_way
        if moved or resting or shared.main_thread is MainThread.EVALUATING:
            self.watchdog.moved()
        else:
            self.watchdog.check(self._sign)

    def _sleep_seconds(self, quiet_seconds: float) -> float:
        return pause_seconds(self._shared, self._rounds.summing, quiet_seconds)

    def _sign(self) -> Alive:
        shared = self._shared
        doing, joined = shared.main_thread, shared.landed + self._rounds.under_way
        activity = "at rest" if shared.phase is Phase.RESTING else doing.name.lower()
        seconds = time.monotonic() - shared.acted_at
        return Alive(self._plane.rank, joined, doing is MainThread.WAITING, activity, seconds, own_stack())

    # Messages.

    def _receive(self) -> int:
        """Take in what arrived; returns how much of it is news (signs of life are not)."""
        inbox = self._router.receive()
        for sign in inbox.signs:
            self.watchdog.answer(sign, self._sign)
        told = self._tell_coordinator(inbox.events)
        batches = [*inbox.instructions, *self._router.pop_own()]
        for instructions in batches:
            self._follow(instructions)
        heard, requests = self._shared.followers.receive()
        self._shared.outbox.extend(requests)
        return inbox.passed_on + told + len(batches) + heard

    def _tell_coordinator(self, arrived: Sequence[Sequence[Event]]) -> int:
        """All at once what other ranks and this one have to tell, where it lives here: so each rank is told but once
        what comes of it. Returns how many events that are."""
        if self._coordinator is None:
            assert not arrived, "events go to where the coordinator is"
            return 0
        events = [event for batch in arrived for event in batch]
        if events:
            at_work = {event.rank for event in events if isinstance(event, TaskStarted | TaskFinished)}
            began = {event.rank for event in events if isinstance(event, TaskStarted)}
            self._heard |= dict.fromkeys(began, time.monotonic())
            self.watchdog.heard(at_work)
            self._exclude_slow(events)
        events += self._pop_outbox()
        if events:
            self._coordinator.handle(events)
        return len(events)

    def _follow(self, instructions: Sequence[Notice]) -> None:
        if self._books is not None:
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
                elif isinstance(instruction, TaskDropped):
                    self._shared.worker.drop(instruction.task)
                elif isinstance(instruction, StartRound):
                    self._rounds.announce(instruction)
                    self._shared.worker.announce(instruction.number)
                    if instruction.synchronous and instruction.evaluate and not instruction.drain:
                        self._shared.marked.append(instruction.number)
            self._shared.changed.notify_all()

    def _is_own(self, notice: Notice) -> bool:
        """Is it for this rank, and not for the copy of the books that it keeps?"""
        if isinstance(notice, TaskLeftOut):
            return False
        return not isinstance(notice, AssignTask | TaskDropped) or notice.rank == self._plane.rank

    def _pop_outbox(self) -> list[Event]:
        outbox = self._shared.outbox
        events = [outbox.popleft() for _ in range(len(outbox))] if outbox else []
        self._requested += [event.reason for event in events if isinstance(event, DrainRequested)]
        return events

    # What `Rounds` tell.

    def flush(self) -> int:
        """Send what is in the outbox; returns how many events."""
        events = self._pop_outbox()
        if self._coordinator is None:
            self._router.send_events(events)
        elif events:
            self._coordinator.handle(events)
        self._shared.followers.send()
        return len(events)

    def landed(self, start: StartRound, summed: ModeTensors | None) -> None:
        """Under the lock: the sums are in what was `summed`."""
        if self._keeps_going:
            given = summed.samples_given() if isinstance(summed, FragmentedDeltas | Gradients) else {}
            self._newest = LandedRound(start, given)
            if self._books is not None:
                self._books.land(self._newest)
            if self._tally is not None:
                self._tally.land(self._newest)
        self._shared.at_rest = start.drain is not None
        if start.drain is not None:
            self._requested.clear()

    def completed(self, event: RoundCompleted) -> None:
        if self._coordinator is not None:  # a sum is no rank's event: it passes by the outbox
            self._coordinator.handle([event])

    def has_closed(self, number: int) -> bool:
        """Are this round's books closed, where they are kept here?"""
        return self._coordinator is None or self._coordinator.machine.version > number

    # A death.

    def _outlives_deaths(self) -> bool:
        """Would the others go on if a rank died now?"""
        try:
            self._require_recoverable(MembersLost())
        except LostError:
            return False
        return True

    def _exclude_slow(self, events: Sequence[Event]) -> None:
        if self._slow is None or self._coordinator is None:
            return
        for event in events:
            if isinstance(event, TaskFinished) and event.samples and event.rank in self._coordinator.machine.members:
                work = self._coordinator.machine.members[event.rank].current
                if work is None or work.task.number != event.task:
                    continue  # so short that its beginning came with its end
                slices = len(work.task.slices)
                slow = self._slow.observe(event.rank, event.samples / slices, event.seconds / slices)
                if slow and self._outlives_deaths() and self._enough_without(event.rank):
                    self.watchdog.exclude(event.rank, "slow")

    def _enough_without(self, rank: int) -> bool:
        """Who crawls is better than a job that ends; who hangs is not, as the job would end without being saved."""
        members = self._plane.members
        left = set(members) - self.watchdog.excluded.keys() - {rank}
        return too_few(len(left), len(members), self._options.least_ranks) is None

    def _admit(self) -> bool:
        """Let another rank join, or join, if the main thread asks for it. MembersLost where somebody has died after
        all have agreed."""
        admit, self._shared.admit = self._shared.admit, None
        if admit is not None:
            self._agree(admit)
        return admit is not None

    def _recover(self, failure: MembersLost | DamagedError) -> None:
        """Go on with those who are left. Raises the failure where that cannot be."""
        self._require_recoverable(failure)
        going_on = False
        while not going_on:
            try:
                self._recover_once(failure)
                going_on = True
            except (MembersLost, DamagedError) as another:  # while the first tasks were handed out
                failure = another

    def _recover_once(self, failure: MembersLost | DamagedError) -> None:
        before = self._plane.members
        self._damaged = failure.sender if isinstance(failure, DamagedError) else None
        self._agree()
        self._damaged = None  # told
        self._in_vain += self._plane.members == before
        if self._in_vain > MOST_IN_VAIN:
            raise LostError(
                f"ranks have begun anew {self._in_vain} times, though nobody has gone: {failure}"
            ) from failure

    def _agree(self, admit: Callable[[], None] | None = None) -> None:
        """With all members, which are others now, on how to go on. `admit` lets one join; None: some have gone."""
        began = time.monotonic()
        before = self._plane.members
        mending = Mending(
            self._plane,
            self._report,
            lambda reports: self._decided(reports, before, began),
            self._given,
            self._options.timeout_seconds,
            admit,
        )
        recovered = mending.run()
        decision = recovered.decision
        for rank in (joined := set(decision.survivors).difference(before)):
            self._deaths.pop(rank, None)
            self.watchdog.readmit(rank)
        if joined:
            self._share_travel()
        leads = self._plane.rank == decision.survivors[0]
        if decision.action is Action.GIVE_WAY:
            raise CutOffError(self._cut_off(before, decision.survivors))
        if leads and decision.books is None:  # whose word ends the others
            raise LostError(BOOKS_LOST)
        if decision.action is Action.END and TOO_FEW not in self._requested:
            self._requested.append(TOO_FEW)
            if leads:
                complain(too_few(len(decision.survivors), len(before), self._options.least_ranks) or TOO_FEW)
        self._rounds.drop()
        self._carry_out(recovered, began)

    def _share_travel(self) -> None:
        """Whoever joins knows which buffers travel now, and no list of another mode: all begin that with these."""
        shared = self._shared
        with shared.changed:
            assert not isinstance(shared.deltas, SegmentedDeltas), "nobody joins a job by a plan"
            tail = self._rounds.gradients.tail if shared.deltas is None else shared.deltas.tail
            shared.travel = list(tail.travel)
            self._rounds.gradients.tail.travel = list(tail.travel)

    @property
    def _hosts(self) -> dict[int, str]:
        return {rank: process.host for rank, process in self.watchdog.processes.items()}

    def _cut_off(self, before: Sequence[int], survivors: Sequence[int]) -> str:
        hosts = self._hosts
        away = ", ".join(dict.fromkeys(hosts[rank].split()[0] for rank in unseen(before, survivors, hosts)))
        return (
            f"{len(survivors)} of {len(before)} ranks are left, and the others, on {away}, may live and go on without"
            " them: they end, and save nothing; once the others have ended, too, go on with --resume"
        )

    def _carry_out(self, recovered: Recovered, began: float) -> None:
        try:
            self._go_on(recovered)
        finally:  # another death may break it off, and the next decision does not know of these
            for death in recovered.decision.deaths:
                if death.rank not in self._deaths:
                    self._deaths[death.rank] = replace(death, recovered_seconds=round(time.monotonic() - began, 6))
                    self._on_death(self._deaths[death.rank])
            for rank in recovered.decision.damaged:
                seconds = round(time.monotonic() - began, 6)
                self._on_damage(Damage(rank, recovered.decision.version, seconds))

    def _require_recoverable(self, failure: MembersLost | DamagedError) -> None:
        if not self._keeps_going:
            raise failure if isinstance(failure, DamagedError) else LostError(str(failure)) from failure

    def _report(self) -> Report:
        shared = self._shared
        with shared.changed:
            shared.recovering = True
            told = [shared.outbox.popleft() for _ in range(len(shared.outbox))]
            self._requested += [event.reason for event in told if isinstance(event, DrainRequested)]
            shared.outbox.extend(event for event in told if isinstance(event, SettingsChanged))
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
                at_rest=shared.at_rest,
                evaluating=shared.evaluating,
                requested=tuple(self._requested),
                books=self._books,
                damaged=self._damaged,
                cap=shared.cap,
            )

    def _given(self) -> Sequence[Part] | None:
        shared = self._shared
        with shared.changed, shared.order:
            if isinstance(deltas := shared.deltas, FragmentedDeltas):
                anchor = torch.cat([part.anchor.cpu() for part in deltas.parts])  # in the host's memory
                return parts_of(Anchor(anchor, deltas.velocity, tuple(deltas.tail.travel)))
            # The step of the newest round is made, and the main thread does nothing to the weights meanwhile.
            if shared.worker.version < shared.landed or shared.main_thread is not MainThread.WAITING:
                return None
            assert isinstance(self._rounds.gradients, Gradients)
            buffers, travel = self._rounds.gradients.shared_buffers.cpu(), list(self._rounds.gradients.tail.travel)
            return parts_of_state({**self._state(), "shared buffers": buffers, "travel": travel})

    def _decided(self, reports: Mapping[int, Report], before: Sequence[int], began: float) -> Decision:
        """Asked on the first of the survivors."""
        # Where all end with the first rank, which is here, nobody else goes on.
        apart = unseen(before, tuple(reports), self._hosts) if self._plane.outlives_first else ()
        decision = decide(reports, len(before), self._options.least_ranks, len(apart))
        if decision.action is Action.GO_BACK and self._tally is not None:
            decision = begun_anew(decision, reports, self._tally_of(decision))
        newest, version = decision.newest, decision.version
        books = self._books or Books([], version=version)
        landed = newest.samples if newest is not None and books.version < version else {}
        deaths = dict(self._deaths)
        for rank in set(decision.survivors).difference(before):  # it is another process now
            deaths.pop(rank, None)
        for rank in sorted(set(before).difference(decision.survivors, deaths)):
            held = sum(task.samples for task in books.tasks.get(rank, ()))
            known = self._coordinator is not None and self._coordinator.machine.members[rank]
            deaths[rank] = Death(
                rank=rank,
                round=version,
                activity=known.activity.name.lower() if known else "unknown",
                noticed_seconds=round(began - self._heard.get(rank, began), 6),
                recovered_seconds=0.0,  # not yet
                samples_returned=held - landed.get(rank, 0),
                cause=self.watchdog.excluded.get(rank, "died"),
            )
        return decision._replace(deaths=tuple(deaths.values()))

    def _tally_of(self, decision: Decision) -> Tally:
        """Of all that counts: this rank may be behind."""
        assert self._tally is not None
        tally = copy.deepcopy(self._tally)
        if self._plane.rank in decision.behind and decision.newest is not None:
            tally.land(decision.newest)
        return tally

    def _go_on(self, recovered: Recovered) -> None:
        shared, decision = self._shared, recovered.decision
        behind = self._plane.rank in decision.behind
        with shared.changed, shared.order:
            computes = shared.worker.current
            dropped = shared.worker.recover(decision.version, behind).dropped
            shared.void |= computes is not None and shared.worker.current is None
            if isinstance(recovered.adopted, Anchor):
                assert isinstance(shared.deltas, FragmentedDeltas)
                shared.deltas.catch_up(*recovered.adopted)
            elif isinstance(shared.deltas, FragmentedDeltas):
                shared.deltas.take_back()
            else:
                shared.adopted = recovered.adopted
                shared.marked.clear()
                assert isinstance(self._rounds.gradients, Gradients)
                self._rounds.gradients.begin_anew()
            shared.landed, self._newest = decision.version, decision.newest
            if behind and self._tally is not None and decision.newest is not None:
                self._tally.land(decision.newest)
            self._go_on_at_rest(decision)
            shared.requests.clear()
            shared.admit = None
            shared.recovering = False
            shared.recoveries += 1
            shared.changed.notify_all()
        self._router.begin_anew(recovered.early)
        for task in dropped:
            self._on_dropped(task)
        self._books = decision.books
        if self._plane.leads:
            if self._coordinator is None:
                self._coordinator = self._succeed()
            self._coordinator.go_on(decision, recovered.reports)
        before, self.watchdog = self.watchdog, self._make_watchdog()
        self.watchdog.processes, self.watchdog.excluded = before.processes, before.excluded
        if self._slow is not None and self._options.slow_factor is not None:
            self._slow = SlowRanks(self._options.slow_factor)  # another process may take a rank's place

    def _go_on_at_rest(self, decision: Decision) -> None:
        """Whoever comes out of a rest has done all of it, as has everybody else."""
        shared = self._shared
        taken = shared.phase is Phase.RESTING and shared.drained is None  # by the main thread
        shared.rest_again |= taken and decision.rest_again  # it may not have heard of the death before yet
        if decision.rest_again or not taken:
            shared.phase, shared.drained = Phase.TRAINING, None
        shared.at_rest = decision.rest_again
