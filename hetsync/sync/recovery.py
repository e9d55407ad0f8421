"""How the survivors of a rank's death agree on what counts, and go on: pure, like the state machine.

Messages go in, steps come out; there are no tensors, no MPI, no threads and no clock here. Ranks are stable ids: the
numbers that they started with. A `Recovery` is one rank's part in one attempt. Another death, at whatever step, ends
the attempt: the plane drops its messages, and each survivor begins anew with a report of what it holds by then. Nothing
changes before the agreement, and whoever has gone on after it reports what the others would come to as well, so it does
not matter whom the agreement has reached.

    all report    what has landed, what they have begun; some also a copy of the books. They start no other task.
    one decides   the first survivor: which rounds count, who is behind, what goes out again
    catching up   who is behind receives the anchor (D = 0: weights and optimizer state) and the outer velocity
    all agree     once all are ready; then contributions to void rounds return, and a new state machine goes on

**Which rounds count.** Those that a survivor has landed. Sums need all ranks, so that survivors differ by one round at
most. A round that landed on none of them is void: what was put into it returns to its owners and goes into another of
the same number. What is only queued is dropped, at D = 0 also what is computed, and goes out again: at D = 0 the same
global batch, since its positions are the first that are free.

**The books.** The first ranks (`keepers`) follow all assignments, each of which reaches them before the `StartRound`
that follows it, and book by what the round's sum says of who put in how many samples. A rank puts into a round only
what it was assigned before that (`Worker.announce`). So whoever has joined a round knows the samples of every task in
it, whoever dies; rank 0's copy is one of several, and its death is like any other.

**Where all copies are lost** says `lost_books.py`.

**A newcomer.** A rank that joins at a rest is agreed on in the same way: members have changed, and all report. It holds
nothing and has landed what all have landed, as it begins from the checkpoint of that rest. Members are in the order in
which they came, so that the first of them stays the first when the number of a dead one is taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from hetsync.data.ledger import Ledger, Span, merged
from hetsync.sync.messages import (
    AssignTask,
    CapFound,
    Contributed,
    DrainRequested,
    Evaluated,
    Event,
    HeldTask,
    Holding,
    NormMeasured,
    Notice,
    RankWithdrew,
    Settings,
    Standing,
    StartRound,
    Task,
    TaskDropped,
    TaskFinished,
    TaskLeftOut,
    TaskSpoiled,
    TaskStarted,
)
from hetsync.sync.milestones import TOO_FEW, Marks, Milestones
from hetsync.sync.state_machine import RoundStateMachine
from hetsync.sync.worker import kept_of

KEEPERS = 3  # ranks with a copy of the books: the coordinator's, and the two that come next


def keepers(members: Sequence[int]) -> tuple[int, ...]:
    """The ranks that keep the books; the first of them hosts the coordinator."""
    return tuple(members[:KEEPERS])


# The books.


class LandedRound(NamedTuple):
    """A round that has landed, and the samples that each contributor put in, by rank, as its sum says. A synchronous
    task is put in whole, or, by a rank that has withdrawn, with 0 samples."""

    start: StartRound
    samples: Mapping[int, int]


def first_standing(
    settings: Settings, milestones: Milestones, evaluations: Marks, version: int = 0, applied: int = 0
) -> Standing:
    """What the coordinator knows before the first task, as every rank can tell."""
    return Standing(version, settings, milestones(applied), evaluations(applied))


@dataclass
class Books:
    """A keeper's copy: what was applied, and which tasks were handed out since.

    Give it what the keeper is told in its order, and each round once it has landed there. The coordinator's own
    follows the machine's `standing` before it is reported.

    Args:
        standings: what the coordinator knew beside tasks, oldest first: it may have been ahead by a round that is void.
        applied: spans of the sample stream.
        version: rounds booked.
        attempt: of the recovery that they come from; 0 at the start.
        next_task: all earlier numbers may have been used.
        samples_by_rank: applied samples of each rank, also of dead ones.
        tasks: handed out and not applied, by rank, in their order; those of the dead and withdrawn among them.
        left_out: so far, as it was not finite.
        lost_at: all older copies were lost at this version, and these are made up (`lost_books.py`).
    """

    standings: list[Standing]
    applied: list[Span] = field(default_factory=list)
    version: int = 0
    attempt: int = 0
    next_task: int = 0
    samples_by_rank: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, list[Task]] = field(default_factory=dict)
    left_out: list[TaskLeftOut] = field(default_factory=list)
    lost_at: int | None = None

    def follow(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            match notice:
                case AssignTask():
                    self.tasks.setdefault(notice.rank, []).append(notice.task)
                    self.next_task = max(self.next_task, notice.task.number + 1)
                case TaskDropped():
                    tasks = self.tasks.get(notice.rank, [])
                    self.tasks[notice.rank] = [task for task in tasks if task.number != notice.task]
                case TaskLeftOut():
                    self.left_out.append(notice)
                case Standing():
                    self.standings.append(notice)
                    self._forget_standings()

    def land(self, landed: LandedRound) -> None:
        """Raises AssertionError where the sum and what was handed out do not match."""
        number = landed.start.number
        assert number == self.version, f"round {number} landed on books of version {self.version}"
        for rank, tasks in self.tasks.items():
            samples = landed.samples.get(rank, 0)
            count = _tasks_in(tasks, number, samples, landed.start.synchronous)
            taken, self.tasks[rank] = tasks[:count], tasks[count:]
            if samples:
                self.applied = merged([*self.applied, *spans_of(taken)])
                self.samples_by_rank[rank] = self.samples_by_rank.get(rank, 0) + samples
        self.version = number + 1
        self._forget_standings()

    def go_back(self, applied: int) -> None:
        """At rest: all hold what a checkpoint of so many samples holds."""
        self.applied = [(0, applied)]

    def standing(self, version: int) -> Standing:
        """The newest that knows of no round from `version` on."""
        return [standing for standing in self.standings if standing.version <= version][-1]

    def _forget_standings(self) -> None:
        """Rounds that have landed here are never void, so that older ones will not be asked for."""
        while len(self.standings) > 1 and self.standings[1].version <= self.version:
            self.standings.pop(0)

    def keep_tasks(self, kept: Mapping[int, Holding]) -> None:
        """Of those that are not applied, only what the survivors keep; the others go out again."""
        self.tasks = {}
        for rank, holding in kept.items():
            self.tasks[rank] = [held.task for held in unapplied(holding)]
            self.next_task = max([self.next_task, *(task.number + 1 for task in self.tasks[rank])])

    def copy(self) -> Books:
        tasks = {rank: list(tasks) for rank, tasks in self.tasks.items()}
        return Books(
            list(self.standings),
            list(self.applied),
            self.version,
            self.attempt,
            self.next_task,
            dict(self.samples_by_rank),
            tasks,
            list(self.left_out),
            self.lost_at,
        )


def _tasks_in(tasks: Sequence[Task], number: int, samples: int, synchronous: bool) -> int:
    """How many of a rank's tasks a round with so many samples of it has used up."""
    if synchronous:
        own = [task for task in tasks if task.synchronous_round is not None and task.synchronous_round <= number]
        return len(own)
    count = total = 0
    while total < samples and count < len(tasks):
        total += tasks[count].samples
        count += 1
    assert total == samples, f"round {number} holds {samples} samples of a rank's tasks, which have {total}"
    return count


