"""What ranks tell the coordinator (events) and what it tells them (instructions). Plain data, a few bytes each.

What comes with every task or round is a named tuple: made, sent and read in less than half of a dataclass's
time, which is what bounds the number of ranks (docs/results/scale.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hetsync.config.schema import SyncConfig, WireFormat, most_grace
from hetsync.sync.milestones import Milestone

if TYPE_CHECKING:  # or else whoever reads messages would load torch: the controller's process begins a second later
    from hetsync.data.ledger import Span

STANDS_MORE = "; sync.delay_bound 0, or auto, which begins so, stands higher rates"  # said where delay has lost it
NO_BOUND = 2**31  # a delay bound that no run reaches: fully asynchronous


@dataclass(frozen=True)
class Settings:
    """How much work a contribution holds and how stale it may be. Changeable at any round boundary.

    Args:
        delay_bound: D, the greatest staleness in rounds; 0 is synchronous, `NO_BOUND` fully asynchronous.
        quorum: q, fraction of a full contribution set (in samples) that may start a round when D > 0;
            1 waits for a task of every rank and keeps all within D tasks of the slowest: stale synchronous
            parallel with bound D.
        accumulation: K, slices in one contribution.
        fragments: Of the weights, one of which a delayed round sums.
        wire: Number format of what a round sums.
        grace: How many tasks after its first a rank may finish before a round that has its quorum stops waiting for
            ranks that have finished none (D > 0).
    """

    delay_bound: int = 4
    quorum: float = 0.25
    accumulation: int = 1
    fragments: int = 1
    grace: int = 0
    wire: WireFormat = "float32"

    @property
    def synchronous(self) -> bool:
        return self.delay_bound == 0

    @property
    def grace_within_bound(self) -> int:
        """As much of it as D has room for."""
        return min(self.grace, most_grace(self.delay_bound))

    @property
    def in_force(self) -> Settings:
        """With what counts in this mode and within this bound."""
        return replace(self, fragments=1 if self.synchronous else self.fragments, grace=self.grace_within_bound)

    @property
    def besides(self) -> str:
        """Grace, fragments and a wire where there are any: the end of a sentence that names the others."""
        grace = f", grace {self.grace}" if self.grace else ""
        fragments = f", {self.fragments} fragments" if self.fragments > 1 else ""
        return grace + fragments + (f", {self.wire} on the wire" if self.wire != "float32" else "")


class Task(NamedTuple):
    """Work for one contribution of one rank: K slices, each a few spans of the sample stream.

    `synchronous_round` is the round that all ranks' tasks of a synchronous step share, None in delayed mode;
    `round_samples` that step's samples over all ranks. `position`, in samples, drives the learning rate. `share` is the
    samples of a full slice of this rank: before a rest slices are smaller. `units` are those that a sample has on
    average, by weighted backward call (`units.py`). A rank begins the task only once it has applied version
    `not_before`.
    """

    number: int
    slices: tuple[tuple[Span, ...], ...]
    delay_bound: int
    position: int
    not_before: int
    synchronous_round: int | None = None
    round_samples: int = 0
    share: int = 0
    units: tuple[float, ...] = ()

    @property
    def sooner(self) -> Task:
        """The same where one of the rank's tasks before it is in no round: with q = 1 its round would not come."""
        return self._replace(not_before=max(0, self.not_before - 1))

    @property
    def samples(self) -> int:
        total = 0
        for spans in self.slices:
            for start, stop in spans:
                total += stop - start
        return total


class HeldTask(NamedTuple):
    """A task that a rank has begun, from anchor version `version`; with `round`, part of what it gave to that one."""

    task: Task
    version: int
    round: int | None = None


class Holding(NamedTuple):
    """What a rank has begun and knows of no landed round to hold: finished tasks, oldest first, and the one that it
    computes. What is only queued is not in it."""

    finished: tuple[HeldTask, ...] = ()
    current: HeldTask | None = None
    withdrawn: bool = False


# Events: from a rank's engine to the coordinator.


class TaskStarted(NamedTuple):
    """Compute on a task started from anchor version `version`."""

    rank: int
    task: int
    version: int


