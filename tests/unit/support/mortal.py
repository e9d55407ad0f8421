"""Jobs whose ranks die: the real state machine, workers, books and recoveries, between which messages wander and rounds
land in any order. Weights are integers in which each sample has a digit of its own.

What a plane promises is played: messages from one rank to another keep their order, sums need all members, and after a
death the survivors get a new plane together, while what the old one carried is gone. Messages that pass through leaders
are no others: what a dead leader had not passed on is lost with all that the old plane carried.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hetsync.balance.shares import apportion
from hetsync.data.ledger import Ledger, length, merged
from hetsync.sync.coordinator import as_messages
from hetsync.sync.lost_books import Tally, begun_anew
from hetsync.sync.messages import (
    AssignTask,
    DrainRequested,
    Evaluated,
    Event,
    RoundCompleted,
    Settings,
    SettingsChanged,
    SharesChanged,
    Standing,
    StartRound,
    Task,
    TaskDropped,
    WentBack,
)
from hetsync.sync.milestones import EPOCH, ROLLBACK, TOO_FEW, marks_every, rests_at
from hetsync.sync.recovery import (
    Action,
    Agreed,
    Books,
    CatchUp,
    Decision,
    GoOn,
    LandedRound,
    Ready,
    Recovery,
    Report,
    Send,
    decide,
    first_standing,
    keepers,
    rebuilt,
    spans_of,
    still_to_tell,
)
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.sync.worker import Worker

NOTICES = (AssignTask, TaskDropped, StartRound, Standing)
OF_RECOVERY = (Report, Decision, Ready, Agreed)


def worth(tasks: list[Task]) -> int:
    """What some tasks move the weights by."""
    return sum(4**position for start, stop in spans_of(tasks) for position in range(start, stop))


class Weights:
    """`Deltas` in integers: u + X = w + P."""

    def __init__(self) -> None:
        self.w = self.u = self.P = self.X = 0
        self.in_flight = self.folded = False

    def finish(self, progress: int) -> None:
        self.u += progress
        if self.in_flight and not self.folded:
            self.X -= self.P
            self.folded = True
        self.P = self.u + self.X - self.w

    def pack(self, contribute: bool) -> int:
        self.in_flight = contribute
        return self.P if contribute else 0

    def land(self, anchor: int) -> None:
        own = self.P if self.in_flight and not self.folded else 0
        self.X += anchor - self.w - own
        self.P -= own
        self.w, self.in_flight, self.folded = anchor, False, False

    def apply(self) -> bool:
        if self.folded:
            return False
        self.u, self.X = self.u + self.X, 0
        return True

    def void(self) -> None:
        """The contribution under way returns: once folded, X is minus it."""
        assert self.in_flight
        if self.folded:
            self.P, self.X = self.P - self.X, 0
        self.in_flight = self.folded = False

    def step(self, anchor: int) -> None:
        """Synchronous mode, and drains: all that there is."""
        assert not self.P
        assert not self.in_flight
        self.w = self.u = anchor
        self.X = 0

    def check(self) -> None:
        assert self.u + self.X == self.w + self.P


@dataclass(frozen=True)
class Job:
    shares: tuple[int, ...]
    settings: Settings
    total: int
    rest_every: int | None = None
    evaluate_every: int | None = None
    deaths: int = 3  # at most
    death_chance: float = 0.01  # a step
    death_in_recovery: float = 0.02  # a step of one
    withdrawals: float = 0.0
    spoils: float = 0.0  # of tasks that are finished in delayed mode
    changes: float = 0.0  # of shares, settings; rests that are asked for
    least_ranks: int | None = 1
    goes_back: bool = False  # to a checkpoint, each of which is an epoch's end, where no books are left: often
    seed: int = 0


@dataclass
class Rank:
    number: int
    worker: Worker
    books: Books | None
    tally: Tally
    weights: Weights = field(default_factory=Weights)
    landed: int = 0
    newest: LandedRound | None = None
    rounds: deque[StartRound] = field(default_factory=deque)  # to be joined, in order
    joined: StartRound | None = None  # and not landed
    outbox: deque[Event] = field(default_factory=deque)
    draining: bool = False
    resting: bool = False  # at the rest of its newest round
    at_rest: bool = False  # the same, or it is to come to it once more
    ended: bool = False
    snapshot: tuple[int, int] | None = None  # round and anchor, to be evaluated
    requested: list[str] = field(default_factory=list)
    rests: list[tuple[int, str]] = field(default_factory=list)  # that it has come out of: position, reason
    noticed: bool = False  # that the plane is broken: it waits for another
    is_to_report: bool = False  # the plane is new
    recovery: Recovery | None = None
    catch_up: CatchUp | None = None  # awaited
    adopted: tuple[int, LandedRound | None] | None = None  # put aside until the agreement

    @property
    def recovers(self) -> bool:
        return self.noticed or self.is_to_report or self.recovery is not None


class World:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.dice = random.Random(job.seed)
        self.milestones = rests_at(marks_every(job.rest_every, job.total), EPOCH, job.total)
        self.evaluations = marks_every(job.evaluate_every, job.total) if job.evaluate_every else lambda position: None
        members = range(len(job.shares))
        standing = first_standing(job.settings, self.milestones, self.evaluations)
        self.ranks = {
            rank: Rank(
                rank,
                Worker(rank),
                Books([standing]) if rank in keepers(members) else None,
                Tally(job.settings, self.evaluations),
            )
            for rank in members
        }
        self.members = tuple(members)  # of the plane
        self.channels: dict[tuple[int, int], deque[object]] = {}
        self.sums: dict[int, dict[int, tuple[int, list[Task]]]] = {}  # by round and rank: addend, tasks
        self.batch = sum(job.shares)
        self.agreed_on = self.members
        self.mending = False
        self.epochs_over: list[tuple[int, str]] = []  # rests of a rank that has come out of the newest
        self.lost = False  # all who kept the books have died
        self.entered: dict[int, set[int]] = {}  # who has come to the rest of a version
        self.gone_back: set[int] = set()  # at the rest for that
        self.over: set[int] = set()  # versions whose rest somebody has come out of
        self.history: dict[int, list[Task]] = {}  # tasks of rounds that count
        self.anchors = {0: 0}  # by version
        self.evaluated: list[int] = []  # samples applied
        self.counts: Counter[str] = Counter()
        self.action = Action.GO_ON
        machine = RoundStateMachine(
            dict(enumerate(job.shares)), job.settings, Ledger(job.total), self.milestones, 0, self.evaluations
        )
        self._host(machine)

    # The coordinator.

    def _host(self, machine: RoundStateMachine) -> None:
        self.machine, self.host = machine, self.members[0]
        self._deliver = as_messages(machine, self._send_notices, keepers(self.members))
        self._deliver(machine.first_instructions())

    def _send_notices(self, by_rank) -> None:
        for rank, notices in by_rank.items():
            for notice in notices:
                self._send(self.host, rank, notice)

    def _send(self, source: int, to: int, message: object) -> None:
        self.channels.setdefault((source, to), deque()).append(message)

    def _coordinate(self, event: Event) -> None:
        self._deliver(self.machine.handle(event))
        if (found := self.machine.snapshots.pop_complete()) is not None:
            assert len(found.parts) == len(self.members)
            assert set(found.parts) == {self.anchors[found.round + 1]}
            self.evaluated.append(found.samples_applied)

    # What may happen next.

    def run(self) -> None:
        steps = 0
        while not self.lost and not all(rank.ended for rank in self.ranks.values()):
            steps += 1
            assert steps < 100_000, "stuck"
            if self._death_strikes():
                self._kill(self.dice.choice([1, 1, 1, 2]))
                continue
            moves = self._moves()
            assert moves, f"deadlock: {self.machine.waited_for()} are awaited, {self.machine._history}"
            move, argument = self.dice.choice(moves)
            move(argument)
        if self.lost:
            assert self.counts["deaths"] >= 3, "there are three copies of the books"
        else:
            self._check_end()

    def _moves(self) -> list[tuple[Callable, object]]:
        moves: list[tuple[Callable, object]] = []
        for rank in self.ranks.values():
            self._add_moves(rank, moves)
        if self.mending and all(rank.noticed for rank in self.ranks.values()):
            moves.append((self._mend, None))
        if self.dice.random() < self.job.changes and not self._recovering() and not self.machine.ended:
            moves.append((self._change, None))
        return moves

    def _add_moves(self, rank: Rank, moves: list) -> None:
        if (main := self._main_move(rank)) is not None:
            moves.append((main, rank))
        if rank.noticed:
            return
        if self.mending:
            moves.append((self._notice, rank))
        if rank.is_to_report:
            moves.append((self._begin_recovery, rank))
            return
        channels = self.channels.items()
        moves += [(self._receive, key) for key, channel in channels if channel and key[1] == rank.number]
        if rank.catch_up is not None and rank.catch_up.donor in self.ranks:
            moves.append((self._adopt, rank))
        if rank.recovery is not None:
            return
        if rank.outbox:
            moves.append((self._flush, rank))
        if rank.joined is not None:
            if len(self.sums.get(rank.joined.number, ())) == len(self.members):
                moves.append((self._land, rank))
        elif rank.rounds and not rank.resting and self._may_join(rank):
            moves.append((self._join, rank))

    def _recovering(self) -> bool:
        return self.mending or any(rank.recovers for rank in self.ranks.values())

    # A rank's main thread.

    def _main_move(self, rank: Rank) -> Callable | None:
        worker = rank.worker
        if rank.resting:
            return self._rest_move(rank)
        if rank.ended:
            return None
        if worker.current is not None:
            own = worker.current.synchronous_round
            return self._finish if own is None or rank.landed > own else None
        if rank.snapshot is not None:
            return self._evaluate
        if worker.version < rank.landed and rank.weights.apply():
            worker.version = rank.landed
        return self._start if worker.may_start() and not rank.draining else None

    def _start(self, rank: Rank) -> None:
        _, started = rank.worker.start_task()
        rank.outbox.append(started)
        assert not rank.at_rest

    def _finish(self, rank: Rank) -> None:
        worker, task = rank.worker, rank.worker.current
        if task.synchronous_round is None:
            if worker.version < rank.landed and rank.weights.apply():
                worker.version = rank.landed
            if self.dice.random() < self.job.spoils:
                self.counts["spoiled"] += 1
                rank.outbox.append(worker.spoil_task(()))
                return
            rank.weights.finish(worth([task]))
            rank.weights.check()
        else:
            worker.version = task.synchronous_round + 1
        rank.outbox.append(worker.finish_task(1.0, 0.0))

    def _evaluate(self, rank: Rank) -> None:
        (number, anchor), rank.snapshot = rank.snapshot, None
        rank.outbox.append(Evaluated(rank.number, number, anchor))

    def _rest_move(self, rank: Rank) -> Callable | None:
        """Its last part is a sum over all."""
        if rank.recovers:
            return None
        entered = self.entered.setdefault(rank.landed, set())
        if rank.number in entered:
            all_are_there = len(entered) == len(self.members)
            if all_are_there and rank.newest.start.drain == ROLLBACK:
                if rank.number not in self.gone_back:
                    return self._go_back
                all_are_there = len(self.gone_back) == len(self.members)
            return self._leave_rest if all_are_there else None
        books_are_closed = rank.number != self.host or self.machine.version == rank.landed
        return self._enter_rest if books_are_closed else None

    def _enter_rest(self, rank: Rank) -> None:
        self.entered[rank.landed].add(rank.number)
        rank.tally.settings = self.machine.settings

    def _go_back(self, rank: Rank) -> None:
        """To what a checkpoint holds: the newest, whatever others have done by now."""
        self.gone_back.add(rank.number)
        applied = self._checkpoint
        anchor = worth([Task(0, (((0, applied),),), 0, 0, 0)])
        rank.weights = Weights()
        rank.weights.step(anchor)
        rank.tally.applied = applied
        if rank.books is not None:
            rank.books.go_back(applied)
        if rank.number == self.host:
            self._coordinate(WentBack(applied))

    @property
    def _checkpoint(self) -> int:
        return max([position for position, reason in self.epochs_over if reason == EPOCH], default=0)

    def _all_have_gone_back(self, version: int) -> None:
        """What came after the checkpoint counts no more."""
        applied = self._checkpoint
        self.counts["went back"] += 1
        self.history = {-1: [Task(0, (((0, applied),),), 0, 0, 0)]}
        self.anchors = {version: worth(self.history[-1])}
        self.evaluated = [at for at in self.evaluated if at <= applied]

    def _leave_rest(self, rank: Rank) -> None:
        drain = rank.newest.start
        if drain.drain == ROLLBACK and rank.landed not in self.over:
            self._all_have_gone_back(rank.landed)
        self.over.add(rank.landed)
        rank.resting = rank.at_rest = rank.draining = False
        rank.requested = [reason for reason in rank.requested if reason != drain.drain]
        rank.ended = drain.final or drain.drain == TOO_FEW
        position = length(spans_of(self._tasks_below(rank.landed)))
        if drain.drain == ROLLBACK:
            rank.rests = [rest for rest in rank.rests if rest[0] <= position]
        rank.rests.append((position, drain.drain))
        self.epochs_over = rank.rests
        if drain.evaluate:
            self.evaluated.append(position)

    # Its communication thread.

    def _receive(self, key: tuple[int, int]) -> None:
        message, rank = self.channels[key].popleft(), self.ranks[key[1]]
        if isinstance(message, OF_RECOVERY):
            self._take_steps(rank, rank.recovery.handle(message))
        elif isinstance(message, NOTICES):
            self._follow(rank, message)
        else:
            self._coordinate(message)

    def _follow(self, rank: Rank, notice) -> None:
        if rank.books is not None:
            rank.books.follow([notice])
        if isinstance(notice, AssignTask) and notice.rank == rank.number:
            rank.worker.assign(notice.task)
        elif isinstance(notice, TaskDropped) and notice.rank == rank.number:
            rank.worker.drop(notice.task)
        elif isinstance(notice, StartRound):
            rank.rounds.append(notice)
            rank.worker.announce(notice.number)

    def _flush(self, rank: Rank) -> None:
        self._send(rank.number, self.host, rank.outbox.popleft())

    def _may_join(self, rank: Rank) -> bool:
        start = rank.rounds[0]
        if start.synchronous and start.drain is None:
            current = rank.worker.current
            return current is not None and current.synchronous_round == start.number
        return True

    def _join(self, rank: Rank) -> None:
        start, worker = rank.rounds.popleft(), rank.worker
        worker.join(start.number)
        rank.joined, rank.draining = start, start.drain is not None
        tasks: list[Task] = []
        if start.synchronous:
            tasks = [] if start.drain else [worker.current]
            addend = worth(tasks)
        else:
            if rank.number in start.contributors:
                tasks = [held.task for held in worker._finished]
                assert all(start.number - held.version <= held.task.delay_bound for held in worker._finished)
                rank.outbox.append(worker.contribute(start.number)[0])
            addend = rank.weights.pack(bool(tasks))
            assert addend == worth(tasks)
        self.sums.setdefault(start.number, {})[rank.number] = addend, tasks

    def _land(self, rank: Rank) -> None:
        start, rank.joined = rank.joined, None
        parts = self.sums[start.number]
        samples = {number: sum(task.samples for task in tasks) for number, (_, tasks) in parts.items()}
        self.history[start.number] = [task for _, tasks in parts.values() for task in tasks]
        self._come_to(rank, LandedRound(start, samples), rank.weights.w + sum(addend for addend, _ in parts.values()))
        if start.evaluate and start.drain is None:
            rank.snapshot = start.number, rank.weights.w
        if rank.number == self.host:
            self._coordinate(RoundCompleted(start.number, 0.0, sum(samples.values()) if start.synchronous else None))

    def _come_to(self, rank: Rank, landed: LandedRound, anchor: int) -> None:
        """The round has landed, or another's anchor has been adopted."""
        start = landed.start
        rank.landed, rank.newest = start.number + 1, landed
        if start.drain == ROLLBACK and not start.contributors:  # some may have gone back already
            anchor = rank.weights.w
        else:
            assert self.anchors.setdefault(rank.landed, anchor) == anchor
        if start.synchronous and not start.drain:
            rank.weights.step(anchor)
        else:
            rank.weights.land(anchor)
            rank.weights.check()
            rank.worker.complete_round(start.number)
        if start.drain:
            rank.weights.apply()
            rank.weights.step(anchor)
            rank.worker.version = rank.landed
            rank.resting = rank.at_rest = True
        rank.tally.land(landed)
        if rank.books is not None:
            rank.books.land(landed)

    # Deaths.

    def _death_strikes(self) -> bool:
        if self.counts["deaths"] >= self.job.deaths or len(self.ranks) < 2:
            return False
        return self.dice.random() < (self.job.death_in_recovery if self._recovering() else self.job.death_chance)

    def _kill(self, count: int) -> None:
        self.counts["in recovery"] += self._recovering()
        victims = self.dice.sample(sorted(self.ranks), min(count, len(self.ranks) - 1))
        kept = [rank.number for rank in self.ranks.values() if rank.books is not None]
        if self.job.goes_back and len(self.ranks) > len(kept) and self.dice.random() < 0.5:
            victims = kept
        for number in victims:
            self.counts["deaths"] += 1
            self.counts["of the host"] += number == self.host
            del self.ranks[number]
            for (source, to), channel in self.channels.items():
                if to == number:
                    channel.clear()
                elif source == number:  # the last of what it has sent may be lost
                    for _ in range(self.dice.randint(0, len(channel))):
                        channel.pop()
        self.mending = True

    def _notice(self, rank: Rank) -> None:
        """Its communication thread does nothing more by the old plane."""
        rank.noticed, rank.is_to_report = True, False
        rank.recovery = rank.catch_up = rank.adopted = None

    def _mend(self, _: None) -> None:
        """A new plane, of those who are left."""
        self.mending = False
        self.channels.clear()
        self.sums.clear()
        self.entered.clear()
        self.gone_back.clear()
        self.members = tuple(sorted(self.ranks))
        for rank in self.ranks.values():
            rank.noticed, rank.is_to_report = False, True

    def _begin_recovery(self, rank: Rank) -> None:
        rank.is_to_report = False
        rank.outbox = deque(still_to_tell(rank.outbox))
        if rank.number == self.host and rank.books is not None:
            rank.books.follow([self.machine.standing])
        report = Report(
            rank.number,
            rank.landed,
            rank.worker.holding(),
            rank.newest,
            rank.at_rest,
            rank.snapshot[0] if rank.snapshot is not None else None,
            tuple(rank.requested),
            None if rank.books is None else rank.books.copy(),
        )
        rank.recovery = Recovery(report, self.members, self._decide)
        self._take_steps(rank, rank.recovery.begin())

    def _decide(self, reports) -> Decision:
        decision = decide(reports, len(self.agreed_on), self.job.least_ranks)
        if decision.action is Action.GO_BACK and self.job.goes_back:
            first = self.ranks[self.members[0]]
            tally = copy.deepcopy(first.tally)
            if first.number in decision.behind:
                tally.land(decision.newest)
            decision = begun_anew(decision, reports, tally)
        return decision

    def _take_steps(self, rank: Rank, steps) -> None:
        for step in steps:
            match step:
                case Send():
                    self._send(rank.number, step.to, step.message)
                case CatchUp() if rank.number in step.behind:
                    rank.catch_up = step
                case GoOn():
                    self._go_on(rank, step.decision)

    def _adopt(self, rank: Rank) -> None:
        donor, rank.catch_up = self.ranks[rank.catch_up.donor], None
        rank.adopted = donor.weights.w, donor.newest
        self._take_steps(rank, rank.recovery.caught_up())

    def _go_on(self, rank: Rank, decision: Decision) -> None:
        reports = rank.recovery.reports
        rank.recovery = None
        if rank.number == self.members[0]:
            self.action, self.lost, self.agreed_on = decision.action, decision.books is None, self.members
        if self.lost:
            return
        if decision.action is Action.END and TOO_FEW not in rank.requested:
            rank.requested.append(TOO_FEW)
        rank.rounds.clear()
        behind = rank.number in decision.behind
        rank.draining = False
        void = rank.joined is not None and rank.joined.number >= decision.version
        rank.joined = None
        rank.books = None
        if behind:
            anchor, landed = rank.adopted
            self.counts["caught up"] += 1
            self._come_to(rank, landed, anchor)
            if landed.start.synchronous:
                rank.worker.version = decision.version
        returned = rank.worker.recover(decision.version, behind)
        assert returned.contribution == rank.weights.in_flight
        if returned.contribution:
            rank.weights.void()
        rank.weights.check()
        self.counts["void"] += void
        self.counts["returned contributions"] += returned.contribution
        rank.books = decision.books.copy() if decision.books is not None else None
        if rank.resting or rank.at_rest:
            rank.resting = False
            self.counts["rests broken off"] += 1
            if not decision.rest_again:
                assert rank.landed in self.over, "not all had come to the rest"
                rank.resting = True
                self._leave_rest(rank)
        if rank.number == self.members[0]:
            self._rebuild(decision, reports)

    def _rebuild(self, decision: Decision, reports) -> None:
        self.counts["recoveries"] += 1
        self.sums.clear()
        for history in (self.history, self.anchors):
            for number in [number for number in history if number >= decision.version + (history is self.anchors)]:
                del history[number]
        alive = [rank for rank in self.members if not reports[rank].holding.withdrawn]
        shares = dict.fromkeys(self.members, 0)
        if alive:
            shares |= apportion(self.batch, {rank: self.dice.choice([1, 2, 4]) for rank in alive})
        machine = rebuilt(decision, reports, shares, self.job.total, self.milestones, self.evaluations)
        applied = spans_of(self._tasks_below(decision.version))
        if not self.counts["went back"] and not machine.rests.going_back:
            assert sum(machine.samples_by_rank.values()) == length(applied)
        if not (decision.rest_again and machine.rests.going_back):  # where some may have gone back
            assert machine.ledger.applied == length(applied)
        self._host(machine)

    # What the job asks for.

    def _change(self, _: None) -> None:
        machine, dice = self.machine, self.dice
        what = dice.choice(["rest", "shares", "settings", "withdraw"])
        rank = dice.choice(list(self.ranks.values()))
        if what == "rest" and not rank.ended and not rank.requested:
            rank.requested.append("asked for")
            rank.outbox.append(DrainRequested("asked for"))
        elif what == "shares":
            sharing = [number for number, member in machine.members.items() if not member.withdrawn]
            if sharing:
                parts = apportion(machine.batch, {number: dice.choice([1, 2, 4]) for number in sharing})
                self._coordinate(SharesChanged(parts))
        elif what == "settings":
            bound = dice.choice([0, 1, 4]) if dice.random() < 0.5 else machine.settings.delay_bound
            changed = replace(machine.settings, delay_bound=bound, accumulation=dice.choice([1, 2]))
            self._coordinate(SettingsChanged(changed))
        elif what == "withdraw" and dice.random() < self.job.withdrawals:
            self._may_withdraw(rank)

    def _may_withdraw(self, rank: Rank) -> None:
        """Not with a synchronous task whose round it has joined: the loop finishes that first."""
        working = [one for one in self.ranks.values() if not one.worker._withdrawn]
        current = rank.worker.current
        joined = current is not None and current.synchronous_round not in (None, rank.landed)
        if len(working) > 1 and rank in working and not rank.ended and rank.joined is None and not joined:
            rank.outbox.append(rank.worker.withdraw())

    # The laws.

    def _tasks_below(self, version: int) -> list[Task]:
        return [task for number, tasks in self.history.items() if number < version for task in tasks]

    def _check_end(self) -> None:
        some = next(iter(self.ranks.values()))
        spans = spans_of(self._tasks_below(some.landed))
        assert length(spans) == length(merged(spans)), "counted twice"
        expected = sum(4**position for start, stop in spans for position in range(start, stop))
        for rank in self.ranks.values():
            assert rank.weights.w == rank.weights.u == expected
            assert rank.rests[-1] == some.rests[-1]
        if self.action is Action.END or some.rests[-1][1] == "all ranks have left their loops":
            return
        assert merged(spans) == [(0, self.job.total)], "lost"
        every = self.job.rest_every or self.job.total
        for rank in self.ranks.values():
            assert [at for at, reason in rank.rests if reason == EPOCH] == list(range(every, self.job.total, every))
        if self.job.withdrawals:  # their rounds may fall short of what they were to be evaluated for
            return
        assert self.evaluations(max([*self.evaluated, 0])) is None, "an evaluation is lacking"

    def batches(self) -> list[list[tuple[int, int]]]:
        """Of the synchronous rounds that count, in order."""
        return [merged(spans_of(self.history[number])) for number in sorted(self.history) if self.history[number]]
