"""When a round starts, who contributes, and who works on which samples: a pure state machine.

Events go in, instructions come out; there are no tensors, no MPI, no threads and no clock here. The engine
drives it over a data plane, the simulator over a virtual clock, property tests with arbitrary event orders.

Delayed mode (D >= 1). A rank starts another task while at most D of its contributions are not yet applied.
A round starts when nobody would send another event without it, or when the quorum is there and the *grace* for the
others is over: all at work are ready, or one of them has finished as many tasks as the grace after its first. It starts
only if every task then under way can still be applied within its bound: version + 1 - (version it started from) <= D. A
rank that was just released has not reported yet from where it starts; its *floor* is the least version that it can
start from.
With q = 1 a round needs a task of every rank, and a rank's n-th task may start only after round n - D: no rank
is more than D tasks ahead of the slowest, which is stale synchronous parallel (Ho et al. 2013).

Synchronous mode (D = 0). All ranks' tasks of a round are handed out together, and the next round's with them, so that
no rank waits for an instruction; each rank contributes to every round.

Near a milestone (checkpoint, end) tasks shrink with the samples left, so that ranks of unequal speed come to rest
together; then a drain round merges everything. The anchor of a round is the same on all ranks, so it is evaluated
without a rest: each rank does its part between two tasks.

Where all are to go back to a checkpoint, nothing more is handed out; once all rest, the machine waits to be told that
they have (`WentBack`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from hetsync.balance.shares import slices_of, whole_parts
from hetsync.data.ledger import Ledger, split
from hetsync.sync.members import (
    TRANSITIONS,
    Activity,
    Cause,
    Membership,
    RankState,
    Round,
    TaskState,
)
from hetsync.sync.messages import (
    AssignTask,
    Contributed,
    DrainRequested,
    Evaluated,
    Event,
    Holding,
    Instruction,
    RankJoined,
    RankLeft,
    RankWithdrew,
    RoundCompleted,
    Settings,
    SettingsChanged,
    SharesChanged,
    Standing,
    StartRound,
    Task,
    TaskDropped,
    TaskFinished,
    TaskSpoiled,
    TaskStarted,
    WentBack,
)
from hetsync.sync.milestones import ALL_LEFT, ROLLBACK, Marks, Milestone, Milestones, Rests, Snapshots, no_marks
from hetsync.sync.units import AverageUnits

LEAST_TASKS_HELD = 2  # the one that a rank computes and the next, which it goes on with before it is given more
EVENTS_KEPT = 40


class ProtocolError(AssertionError):
    """An event that cannot happen in this state: an internal error, with the events before it."""


class RoundStateMachine:
    """Turns each event into instructions, by the rules above."""

    def __init__(
        self,
        shares: Mapping[int, int],
        settings: Settings,
        ledger: Ledger,
        milestones: Milestones,
        version: int = 0,
        evaluations: Marks = no_marks,
        least_slice: int = 2,
    ) -> None:
        """`shares` are samples a slice by live rank; `version` the anchor that all ranks hold now.

        All ranks rest at the milestones; at `evaluations` the anchor is evaluated. No slice has fewer samples than
        `least_slice` where that can be helped.
        """
        self.settings = settings
        self.least_slice = least_slice
        self.caps: Mapping[int, int | None] = {}  # the most samples of a slice, of ranks for which that is known
        self.ledger = ledger
        self.version = version  # rounds completed
        self._membership = Membership(shares, version, settings)
        self.members: Mapping[int, RankState] = self._membership.members  # the live ranks
        self.tasks_held = LEAST_TASKS_HELD  # by each rank, where no evaluation is near
        self.units = AverageUnits()  # a sample, as tasks are told
        self.staleness: Counter[int] = Counter()
        self.samples_by_rank: Counter[int] = Counter()
        self.snapshots = Snapshots(evaluations, ledger.applied)
        self.rests = Rests(milestones, ledger.applied)
        self._rounds: dict[int, Round] = {}  # under way
        self._next_round = version
        self._next_task = 0
        self._pending_settings: Settings | None = None
        self._ended = False
        self._waits = False  # at rest, for all to go back to a checkpoint
        self._history: deque[Event] = deque(maxlen=EVENTS_KEPT)  # for an event that cannot happen

    # What the driver asks.

    @property
    def ended(self) -> bool:
        """The final drain round is complete."""
        return self._ended

    @property
    def full_set(self) -> int:
        """Samples in one contribution of every live rank."""
        return self.settings.accumulation * self.batch

    @property
    def batch(self) -> int:
        """B, samples in one slice of every live rank."""
        return self._membership.batch

    def waited_for(self) -> list[int]:
        """Ranks whose next event would move the job on."""
        return [rank for rank, member in self.members.items() if member.working or rank in self.snapshots.awaited]

    @property
    def standing(self) -> Standing:
        """What a copy of the books lacks."""
        drain = any(under_way.start.drain and under_way.start.evaluate for under_way in self._rounds.values())
        return Standing(
            self.version,
            self.settings,
            self.rests.next,
            self.snapshots.due_from(at_drain=drain),
            self._pending_settings,
            self.rests.requested,
            tuple(sorted(self.staleness.items())),
            self._waits,
            self.units.sums,
        )

    def resume(
        self,
        standing: Standing,
        holdings: Mapping[int, Holding],
        *,
        next_task: int,
        owed: Mapping[int, int],
        drained: StartRound | None,
        rest_again: bool,
    ) -> None:
        """Before `first_instructions`: go on where another machine has stopped.

        Args:
            standing: what that one knew.
            holdings: of the ranks, by rank; the ledger holds the samples of their tasks.
            next_task: all earlier numbers may have been used.
            owed: ranks that are still at an evaluation, with its round.
            drained: the newest round, if it was a drain.
            rest_again: its rest was not over: all come to it once more.
        """
        self._next_task = next_task
        self._pending_settings = standing.pending
        self.units.sums = standing.units
        self.staleness = Counter(dict(standing.staleness))
        for rank, holding in holdings.items():
            self._resume_member(rank, holding)
        self.rests.resume(standing.rest, standing.requested)
        evaluation, following = standing.evaluation, self.snapshots.next
        if drained is not None and rest_again:
            assert drained.drain is not None
            self.rests.repeat(Milestone(self.ledger.applied, drained.drain, drained.final))
            evaluation = self.ledger.applied if drained.evaluate else evaluation
        elif drained is not None and (
            drained.final
            or standing.version <= drained.number  # that machine did not know that it was complete
            or standing.goes_back  # nor that they have
        ):
            self._after_drain(drained)
            evaluation = following if drained.evaluate else evaluation
        self.snapshots.resume(evaluation, owed)

    def _resume_member(self, rank: int, holding: Holding) -> None:
        member = self.members[rank]
        ready = [TaskState(held.task, held.version) for held in holding.finished]
        current = None if holding.current is None else TaskState(holding.current.task, holding.current.version)
        if holding.withdrawn:
            member.withdrawn = True
            self._membership.set_share(rank, 0)
        self._membership.resume(rank, ready, current, self.version)

    def first_instructions(self) -> list[Instruction]:
        """The first tasks, before any event."""
        return self._decide()

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; returns what to tell the ranks, in order. Norms and caps (`NormMeasured`, `CapFound`)
        change nothing here."""
        self._history.append(event)
        match event:
            case TaskStarted():
                self._on_task_started(event)
            case TaskFinished():
                self._on_task_finished(event)
            case TaskSpoiled():
                return [*self._on_task_spoiled(event), *self._decide()]
            case Contributed():
                self._on_contributed(event)
            case RoundCompleted():
                self._on_round_completed(event)
            case Evaluated():
                if not self.snapshots.record_part(event.rank, event.round, event.part):
                    raise self._error(f"rank {event.rank} was not asked to evaluate round {event.round}")
            case SettingsChanged():
                self._on_settings_changed(event)
            case SharesChanged():
                for rank, share in event.shares.items():
                    self._membership.set_share(rank, 0 if self._member(rank).withdrawn else share)
            case DrainRequested():
                if event.reason == ROLLBACK:
                    self.rests.go_back(self.ledger.applied)
                else:
                    self.rests.request(self.ledger.frontier, event.reason)
            case WentBack():
                self._on_went_back(event)
            case RankLeft():
                self._on_rank_left(event)
            case RankWithdrew():
                self._on_rank_withdrew(event)
            case RankJoined():
                if event.rank in self.members:
                    raise self._error(f"rank {event.rank} is a member already")
                self._membership.add(event.rank, event.share, event.version)
        return self._decide()

    # Events.

    def _on_task_started(self, event: TaskStarted) -> None:
        member = self._member(event.rank)
        blocked = member.activity is Activity.BLOCKED
        self._move(member, Cause.STARTED)
        state = member.queued.popleft()
        if state.task.number != event.task:
            raise self._error(f"rank {event.rank} started another task")
        if event.version < member.floor:
            raise self._error(f"rank {event.rank} started below its floor {member.floor}")
        state.version = member.floor = event.version
        member.current = state
        if blocked:
            self._membership.check_bound(event.rank, self._next_round)

    def _on_task_finished(self, event: TaskFinished) -> None:
        member = self._member(event.rank)
        state = member.current
        if state is None or state.task.number != event.task:
            raise self._error(f"rank {event.rank} finished another task")
        member.current = None
        if state.task.synchronous_round is None:
            member.ready.append(state)
            self._membership.recount(event.rank)
        self._membership.needs_work.add(event.rank)
        self._move(member, self._cause_of_finish(member))

    def _on_task_spoiled(self, event: TaskSpoiled) -> list[Instruction]:
        member = self._member(event.rank)
        state = member.current
        if state is None or state.task.number != event.task:
            raise self._error(f"rank {event.rank} spoiled another task")
        if state.task.synchronous_round is not None:  # goes on; its round's sum will be told as spoiled
            return []
        member.current = None
        self.ledger.give_back(event.task)
        self._membership.all_need_work()
        member.come_sooner()
        self._move(member, self._cause_of_finish(member))
        return [TaskDropped(event.rank, event.task)]

    def _cause_of_finish(self, member: RankState) -> Cause:
        if not member.queued:
            return Cause.FINISHED_NOTHING_QUEUED
        return Cause.FINISHED_MAY_START if member.may_start_next(self.version) else Cause.FINISHED_AT_BOUND

    def _on_contributed(self, event: Contributed) -> None:
        member = self._member(event.rank)
        taken = [state for state in member.ready if state.task.number <= event.task]
        if not taken or event.round not in self._rounds:
            raise self._error("nothing to take, or no such round")
        if event.rank not in self._rounds[event.round].unconfirmed:
            raise self._error(f"rank {event.rank} was not asked")
        for state in taken:
            self._count_applied(event.rank, state, event.round - state.version)
        member.ready = member.ready[len(taken) :]
        member.in_flight += taken
        self._membership.recount(event.rank)
        self._rounds[event.round].unconfirmed.discard(event.rank)
        self._complete_rounds()

    def _count_applied(self, rank: int, state: TaskState, staleness: int) -> None:
        if not 0 <= staleness <= state.task.delay_bound:
            raise self._error(f"rank {rank}'s task {state.task.number} is applied with staleness {staleness}")
        self.staleness[staleness] += 1
        self.samples_by_rank[rank] += state.samples

    def _on_round_completed(self, event: RoundCompleted) -> None:
        if event.round not in self._rounds:
            raise self._error("no such round")
        self._rounds[event.round].summed = True
        self._rounds[event.round].summed_samples = event.samples
        self._rounds[event.round].spoiled = event.spoiled
        self._complete_rounds()

    def _complete_rounds(self) -> None:
        """Book the rounds that are over, in order."""
        while (over := self._rounds.get(self.version)) is not None and self._is_over(over):
            del self._rounds[self.version]
            self.version += 1
            for rank, member in self.members.items():
                if member.in_flight:
                    self._book(rank, member, over)
                if member.activity is Activity.BLOCKED and member.may_start_next(self.version):
                    self._move(member, Cause.RELEASED)
                    member.floor = self.version
            self.snapshots.round_applied(over.start.number, self.ledger.applied)
            if over.start.drain is not None:
                self._on_drained(over.start)

    def _is_over(self, under_way: Round) -> bool:
        if not under_way.summed or under_way.unconfirmed:
            return False
        if under_way.summed_samples in (None, under_way.samples):
            return True
        return under_way.summed_samples == under_way.samples - self._returned_samples(under_way.start.number)

    def _returned_samples(self, synchronous_round: int) -> int:
        states = [state for member in self.members.values() for state in member.in_flight if state.returned]
        return sum(state.samples for state in states if state.task.synchronous_round == synchronous_round)

    def _book(self, rank: int, member: RankState, over: Round) -> None:
        started = over.start
        in_flight, member.in_flight = member.in_flight, []
        for state in in_flight:
            if state.task.synchronous_round not in (None, started.number):
                member.in_flight.append(state)
                continue
            if state.returned:
                continue
            if over.spoiled:
                self.ledger.give_back(state.task.number)
                self._membership.all_need_work()
                continue
            self.ledger.book(state.task.number)
            if started.synchronous and state.samples:
                self._count_applied(rank, state, 0)

    def _on_drained(self, started: StartRound) -> None:
        self._waits = started.drain == ROLLBACK
        if self._all_withdrawn or self._waits:
            self.ledger.abandon()
            self.ledger.check(self.ledger.applied)
        else:
            self.ledger.check(self.rests.next.position)
        self._after_drain(started)

    def _after_drain(self, started: StartRound) -> None:
        if self._pending_settings is not None:
            self._adopt(self._pending_settings)
        self._reset_pace()
        self._membership.all_need_work()
        self._ended = started.final
        if not started.final and not self._waits:
            self.rests.advance(self.ledger.applied)

    def _on_went_back(self, event: WentBack) -> None:
        if not self._waits:
            raise self._error("nobody was to go back")
        self._waits = False
        self.ledger.go_back(event.applied)
        self.snapshots.go_back(event.applied)
        self.rests.advance(event.applied)
        self._membership.all_need_work()

    def _on_settings_changed(self, event: SettingsChanged) -> None:
        self._reset_pace()
        if event.settings.synchronous == self.settings.synchronous:
            self._adopt(event.settings)
        else:
            self._pending_settings = event.settings  # the two modes never overlap: drain between them
            self.rests.bring_forward(self.ledger.frontier, "mode change")

    def _adopt(self, settings: Settings) -> None:
        self.settings, self._pending_settings = settings, None
        self._membership.adopt(settings)

    def _reset_pace(self) -> None:
        """At rest, and under new settings, nobody counts as ahead."""
        for member in self.members.values():
            member.pace = None

    def _on_rank_left(self, event: RankLeft) -> None:
        for number, state in self._member(event.rank).unapplied().items():
            self.ledger.give_back(number)
            if state.task.synchronous_round is not None:
                self._rounds[state.task.synchronous_round].samples -= state.samples
        self._membership.remove(event.rank)
        self.snapshots.remove_rank(event.rank)
        for under_way in self._rounds.values():
            under_way.unconfirmed.discard(event.rank)
        self._complete_rounds()

    def _on_rank_withdrew(self, event: RankWithdrew) -> None:
        member = self._member(event.rank)
        member.withdrawn = True
        for state in member.unfinished:
            own_round = state.task.synchronous_round
            if own_round is None or own_round >= self.version:  # else it had no samples, and its round is booked
                self.ledger.give_back(state.task.number)
                state.returned = True
        if not any(state.task.synchronous_round is not None for state in member.unfinished):
            member.current = None
            member.queued.clear()
            self._move(member, Cause.WITHDREW)
        self._membership.set_share(event.rank, 0)
        self._membership.all_need_work()
        self._complete_rounds()

    # Decisions.

    def _decide(self) -> list[Instruction]:
        if self._ended or self._waits:
            return []
        assigned = self._assign_synchronous() if self.settings.synchronous else self._assign_delayed()
        return assigned if self._rounds else assigned + self._start_round()

    def _available(self) -> int:
        """Samples that may be handed out before the next rest."""
        return 0 if self.rests.going_back else self.ledger.available(self.rests.next.position)

    def _held(self) -> int:
        """Tasks of a rank, what it computes and what is queued: no more than it must have where an evaluation is near,
        which comes where a round ends, or a rest, before which whoever asks first would get what is left."""
        due, ahead = self.snapshots.next, self.tasks_held * self.full_set
        near = due is not None and self.ledger.frontier + ahead > due
        scarce = len(self.members) > 1 and self._available() < ahead
        return LEAST_TASKS_HELD if near or scarce or self.snapshots.awaited else self.tasks_held

    def _assign_delayed(self) -> list[Instruction]:
        if not self._membership.needs_work:
            return []
        out: list[Instruction] = []
        needs_work, self._membership.needs_work = sorted(self._membership.needs_work), set()
        for depth in range(1, self._held() + 1):
            for rank in needs_work:
                member = self.members[rank]
                computing = member.current is not None
                if computing + len(member.queued) < depth and (samples := self._task_samples(member)):
                    out.append(self._assign(rank, samples, self.ledger.frontier))
        return out

    def _task_samples(self, member: RankState) -> int:
        """A full task; near the milestone the rank's part of what is left, down to a quarter of a slice. What makes no
        slice is neither given nor left, where that can be helped."""
        available = self._available() if member.share else 0
        wanted, least = self.settings.accumulation * member.share, min(self.least_slice, member.share)
        if available < self.full_set:
            part = -(-available * member.share // self.batch)
            wanted = min(wanted, max(part, -(-member.share // 4), least))
            if member.share < 2 * least - 1:
                wanted -= wanted % least
        wanted = min(wanted, available)
        lacks = least - (available - wanted)  # of a slice that is left
        if 0 < lacks < least:
            wanted = wanted - lacks if wanted >= least + lacks else available
        return wanted

    def _assign_synchronous(self) -> list[Instruction]:
        out: list[Instruction] = []
        if self._next_round >= self.version + self.tasks_held:  # the most, found sooner than how many
            return out
        while self._next_round < self.version + self._held():
            position = self.ledger.frontier
            total = min(self.full_set, self._available())
            if not total:
                break
            shares = {rank: member.share for rank, member in self.members.items()}
            parts = whole_parts(shares, total, self.least_slice, self.caps)
            out += [self._assign(rank, part, position, self._next_round, total) for rank, part in parts.items()]
            out.append(self._new_round(synchronous=True, samples=total))
        return out

    def _assign(
        self, rank: int, samples: int, position: int, synchronous_round: int | None = None, round_samples: int = 0
    ) -> AssignTask:
        member = self.members[rank]
        slices = slices_of(samples, member.share, self.least_slice, self.caps.get(rank))
        number, self._next_task = self._next_task, self._next_task + 1
        spans = self.ledger.take(number, samples, self.rests.next.position)
        not_before = 0
        if synchronous_round is None and self.settings.quorum >= 1:
            not_before = member.keep_pace(self.version, self.settings.delay_bound)
        if member.activity is Activity.RESTING:
            member.floor = self.version
            not_before = max(not_before, self.version)
        task = Task(
            number=number,
            slices=split(spans, samples, slices),
            delay_bound=self.settings.delay_bound,
            position=position,
            not_before=not_before,
            synchronous_round=synchronous_round,
            round_samples=round_samples,
            share=member.share,
            units=self.units.per_sample,
        )
        member.queued.append(TaskState(task))
        at_bound = member.activity is Activity.RESTING and not member.may_start_next(self.version)
        self._move(member, Cause.ASSIGNED_AT_BOUND if at_bound else Cause.ASSIGNED)
        if synchronous_round is not None:  # part of its round from the start
            member.in_flight.append(member.queued[-1])
        else:
            self._membership.check_bound(rank, self._next_round)
        return AssignTask(rank, task)

    def _start_round(self) -> list[Instruction]:
        """No round is under way: may the next one start?"""
        if self._at_rest():
            rest, synchronous = self.rests.next, self.settings.synchronous
            if self._all_withdrawn:
                rest = Milestone(self.ledger.applied, ALL_LEFT, final=True)
            return [self._new_round(synchronous, frozenset(self._membership.ready), rest.reason, rest.final)]
        if self.settings.synchronous or not self._membership.ready:
            return []
        if self._membership.working:
            enough = self._quorum() and self._membership.grace_over
            if not enough or not self._membership.all_in_bound(self._next_round):
                return []
        return [self._new_round(contributors=frozenset(self._membership.ready))]

    def _at_rest(self) -> bool:
        if not self._membership.resting or self.snapshots.awaited:
            return False
        return self._all_withdrawn or not self._available()

    @property
    def _all_withdrawn(self) -> bool:
        """Have all withdrawn that had a share?"""
        return not self.batch

    def _quorum(self) -> bool:
        """Enough of a full set is ready. No rank counts for more than its own part: with q = 1, all must be."""
        return self._membership.quorum_samples >= self.settings.quorum * self.full_set

    def _new_round(
        self,
        synchronous: bool = False,
        contributors: frozenset[int] | None = None,
        drain: str | None = None,
        final: bool = False,
        samples: int = 0,
    ) -> StartRound:
        members = frozenset(self.members) if contributors is None else contributors
        # What is applied once the round has landed, as far as that is known.
        reaches = self.ledger.frontier if synchronous else self.ledger.applied + self._membership.ready_samples
        evaluate = self.snapshots.due(reaches)
        number, self._next_round = self._next_round, self._next_round + 1
        fragments, wire = self.settings.fragments, "float32" if drain is not None else self.settings.wire
        started = StartRound(number, members, self.ledger.applied, synchronous, drain, final, evaluate, fragments, wire)
        if evaluate and drain is None:  # at rest they evaluate together
            self.snapshots.request(number, self.members)
        self._rounds[number] = Round(started, set() if synchronous else set(members), samples)
        self._membership.round_started(number)
        return started

    # The rules of the machine.

    def _member(self, rank: int) -> RankState:
        member = self.members.get(rank)
        if member is None:
            raise self._error(f"rank {rank} is no member")
        return member

    def _move(self, member: RankState, cause: Cause) -> None:
        to = TRANSITIONS.get((member.activity, cause))
        if to is None:
            raise self._error(f"{cause.name} while {member.activity.name}")
        self._membership.set_activity(member, to)

    def _error(self, what: str) -> ProtocolError:
        events = "\n  ".join(map(str, self._history))
        return ProtocolError(f"{what}; version {self.version}; events so far:\n  {events}")
