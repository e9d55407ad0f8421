"""A virtual cluster for the state machine: ranks with scripted speeds, messages with scripted delays, one event queue.

It keeps books of its own (what was begun from which version, which samples reached the anchor) and compares
them with the state machine's at every step, so a test only has to run it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hetsync.data.ledger import Ledger, Span, length
from hetsync.sync.members import Activity
from hetsync.sync.messages import (
    AssignTask,
    Evaluated,
    Event,
    Instruction,
    RankJoined,
    RankLeft,
    RankWithdrew,
    RoundCompleted,
    Settings,
    StartRound,
    Task,
    TaskFinished,
)
from hetsync.sync.milestones import Evaluation, marks_every, rests_at
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.sync.worker import Worker


@dataclass
class RankStub:
    """One rank: its main thread (`worker`, `computing`, `finished`) and its communication thread (the rest)."""

    worker: Worker
    computing: bool = False
    evaluating: bool = False
    finished: TaskFinished | None = None  # synchronous: gradients are there, the round is not complete
    rounds: deque[StartRound] = field(default_factory=deque)  # known, not landed
    joined: bool = False  # the first of these
    snapshot: int | None = None  # a round whose anchor it has not evaluated yet


@dataclass
class OpenRound:
    """A round between its start and its sum."""

    start: StartRound
    missing: set[int]  # ranks that have not joined
    landing: set[int]  # ranks that take part and have not landed
    tasks: dict[int, list[Task]] = field(default_factory=dict)
    summed: bool = False


class VirtualCluster:
    """Runs a state machine to its end. `compute(rank, samples)` and the other callables return virtual seconds.

    Delays differ from message to message; from one sender to one receiver order is kept, as MPI keeps it.
    `land` is the time from a sum's completion to a rank's noticing it. `before(cluster, step)` returns events
    to slip in ahead of a step.
    """

    def __init__(
        self,
        machine: RoundStateMachine,
        compute: Callable[[int, int], float],
        delay: Callable[[], float] = lambda: 0.0,
        communicate: Callable[[], float] = lambda: 0.0,
        land: Callable[[], float] = lambda: 0.0,
        before: Callable[[VirtualCluster, int], list[Event]] = lambda cluster, step: [],
        evaluate: Callable[[int], float] = lambda rank: 0.0,
    ) -> None:
        self.machine, self.compute, self.evaluate, self.before = machine, compute, evaluate, before
        self.delay, self.communicate, self.land = delay, communicate, land
        self.now = 0.0
        self.stubs = {rank: RankStub(Worker(rank, machine.version)) for rank in machine.members}
        self.busy = dict.fromkeys(machine.members, 0.0)
        self.drains: list[tuple[int, str]] = []  # (samples applied, reason)
        self.starts: list[StartRound] = []
        self.evaluations: list[Evaluation] = []
        self.open_rounds: dict[int, OpenRound] = {}
        self.staleness: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()  # tasks by rank
        self.round_spans: dict[int, list[Span]] = {}
        self.applied = bytearray(machine.ledger.total)
        self.applied[: machine.ledger.applied] = b"\1" * machine.ledger.applied
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._last: dict[tuple[object, object], float] = {}  # (sender, receiver) -> last arrival
        self._tasks: dict[int, Task] = {}
        self._began: dict[int, int] = {}  # task -> version

    def run(self, steps: int = 1_000_000) -> None:
        self._dispatch(self.machine.first_instructions())
        for step in range(steps):
            for event in self.before(self, step):
                if isinstance(event, RankWithdrew):
                    self._withdraw(self.stubs[event.rank])
                else:
                    self.handle(event)
            if not self._queue:
                break
            self.now, _, action = heapq.heappop(self._queue)
            action()
        assert self.machine.ended, f"stuck; waited for {self.machine.waited_for()}"
        assert not self._queue
        assert sum(self.applied) == self.machine.ledger.applied
        if not self.all_withdrawn:
            assert set(self.applied) <= {1}, "some samples were not applied exactly once"
        assert self.staleness == self.machine.staleness

    def handle(self, event: Event) -> None:
        if isinstance(event, RankLeft):
            self._bury(event.rank)
        elif isinstance(event, RankJoined):
            self._welcome(event)
        self._dispatch(self.machine.handle(event))
        if (evaluation := self.machine.snapshots.pop_complete()) is not None:
            self.evaluations.append(evaluation)
        if len(self.stubs) <= 8 or next(self._ticket) % 16 == 0:  # dear with many ranks
            validate(self.machine)

    @property
    def all_withdrawn(self) -> bool:
        """Has every rank left its loop that had work? Then some samples are nobody's."""
        return not self.machine.batch

    @property
    def between_rounds(self) -> bool:
        """No contribution is half applied: membership may change. (Synchronous rounds not yet summed are redone.)"""
        return all(
            open_round.start.synchronous and not open_round.start.drain and not open_round.summed
            for number, open_round in self.open_rounds.items()
            if number >= self.machine.version
        )

    # Time and messages.

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._ticket), action))

    def _message(self, sender: object, receiver: object, delay: float, action: Callable[[], None]) -> None:
        arrival = max(self.now + delay, self._last.get((sender, receiver), 0.0))
        self._last[sender, receiver] = arrival
        self._at(arrival, action)

    def _report(self, rank: int, *events: Event) -> None:
        stub = self.stubs[rank]

        def arrive() -> None:
            for event in events:
                if self.stubs.get(rank) is stub:  # nobody listens to the dead
                    self.handle(event)

        self._message(rank, "coordinator", self.delay(), arrive)

    def _to_rank(self, rank: int, action: Callable[[RankStub], None], sender: str = "coordinator") -> None:
        stub = self.stubs[rank]
        seconds = self.delay() if sender == "coordinator" else self.land()
        self._message(sender, rank, seconds, lambda: self.stubs.get(rank) is stub and action(stub))

    def _dispatch(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, AssignTask):
                task = instruction.task
                assert task.delay_bound == self.machine.settings.delay_bound
                self._tasks[task.number] = task
                self._to_rank(instruction.rank, lambda stub, i=instruction: self._on_task(stub, i))
            else:
                self._check_start(instruction)
                self.starts.append(instruction)
                self.open_rounds[instruction.number] = OpenRound(instruction, set(self.stubs), set(self.stubs))
                for rank in self.stubs:
                    self._to_rank(rank, lambda stub, i=instruction: self._on_round(stub, i))

    def _check_start(self, start: StartRound) -> None:
        assert start.applied == self.machine.ledger.applied
        assert not self.starts or start.number == self.starts[-1].number + 1, "rounds start in order"
        if start.synchronous:
            assert start.drain or start.contributors == set(self.stubs)
        else:
            assert start.number == self.machine.version, "one round at a time"
            assert all(self.stubs[rank].worker._finished for rank in start.contributors), "work not finished"
        if start.drain:
            assert not any(n.snapshot is not None for n in self.stubs.values()), "drain while evaluating"
            assert not any(n.computing or n.worker.upcoming for n in self.stubs.values()), "drain while working"
            assert {r for r, n in self.stubs.items() if n.worker._finished} == start.contributors, "left behind"

    # The ranks.

    def _on_task(self, stub: RankStub, assigned: AssignTask) -> None:
        stub.worker.assign(assigned.task)
        self._tasks |= {task.number: task for task in stub.worker._tasks}  # without samples, where it withdrew
        self._advance(stub)

    def _advance(self, stub: RankStub, *events: Event) -> None:
        """The main thread: begin what may be begun."""
        rank = stub.worker.rank
        if not stub.computing and stub.finished is None and stub.snapshot is not None:
            number, stub.snapshot = stub.snapshot, None
            stub.computing = stub.evaluating = True
            self._at(self.now + self.evaluate(rank), lambda: self._score(stub, number))
        if not stub.computing and stub.finished is None and stub.worker.may_start():
            task, began = stub.worker.start_task()
            stub.computing = True
            self._began[task.number] = stub.worker.version
            seconds = self.compute(rank, task.samples)
            self.busy[rank] += seconds
            self._at(self.now + seconds, lambda: self._finish(stub, task, seconds))
            events = (*events, began)
        if events:
            self._report(rank, *events)

    def _score(self, stub: RankStub, number: int) -> None:
        rank = stub.worker.rank
        stub.computing = stub.evaluating = False
        if self.stubs.get(rank) is stub:
            self._advance(stub, Evaluated(rank, number, {"ranks": 1, str(rank): 1}))

    def _withdraw(self, stub: RankStub) -> None:
        """The loop ends: a delayed task is dropped, a synchronous one goes on without samples."""
        worker = stub.worker
        if stub.finished is None:
            self._report(worker.rank, worker.withdraw())
            stub.computing = stub.computing and (worker.current is not None or stub.evaluating)
            for task in [*worker._tasks, *([worker._current] if worker._current else [])]:
                self._tasks[task.number] = task
            self._advance(stub)

    def _finish(self, stub: RankStub, task: Task, seconds: float) -> None:
        rank = stub.worker.rank
        if self.stubs.get(rank) is not stub:
            return
        if stub.worker._current is None or stub.worker._current.number != task.number:
            return  # dropped
        finished = stub.worker.finish_task(seconds, 0.0)
        self.finished[rank] += 1
        stub.computing = False
        if task.synchronous_round is None:
            self._advance(stub, finished)
        else:  # its gradients are in; it goes on when the round is complete
            stub.finished = finished
        self._join(stub)

    def _on_round(self, stub: RankStub, start: StartRound) -> None:
        stub.rounds.append(start)
        self._join(stub)

    def _join(self, stub: RankStub) -> None:
        """The communication thread: collectives in order; a synchronous one when the rank's gradients are there."""
        if stub.joined or not stub.rounds:
            return
        start, rank = stub.rounds[0], stub.worker.rank
        if start.synchronous and not start.drain and rank in start.contributors and stub.finished is None:
            return
        stub.joined = True
        open_round = self.open_rounds[start.number]
        open_round.missing.discard(rank)
        if start.synchronous and not start.drain and rank in start.contributors:
            open_round.tasks[rank] = [self._tasks[stub.finished.task]]
        elif not start.synchronous and rank in start.contributors:
            open_round.tasks[rank] = [self._tasks[held.task.number] for held in stub.worker._finished]
            contributed, _ = stub.worker.contribute(start.number)
            self._report(rank, contributed)
        for task in (task for task in open_round.tasks.get(rank, []) if task.samples):
            staleness = start.number - self._began[task.number]
            assert 0 <= staleness <= task.delay_bound, f"staleness {staleness}, bound {task.delay_bound}"
            self.staleness[staleness] += 1
        if start.synchronous and start.drain:  # no collective
            open_round.summed = True
            self._to_rank(rank, lambda stub: self._landed(stub, start.number), sender="plane")
        else:
            self._look(open_round)

    def _look(self, open_round: OpenRound) -> None:
        if not open_round.missing and not open_round.summed:
            self._at(self.now + self.communicate(), lambda: self._sum(open_round))

    def _sum(self, open_round: OpenRound) -> None:
        if open_round.missing or open_round.summed:
            return
        open_round.summed = True
        spans = [
            span for rank in sorted(open_round.tasks) for p in open_round.tasks[rank] for s in p.slices for span in s
        ]
        self.round_spans[open_round.start.number] = spans
        for start, stop in spans:
            assert not any(self.applied[start:stop]), f"samples [{start}, {stop}) were applied before"
            self.applied[start:stop] = b"\1" * (stop - start)
        for rank in sorted(open_round.landing):
            self._to_rank(rank, lambda stub: self._landed(stub, open_round.start.number), sender="plane")

    def _landed(self, stub: RankStub, number: int) -> None:
        start = stub.rounds.popleft()
        stub.joined = False
        stub.worker.complete_round(number)
        stub.worker.version = number + 1
        open_round = self.open_rounds[number]
        open_round.landing.discard(stub.worker.rank)
        finished, stub.finished = stub.finished, None
        if start.evaluate and not start.drain:
            assert stub.snapshot is None, "one snapshot at a time"
            stub.snapshot = number
        if stub.worker.rank == 0:
            if open_round.start.drain:
                done = self.machine.ledger.frontier
                if not self.all_withdrawn:
                    assert sum(self.applied) == done == sum(self.applied[:done]), "a drain left something out"
                self.drains.append((done, open_round.start.drain))
            spans = self.round_spans.get(number, []) if start.synchronous and not start.drain else None
            self._report(0, RoundCompleted(number, samples=None if spans is None else length(spans)))
        self._advance(stub, *([finished] if finished else []))
        self._join(stub)

    # Membership.

    def _bury(self, rank: int) -> None:
        assert rank != 0
        del self.stubs[rank]
        self._last = {pair: when for pair, when in self._last.items() if rank not in pair}
        for open_round in self.open_rounds.values():
            open_round.missing.discard(rank)
            open_round.landing.discard(rank)
            if not open_round.summed:
                for task in (task for task in open_round.tasks.pop(rank, []) if task.samples):
                    self.staleness[open_round.start.number - self._began[task.number]] -= 1
                self._look(open_round)

    def _welcome(self, event: RankJoined) -> None:
        stub = self.stubs[event.rank] = RankStub(Worker(event.rank, event.version))
        self.busy.setdefault(event.rank, 0.0)
        for number, open_round in sorted(self.open_rounds.items()):
            if number >= event.version:  # it gives zeros to the rounds that started without it
                open_round.missing.add(event.rank)
                open_round.landing.add(event.rank)
                start = open_round.start._replace(evaluate=False)  # nobody asks it for a part
                self._to_rank(event.rank, lambda stub, i=start: self._on_round(stub, i))
        assert not stub.joined