def spans_of(tasks: Iterable[Task]) -> list[Span]:
    return [span for task in tasks for spans in task.slices for span in spans]


# What is decided.


class Report(NamedTuple):
    """What a survivor tells.

    Args:
        landed: all rounds below have landed here.
        newest: the last of these, where there was one.
        holding: what it has begun.
        at_rest: `newest` is a drain whose rest this rank has not come out of.
        evaluating: the round whose anchor it evaluates, or is still to evaluate.
        requested: reasons for which it has asked for a rest that has not come; once too few were left, `TOO_FEW`.
        books: of a keeper.
        damaged: the rank of which a message has not arrived here as it was sent, where that has begun the recovery.
        cap: samples a slice that fit into its memory, where its first slices have shown that: it was told but once,
            maybe to a coordinator that has gone.
    """

    rank: int
    landed: int
    holding: Holding
    newest: LandedRound | None = None
    at_rest: bool = False
    evaluating: int | None = None
    requested: tuple[str, ...] = ()
    books: Books | None = None
    damaged: int | None = None
    cap: int | None = None


SUPERSEDED = (
    TaskStarted,
    TaskFinished,
    TaskSpoiled,
    Contributed,
    NormMeasured,
    Evaluated,
    RankWithdrew,
    DrainRequested,
    CapFound,
)


