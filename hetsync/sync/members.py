"""What the state machine knows of ranks and rounds: their states, the one table of transitions, and the membership
with the sums that decisions ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto

from hetsync.sync.messages import Settings, StartRound, Task


class Activity(IntEnum):  # the hash of an Enum is several times as slow
    RESTING = auto()  # holds no task
    STARTING = auto()  # holds a task that it may start now, from version `floor` or later
    COMPUTING = auto()  # on a task that it started from version `floor`
    BLOCKED = auto()  # holds a task that it may start only after another round


WORKING = (Activity.STARTING, Activity.COMPUTING)  # its next event comes without another round


class Cause(IntEnum):
    ASSIGNED = auto()
    ASSIGNED_AT_BOUND = auto()
    STARTED = auto()
    FINISHED_MAY_START = auto()
    FINISHED_AT_BOUND = auto()
    FINISHED_NOTHING_QUEUED = auto()
    RELEASED = auto()  # a round is complete, and the rank below its bound
    WITHDREW = auto()


TRANSITIONS = {
    (Activity.RESTING, Cause.ASSIGNED): Activity.STARTING,
    # It rested with finished tasks that wait for a round: its share was 0, or a peer left its samples.
    (Activity.RESTING, Cause.ASSIGNED_AT_BOUND): Activity.BLOCKED,
    (Activity.STARTING, Cause.ASSIGNED): Activity.STARTING,
    (Activity.COMPUTING, Cause.ASSIGNED): Activity.COMPUTING,
    (Activity.BLOCKED, Cause.ASSIGNED): Activity.BLOCKED,
    (Activity.STARTING, Cause.STARTED): Activity.COMPUTING,
    # The rank saw its round complete before rank 0 did.
    (Activity.BLOCKED, Cause.STARTED): Activity.COMPUTING,
    (Activity.COMPUTING, Cause.FINISHED_MAY_START): Activity.STARTING,
    (Activity.COMPUTING, Cause.FINISHED_AT_BOUND): Activity.BLOCKED,
    (Activity.COMPUTING, Cause.FINISHED_NOTHING_QUEUED): Activity.RESTING,
    (Activity.BLOCKED, Cause.RELEASED): Activity.STARTING,
    **{(activity, Cause.WITHDREW): Activity.RESTING for activity in Activity},
}


@dataclass
class TaskState:
    """A task on its way through one rank. `version` is the one it started from, once it has started."""

    task: Task
    version: int = -1
    returned: bool = False  # its samples went back to the ledger, and out again
    samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.task.samples


@dataclass
class RankState:
    """What the coordinator knows of one live rank."""

    share: int
    floor: int = 0
    activity: Activity = Activity.RESTING
    queued: deque[TaskState] = field(default_factory=deque)  # not started
    current: TaskState | None = None
    ready: list[TaskState] = field(default_factory=list)  # finished, in no round yet
    in_flight: list[TaskState] = field(default_factory=list)  # in a round that is not complete
    unready: bool = False  # it works, and has nothing for the next round yet
    withdrawn: bool = False  # its loop has ended: it works on nothing but synchronous tasks without samples
    pace: int | None = None  # with q = 1: the version that its next task belongs to

    @property
    def working(self) -> bool:
        return self.activity in WORKING

    @property
    def unfinished(self) -> list[TaskState]:
        """What it computes and what is queued: it may have started the next of these, with the event on its way."""
        return [*([self.current] if self.current is not None else []), *self.queued]

    def may_start_next(self, version: int) -> bool:
        """May the rank start the first queued task, with `version` rounds complete?"""
        task = self.queued[0].task
        if task.synchronous_round is not None:
            return task.synchronous_round <= version  # earlier rounds are complete
        return version >= task.not_before and len(self.ready) + len(self.in_flight) <= task.delay_bound

    def keep_pace(self, version: int, delay_bound: int) -> int:
        """The first version that its next task may start from, when nobody may run far ahead (q = 1)."""
        self.pace = (version if self.pace is None else self.pace) + 1
        return max(0, self.pace - 1 - delay_bound)

    def come_sooner(self) -> None:
        """A task of this rank is in no round after all; as `Worker.drop`."""
        for state in self.queued:
            state.task = state.task.sooner
        self.pace = None if self.pace is None else self.pace - 1

    def unapplied(self) -> dict[int, TaskState]:
        """By number. A synchronous task is in its round from the start, and applied with it."""
        own = [state for state in self.unfinished if state.task.synchronous_round is None]
        return {state.task.number: state for state in [*self.in_flight, *self.ready, *own] if not state.returned}


@dataclass
class Round:
    """A round under way: over once its sum has arrived and every contributor has reported what it put in.

    For a synchronous one `samples` were handed out, and its sum holds `summed_samples`. Where these are fewer, ranks
    have withdrawn, and the events of all of them are awaited.
    """

    start: StartRound
    unconfirmed: set[int]  # contributors whose `Contributed` is not here yet
    samples: int = 0
    summed: bool = False
    summed_samples: int | None = None
    spoiled: bool = False  # its sum was not finite: what was handed out for it goes out again


class Membership:
    """`members` by rank; change what the sums depend on (share, activity, ready) through the methods only."""

    def __init__(self, shares: Mapping[int, int], version: int, settings: Settings) -> None:
        self.members: dict[int, RankState] = {}
        self.batch = 0  # B, samples in one slice of every live rank
        self.ready: set[int] = set()  # ranks that have something for the next round
        self.ready_samples = 0
        self.quorum_samples = 0  # of those, nobody counting for more than its own part of a full set
        self.needs_work: set[int] = set()  # ranks that may have fewer tasks queued than they should
        self._accumulation, self._grace = settings.accumulation, settings.grace_within_bound
        self._grace_used: set[int] = set()  # ranks with so many tasks for the next round that it waits no longer
        self._unready = 0  # ranks that work and have none
        self._counted: dict[int, tuple[int, int]] = {}  # of ready_samples and quorum_samples
        self._resting = 0
        self._working = 0
        self._late: list[int] = []  # ranks whose tasks may be applied too late if the next round starts now
        for rank, share in sorted(shares.items()):
            self.add(rank, share, version)

    def add(self, rank: int, share: int, version: int) -> None:
        self.members[rank] = RankState(share, version)
        self.batch += share
        self._resting += 1
        self.needs_work.add(rank)

    def remove(self, rank: int) -> None:
        member = self.members.pop(rank)
        self.batch -= member.share
        self._resting -= member.activity is Activity.RESTING
        self._working -= member.working
        self._unready -= member.unready
        self._grace_used.discard(rank)
        self.ready.discard(rank)
        self._set_counts(rank, 0, 0)
        self.all_need_work()

    def resume(self, rank: int, ready: list[TaskState], current: TaskState | None, version: int) -> None:
        """A new member that has begun tasks, where rounds below `version` count."""
        member = self.members[rank]
        member.ready, member.current = ready, current
        member.floor = version if current is None else current.version
        self.set_activity(member, Activity.RESTING if current is None else Activity.COMPUTING)
        self.recount(rank)
        self.check_bound(rank, version)

    def set_share(self, rank: int, share: int) -> None:
        self.batch += share - self.members[rank].share
        self.members[rank].share = share
        self.recount(rank)
        self.needs_work.add(rank)

    def adopt(self, settings: Settings) -> None:
        """From now on a full part is K slices of these, and rounds have their grace."""
        self._accumulation, self._grace = settings.accumulation, settings.grace_within_bound
        for rank in self.ready:
            self.recount(rank)
        self.all_need_work()

    def recount(self, rank: int) -> None:
        """The rank's `ready` tasks have changed."""
        member = self.members[rank]
        samples = sum([state.samples for state in member.ready])
        self._set_counts(rank, samples, min(samples, self._accumulation * member.share))
        (self.ready.add if member.ready else self.ready.discard)(rank)
        used = len(member.ready) > self._grace
        (self._grace_used.add if used else self._grace_used.discard)(rank)
        self._recount_unready(member)

    def _set_counts(self, rank: int, ready: int, quorum: int) -> None:
        ready_before, quorum_before = self._counted.get(rank, (0, 0))
        self.ready_samples += ready - ready_before
        self.quorum_samples += quorum - quorum_before
        self._counted[rank] = ready, quorum

    def all_need_work(self) -> None:
        """There may be samples again for ranks that got none."""
        self.needs_work = set(self.members)

    def set_activity(self, member: RankState, to: Activity) -> None:
        self._resting += (to is Activity.RESTING) - (member.activity is Activity.RESTING)
        self._working += (to in WORKING) - (member.activity in WORKING)
        member.activity = to
        self._recount_unready(member)

    def _recount_unready(self, member: RankState) -> None:
        unready = member.working and not member.ready
        self._unready += unready - member.unready
        member.unready = unready

    # Staleness: a task that is under way must still find a round within its bound.

    def round_started(self, number: int) -> None:
        """Check everybody anew: whose tasks would be too late if round `number + 1` started now?"""
        self._late = [rank for rank, member in self.members.items() if not in_bound(member, number + 1)]

    def check_bound(self, rank: int, number: int) -> None:
        """The rank has a new task: is it late, if round `number` comes next?"""
        if not in_bound(self.members[rank], number):
            self._late.append(rank)

    def all_in_bound(self, number: int) -> bool:
        """If round `number` starts now, what is under way can still be applied in the one after it.

        Between two rounds only a new task makes a rank late: `_late` holds all that were when the last round
        started or a task was assigned, until they are found to be late no more.
        """
        while self._late:
            member = self.members.get(self._late[-1])
            if member is not None and not in_bound(member, number):
                return False
            self._late.pop()
        return True

    @property
    def grace_over(self) -> bool:
        """Has everybody at work something for the next round, or somebody so much that it waits no longer?"""
        return not self._unready or bool(self._grace_used)

    @property
    def resting(self) -> bool:
        """Do all hold no task?"""
        return self._resting == len(self.members)

    @property
    def working(self) -> bool:
        """Will any rank send an event without another round?"""
        return self._working > 0


def in_bound(member: RankState, number: int) -> bool:
    """Can all that the rank works on still be applied in the round after `number`?"""
    if not member.working:
        return True
    staleness, current = number + 1 - member.floor, member.current
    if current is not None and current.task.delay_bound < staleness:
        return False
    # The rank may have started the first of these, with the event on its way.
    return all([state.task.delay_bound >= staleness for state in member.queued])