class TaskFinished(NamedTuple):
    """A task is computed and waits for a round. `loss_sum` is summed over samples; seconds are device time.

    For `work_seconds` and `wait_seconds` synchronisation has kept the device from computing, by its own work and by
    waits, since the task before was finished; the first task after a rest tells of none. Of `lossless` samples no loss
    is known, as there was nothing to learn. `units`: by weighted backward call, with the samples that had them.
    """

    rank: int
    task: int
    samples: int
    seconds: float = 0.0
    loss_sum: float = 0.0
    work_seconds: float = 0.0
    wait_seconds: float = 0.0
    lossless: int = 0
    units: tuple[tuple[float, int], ...] = ()

    @property
    def mean_loss(self) -> float | None:
        """None, where none is known."""
        known = self.samples - self.lossless
        return self.loss_sum / known if known else None


class TaskSpoiled(NamedTuple):
    """The task has brought numbers that are not finite, in slices of these spans. In delayed mode it is over, and
    undone; the rank starts another once it has been told `TaskDropped`. A synchronous one goes on, since its round's
    sum tells all ranks."""

    rank: int
    task: int
    spans: tuple[Span, ...]


class Contributed(NamedTuple):
    """The rank's contribution to a round holds every task that it finished up to and including `task`."""

    rank: int
    round: int
    task: int


class CapFound(NamedTuple):
    """No more than `samples` a slice fit into the rank's memory, as its first slices have shown."""

    rank: int
    samples: int


class LoopCounts(NamedTuple):
    """Synchronous mode: the rank's loop steps some optimizers, or makes some of its steps, in some batches only, and so
    counts batches: all ranks are to have a part of each, or their counts part."""

    rank: int


class NormMeasured(NamedTuple):
    """What the rank puts into a round's sum has this squared norm: progress of `samples` in so many inner steps, or,
    with 0 steps, the sum of their gradients."""

    rank: int
    round: int
    samples: int
    steps: int
    squared_norm: float


class RoundCompleted(NamedTuple):
    """The round's sum has arrived on rank 0; its squared norm, where norms are asked for. In synchronous mode it is of
    `samples`: fewer than were handed out for it where a rank has withdrawn. `spoiled`: some of it was not finite, so
    that nobody has stepped on it, and its samples go out again."""

    round: int
    squared_norm: float = 0.0
    samples: int | None = None
    spoiled: bool = False


class Evaluated(NamedTuple):
    """The rank has evaluated its part of the test data at the anchor of `round`: what it has found."""

    rank: int
    round: int
    part: Any


@dataclass(frozen=True)
class SettingsChanged:
    """New settings, in force for the work handed out from now on."""

    settings: Settings


@dataclass(frozen=True)
class SharesChanged:
    """New shares by rank, in force for the work handed out from now on."""

    shares: dict[int, int]


@dataclass(frozen=True)
class DrainRequested:
    """Bring all ranks to rest at the next possible moment (checkpoint on request, pre-emption)."""

    reason: str


@dataclass(frozen=True)
class WentBack:
    """At a rest for that, all ranks hold what a checkpoint of so many samples holds: go on from there."""

    applied: int


@dataclass(frozen=True)
class RankLeft:
    """The rank is gone; the samples of what it had not applied go out again."""

    rank: int


@dataclass(frozen=True)
class RankWithdrew:
    """The rank's loop has ended early: it takes part in rounds and rests, and does no more work. What it had not
    finished is returned, and goes out again; its synchronous tasks, which rounds wait for, come without samples."""

    rank: int


@dataclass(frozen=True)
class RankJoined:
    """The rank is here, with the anchor of version `version`, and its share."""

    rank: int
    version: int
    share: int


Event = (
    TaskStarted
    | TaskFinished
    | TaskSpoiled
    | Contributed
    | CapFound
    | LoopCounts
    | NormMeasured
    | RoundCompleted
    | Evaluated
    | SettingsChanged
    | SharesChanged
    | DrainRequested
    | WentBack
    | RankLeft
    | RankWithdrew
    | RankJoined
)


# Instructions: from the coordinator to the engines.


class AssignTask(NamedTuple):
    """Here is the rank's next task."""

    rank: int
    task: Task


class TaskDropped(NamedTuple):
    """The rank's spoiled task is in no round, as all who keep the books know before the round to come."""

    rank: int
    task: int