def still_to_tell(events: Iterable[Event]) -> list[Event]:
    """Of what a rank had not sent when it reported, what the report does not say."""
    return [event for event in events if not isinstance(event, SUPERSEDED)]


@dataclass(frozen=True)
class Death:
    """Of a rank that the others have survived. `activity` is what it did, as far as the rank knew that decided: nothing
    ("unknown") where rank 0 died, and was noticed at once. Others were noticed so many seconds after they had last
    begun a task; `recovered_seconds` after that the others went on, from `round`. `samples_returned` go out again.
    `cause`: it died, or was excluded, as it was silent or slow."""

    rank: int
    round: int
    activity: str
    noticed_seconds: float
    recovered_seconds: float
    samples_returned: int
    cause: str = "died"


@dataclass(frozen=True)
class Damage:
    """A message of a rank, that did not arrive as it was sent: all have gone on from `round` after so many seconds."""

    rank: int
    round: int
    recovered_seconds: float


class Action(Enum):
    GO_ON = auto()
    GO_BACK = auto()  # to the newest checkpoint, in place: nobody is left who kept the books
    END = auto()  # too few are left: drain, save where the books are there, and end
    GIVE_WAY = auto()  # too few are left, and those who cannot be seen may go on: end, and write nothing


class Decision(NamedTuple):
    """What all agree on.

    Args:
        version: the rounds below count; the next one has this number.
        survivors: in their order. The first hosts the coordinator.
        behind: those who adopt the anchor of `donor`.
        rest_again: the newest round is a drain whose rest nobody has come out of: all break it off and come to it once
            more, by another drain. Otherwise who is still at it comes out, since all have done their part.
        books: for keepers, where these are not lost.
        newest: the last round that counts, where there was one.
        deaths: all that have been survived, as far as the first survivor knows.
        damaged: ranks of which messages have not arrived as they were sent.
    """

    action: Action
    version: int
    survivors: tuple[int, ...]
    donor: int
    behind: tuple[int, ...] = ()
    rest_again: bool = False
    books: Books | None = None
    newest: LandedRound | None = None
    deaths: tuple[Death, ...] = ()
    damaged: tuple[int, ...] = ()


def least_to_go_on(least_ranks: int | None, last_ranks: int) -> int:
    """Survivors that go on: so many as `fault.least_ranks` says, or more than half of the last membership, so that no
    two sides of a split network both do."""
    return last_ranks // 2 + 1 if least_ranks is None else least_ranks


def too_few(ranks: int, last_ranks: int, least_ranks: int | None) -> str | None:
    """Why so many survivors do not go on, in one sentence; None where they do."""
    least = least_to_go_on(least_ranks, last_ranks)
    if ranks >= least:
        return None
    why = f"fault.least_ranks is {least}" if least_ranks is not None else f"more than half of {last_ranks} must be"
    return (
        f"{ranks} of {last_ranks} ranks are left, and {why}: the job ends; go on with --resume (in a script:"
        " resume='auto')"
    )


def unseen(last: Iterable[int], survivors: Iterable[int], hosts: Mapping[int, str]) -> tuple[int, ...]:
    """Of the last members, who have gone with all others of their hosts: it may be the network that has, and they live.
    Nobody, as far as `hosts` are not known."""
    left = set(survivors)
    reached = {hosts.get(rank) for rank in left}
    return tuple(rank for rank in last if rank not in left and rank in hosts and hosts[rank] not in reached)