def validate(machine: RoundStateMachine) -> None:
    """What must hold between any two events."""
    ledger = machine.ledger
    holding = 0
    for rank, member in machine.members.items():
        state = (member.activity.name, member.current is not None, len(member.queued), rank)
        assert (member.activity is Activity.COMPUTING) == (member.current is not None), state
        held = len(member.queued) + (member.current is not None)
        assert machine.settings.synchronous or held <= machine.tasks_held, state
        if member.activity is Activity.RESTING:
            assert not member.queued, state
        elif member.activity is not Activity.COMPUTING:
            assert member.queued, state
            begins = member.may_start_next(machine.version)
            assert begins == (member.activity is Activity.STARTING), state
        assert all(work.version >= 0 for work in member.ready), state
        holding += sum(work.task.samples for work in member.unapplied().values())
    validate_sums(machine)
    assert ledger.outstanding() == holding
    assert ledger.applied + holding + length(ledger._returned) == ledger.frontier, "samples got lost"


def validate_sums(machine: RoundStateMachine) -> None:
    """The membership's sums are those of its members."""
    membership, members, slices = machine._membership, machine.members, machine.settings.accumulation
    assert machine.batch == sum(member.share for member in members.values())
    assert membership.ready == {rank for rank, member in members.items() if member.ready}
    assert membership.ready_samples == sum(work.task.samples for m in members.values() for work in m.ready)
    assert membership.resting == all(member.activity is Activity.RESTING for member in members.values())
    assert membership.working == any(member.working for member in members.values())
    ready = {rank: sum(work.task.samples for work in member.ready) for rank, member in members.items()}
    assert membership.quorum_samples == sum(min(ready[rank], slices * m.share) for rank, m in members.items())
    awaited = [member for member in members.values() if member.working and not member.ready]
    used = [member for member in members.values() if len(member.ready) > machine.settings.grace_within_bound]
    assert membership.grace_over == (not awaited or used != [])
    if not machine.settings.synchronous and ledger_has_samples(machine):
        lacking = {
            r for r, m in members.items() if m.share and not m.withdrawn and len(m.queued) + (m.current is not None) < 2
        }
        assert lacking <= membership.needs_work, "a rank lacks work and nobody knows"


def ledger_has_samples(machine: RoundStateMachine) -> bool:
    return bool(machine.ledger.available(machine.rests.next.position))


def make_machine(
    shares, settings: Settings, total: int, every: int | None = None, evaluate: int | None = None, **arguments
) -> RoundStateMachine:
    """A state machine over `total` samples with a drain after each `every` and an evaluation after each `evaluate`."""
    if not isinstance(shares, dict):
        shares = dict(enumerate(shares))
    applied = arguments.pop("applied", 0)
    rests, evaluations = rests_at(marks_every(every, total), "checkpoint", total), marks_every(evaluate, total)
    return RoundStateMachine(shares, settings, Ledger(total, applied), rests, evaluations=evaluations, **arguments)