class TaskLeftOut(NamedTuple):
    """For ranks that keep a copy of the books: what the task brought in these `spans` was not finite, and is in no
    round; `samples` go out once more, or 0 where another task of the round has told of them."""

    rank: int
    round: int
    samples: int
    spans: tuple[Span, ...]


class StartRound(NamedTuple):
    """All ranks join round `number`; the contributors put in what they have finished, the others zeros.

    `drain` names why everybody has come to rest, if they have; `final` says that no work will follow.
    `applied` is the number of samples applied before this round. With `evaluate` the weights that all share once the
    round has landed are to be evaluated. A delayed round sums one of so many `fragments`, on this `wire`; a drain
    all, as they are.
    """

    number: int
    contributors: frozenset[int]
    applied: int
    synchronous: bool = False
    drain: str | None = None
    final: bool = False
    evaluate: bool = False
    fragments: int = 1
    wire: WireFormat = "float32"

    def sums(self, part: int, parts: int) -> bool:
        """Does it sum this part of so many that the weights are cut into? Fragments take turns; a drain sums all."""
        fragments = min(self.fragments, parts)
        return self.drain is not None or part * fragments // parts == self.number % fragments


class Standing(NamedTuple):
    """For ranks that keep a copy of the books: what the coordinator knows beside tasks, with `version` rounds complete.

    `pending` settings follow the next drain; rests for the `requested` reasons follow `rest`. From `evaluation` on, in
    samples, an evaluation is due; one that is under way is due still. `staleness` are pairs of a staleness and the
    number of tasks that were applied with it. `goes_back`: all are at rest to go back to a checkpoint, and have yet to.
    `units`: see `AverageUnits.sums`.
    """

    version: int
    settings: Settings
    rest: Milestone
    evaluation: int | None = None
    pending: Settings | None = None
    requested: tuple[str, ...] = ()
    staleness: tuple[tuple[int, int], ...] = ()
    goes_back: bool = False
    units: tuple[tuple[float, float], ...] = ()


Instruction = AssignTask | TaskDropped | TaskLeftOut | StartRound
Notice = Instruction | Standing  # what a rank is told: who keeps a copy of the books, of others' tasks, too


# What travels between ranks: each message is one of these.


class EventBatch(NamedTuple):
    """To rank 0, or to a leader on the way there: events of one rank or several, those of each in its order."""

    events: Sequence[Event]


class InstructionBatch(NamedTuple):
    """From the coordinator to one rank, in the order of the decisions."""

    instructions: Sequence[Notice]


class GroupBatch(NamedTuple):
    """From the coordinator to a leader: what each rank of its group is to get."""

    by_rank: Mapping[int, Sequence[Notice]]


@dataclass(frozen=True)
class Probe:
    """Rank `by`, the first or the second, asks for a sign of life."""

    by: int


@dataclass(frozen=True)
class Ping:
    """Of one who waits in a recovery, and wants no answer: what has been lost before it is noticed by its number."""


@dataclass(frozen=True)
class Alive:
    """The rank's communication thread runs and has joined all rounds below `joined`; does its main thread wait? What it
    does has lasted for so many seconds, and it is there in Python."""

    rank: int
    joined: int
    waiting: bool
    activity: str = ""
    seconds: float = 0.0
    stack: str = ""


@dataclass(frozen=True)
class Look:
    """Rank 0 asks a peer on its host what a silent rank does."""

    rank: int


@dataclass(frozen=True)
class Seen:
    """The peer's answer: the process's state, and its stacks where it could write them."""

    rank: int
    state: str
    stack: str


@dataclass(frozen=True)
class Exclude:
    """A rank is to be ended by this peer on its host; `if_silent`: to that one, too."""

    rank: int
    if_silent: bool = False


Message = EventBatch | InstructionBatch | GroupBatch | Probe | Ping | Alive | Look | Seen | Exclude


def settings_of(sync: SyncConfig) -> Settings:
    bound = NO_BOUND if sync.first_delay_bound is None else sync.first_delay_bound
    fragments, grace = sync.first_fragments, sync.first_grace
    return Settings(bound, sync.first_quorum, sync.first_accumulation, fragments, grace, sync.first_wire)