def decide(
    reports: Mapping[int, Report], last_ranks: int, least_ranks: int | None = None, unseen_ranks: int = 0
) -> Decision:
    """What becomes of the job, by the survivors' reports, in their order; `last_ranks` were members before, and so many
    of them are `unseen`."""
    survivors = tuple(reports)
    version = max(report.landed for report in reports.values())
    level = [rank for rank in survivors if reports[rank].landed == version]
    behind = tuple(rank for rank in survivors if reports[rank].landed < version)
    assert all(reports[rank].landed == version - 1 for rank in behind), "survivors differ by more than a round"
    books = _newest_books(reports, reports[level[0]].newest, version)
    if books is not None:
        books.keep_tasks({rank: kept_of(reports[rank].holding, version, rank in behind) for rank in survivors})
    action = Action.GO_ON if books is not None else Action.GO_BACK
    ending = any(TOO_FEW in report.requested for report in reports.values())
    few = too_few(len(survivors), last_ranks, least_ranks) is not None
    if ending or few:
        # Who was about to end anyway has agreed on that with those who have gone since.
        others_go_on = not ending and unseen_ranks >= least_to_go_on(least_ranks, last_ranks)
        action = Action.GIVE_WAY if others_go_on else Action.END
    at_rest = _drain(reports[level[0]]) is not None and all(reports[rank].at_rest for rank in level)
    damaged = tuple(sorted({report.damaged for report in reports.values() if report.damaged is not None}))
    newest = reports[level[0]].newest
    return Decision(action, version, survivors, level[0], behind, at_rest, books, newest, damaged=damaged)


def _newest_books(reports: Mapping[int, Report], newest: LandedRound | None, version: int) -> Books | None:
    """Of one survivor, with all that has landed. Whoever kept books and has joined a round can book it: which of them
    do not matter, but that those of a later attempt know what has been handed out since."""
    copies = [report.books for report in reports.values() if report.books is not None]
    if not copies:
        return None
    books = max(copies, key=lambda copy: (copy.attempt, copy.version, copy.standings[-1].version)).copy()
    if books.version < version:
        assert newest is not None
        books.land(newest)
    books.left_out = max((copy.left_out for copy in copies), key=len)  # all have heard of it in one order
    books.attempt += 1
    return books


def unapplied(holding: Holding) -> list[HeldTask]:
    """Tasks of no landed round."""
    current = holding.current
    own = [] if current is None or current.task.synchronous_round is not None else [current]
    return [*holding.finished, *own]


def _drain(report: Report) -> StartRound | None:
    """The newest round that landed here, if it was a drain."""
    newest = report.newest
    return newest.start if newest is not None and newest.start.drain is not None else None


def rebuilt(
    decision: Decision,
    reports: Mapping[int, Report],
    shares: Mapping[int, int],
    total: int,
    milestones: Milestones,
    evaluations: Marks,
    least_slice: int = 2,
) -> RoundStateMachine:
    """The coordinator's machine from now on: `first_instructions` hands out work again.

    Args:
        shares: samples a slice by survivor, sliced anew and with the same sum as before; of one that has withdrawn, 0.
        total: samples of the job.
        least_slice: samples of the smallest slice.
    """
    books = decision.books
    assert books is not None, "nobody kept books"
    holdings = {
        rank: kept_of(report.holding, decision.version, rank in decision.behind) for rank, report in reports.items()
    }
    held = {one.task.number: tuple(spans_of([one.task])) for holding in holdings.values() for one in unapplied(holding)}
    ledger = Ledger.restored(total, books.applied, held)
    standing = books.standing(decision.version)
    machine = RoundStateMachine(
        shares, standing.settings, ledger, milestones, decision.version, evaluations, least_slice
    )
    machine.samples_by_rank.update(books.samples_by_rank)
    machine.resume(
        standing,
        holdings,
        next_task=books.next_task,
        owed={rank: report.evaluating for rank, report in reports.items() if report.evaluating is not None},
        drained=_drain(reports[decision.donor]),
        rest_again=decision.rest_again,
    )
    for reason in _rests_asked_for(decision, reports, machine):
        machine.rests.request(ledger.frontier, reason)
    return machine


def _rests_asked_for(decision: Decision, reports: Mapping[int, Report], machine: RoundStateMachine) -> list[str]:
    """That the machine does not know of."""
    reasons = [reason for report in reports.values() for reason in report.requested]
    if decision.action is Action.END:
        reasons.append(TOO_FEW)
    known = {machine.rests.next.reason, *machine.rests.requested}
    return [reason for reason in dict.fromkeys(reasons) if reason not in known]


# Who says what to whom.


class Ready(NamedTuple):
    """The rank could go on."""

    rank: int


class Agreed(NamedTuple):
    """All could: go on."""


Message = Report | Decision | Ready | Agreed


class Send(NamedTuple):
    """To another survivor."""

    to: int
    message: Message


class CatchUp(NamedTuple):
    """`donor` gives, and those `behind` put aside until the agreement: the anchor and outer velocity, at D = 0 weights
    and optimizer state after the step of the newest round. Call `caught_up` on those behind."""

    donor: int
    behind: tuple[int, ...]


class GoOn(NamedTuple):
    """Carry the decision out: `Worker.recover`, and on the first survivor `rebuilt`."""

    decision: Decision


Step = Send | CatchUp | GoOn


class Stage(Enum):
    REPORTED = auto()  # waits for the decision
    CATCHING_UP = auto()  # waits for what the donor gives
    READY = auto()  # waits for the others
    OVER = auto()


class Cause(Enum):
    DECIDED = auto()
    DECIDED_BEHIND = auto()
    CAUGHT_UP = auto()
    AGREED = auto()


TRANSITIONS = {
    (Stage.REPORTED, Cause.DECIDED): Stage.READY,
    (Stage.REPORTED, Cause.DECIDED_BEHIND): Stage.CATCHING_UP,
    (Stage.CATCHING_UP, Cause.CAUGHT_UP): Stage.READY,
    (Stage.READY, Cause.AGREED): Stage.OVER,
}


class Recovery:
    """One rank's part. Carry out the steps that each call returns, in their order."""

    def __init__(self, report: Report, survivors: Sequence[int], decide: Callable[[Mapping[int, Report]], Decision]):
        """`report` of this rank; `decide` is called on the first of the survivors, once all have reported."""
        self.rank = report.rank
        self.stage = Stage.REPORTED
        self.reports: dict[int, Report] = {}  # on the first survivor
        self._report = report
        self._survivors = tuple(survivors)
        self._decide = decide
        self._decision: Decision | None = None
        self._ready: set[int] = set()

    def begin(self) -> list[Step]:
        return self._tell(self._survivors[0], self._report)

    def handle(self, message: Message) -> list[Step]:
        """From another survivor, in this attempt."""
        match message:
            case Report():
                self.reports[message.rank] = message
                return self._announce() if len(self.reports) == len(self._survivors) else []
            case Decision():
                return self._on_decision(message)
            case Ready():
                self._ready.add(message.rank)
                return self._tell_all(lambda rank: Agreed()) if len(self._ready) == len(self._survivors) else []
            case Agreed():
                self._move(Cause.AGREED)
                assert self._decision is not None
                return [GoOn(self._decision)]

    def caught_up(self) -> list[Step]:
        """This rank has what the donor gave."""
        return self._get_ready(Cause.CAUGHT_UP)

    def _announce(self) -> list[Step]:
        self.reports = {rank: self.reports[rank] for rank in self._survivors}
        decision, keeping = self._decide(self.reports), keepers(self._survivors)
        without = decision._replace(books=None)
        return self._tell_all(lambda rank: decision if rank in keeping else without)

    def _on_decision(self, decision: Decision) -> list[Step]:
        self._decision = decision
        steps: list[Step] = []
        if decision.behind and self.rank in (decision.donor, *decision.behind):
            steps.append(CatchUp(decision.donor, decision.behind))
        if self.rank in decision.behind:
            self._move(Cause.DECIDED_BEHIND)
            return steps
        return steps + self._get_ready(Cause.DECIDED)

    def _get_ready(self, cause: Cause) -> list[Step]:
        self._move(cause)
        return self._tell(self._survivors[0], Ready(self.rank))

    def _tell_all(self, message: Callable[[int], Message]) -> list[Step]:
        """Oneself last: the others need not wait for what one does."""
        others = [Send(rank, message(rank)) for rank in self._survivors if rank != self.rank]
        return [*others, *self.handle(message(self.rank))]

    def _tell(self, rank: int, message: Message) -> list[Step]:
        return self.handle(message) if rank == self.rank else [Send(rank, message)]

    def _move(self, cause: Cause) -> None:
        to = TRANSITIONS.get((self.stage, cause))
        assert to is not None, f"{cause.name} while {self.stage.name}"
        self.stage = to
