"""A rank's half of the protocol: when it may start its next task. Pure, like the state machine; the engine and the
simulator share it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hetsync.sync.messages import (
    Contributed,
    HeldTask,
    Holding,
    RankWithdrew,
    Task,
    TaskFinished,
    TaskSpoiled,
    TaskStarted,
)

if TYPE_CHECKING:
    from hetsync.data.ledger import Span


class Returned(NamedTuple):
    """What a recovery has returned: is the rank's contribution to a void round among what it has finished again? And
    the tasks that it does no more, whose samples go out again."""

    contribution: bool
    dropped: tuple[Task, ...]


class Worker:
    """What one rank holds. `version` is the anchor version that its local weights have seen."""

    def __init__(self, rank: int, version: int = 0) -> None:
        self.rank = rank
        self.version = version
        self._tasks: deque[Task] = deque()
        self._finished: list[HeldTask] = []  # in no round yet
        self._in_flight: list[HeldTask] = []  # in rounds that are not complete
        self._announced = self._joined = version  # rounds below are known of, and joined
        self._after: dict[int, int] = {}  # the task starts once the rounds below are joined
        self._current: Task | None = None
        self._started_from = version
        self._withdrawn = False
        self._recovering = False
        self._spoiled: int | None = None  # a task that others may take for one that counts

    @property
    def upcoming(self) -> Task | None:
        """The task that comes next (to load its samples ahead)."""
        return self._tasks[0] if self._tasks else None

    @property
    def current(self) -> Task | None:
        """What it computes."""
        return self._current

    @property
    def synchronous(self) -> bool:
        """Does it hold a task of a synchronous round?"""
        held = [*self._tasks, *([] if self._current is None else [self._current])]
        return any(task.synchronous_round is not None for task in held)

    @property
    def unapplied(self) -> int:
        """Finished tasks whose rounds are not complete."""
        return len(self._finished) + len(self._in_flight)

    def announce(self, round_number: int) -> None:
        """The rank has been told to join a round, and has not yet. What is assigned from now on is no part of it: who
        keeps a copy of the books knows what was assigned before the round (`recovery.py`), and no more."""
        self._announced = round_number + 1

    def join(self, round_number: int) -> None:
        """What the rank has finished is in this round, or is in none."""
        self._joined = round_number + 1

    def assign(self, task: Task) -> None:
        self._tasks.append(task)
        if task.synchronous_round is None and self._joined < self._announced:
            self._after[task.number] = self._announced
        if self._withdrawn:
            self._drop()

    def withdraw(self) -> RankWithdrew:
        """Take no more samples."""
        self._withdrawn = True
        self._drop()
        return RankWithdrew(self.rank)

    def _drop(self) -> None:
        """Rounds wait for synchronous tasks, which stay, without samples; the others go."""
        self._tasks = deque(_without_samples(task) for task in self._tasks if task.synchronous_round is not None)
        if self._current is not None:
            self._current = None if self._current.synchronous_round is None else _without_samples(self._current)

    def may_start(self) -> bool:
        """A rank runs at most D contributions ahead, and starts from no version that the state machine has excluded."""
        if self._current is not None or not self._tasks or self._recovering or self._spoiled is not None:
            return False
        task = self._tasks[0]
        if task.synchronous_round is not None:
            return self.version == task.synchronous_round
        if self._joined < self._after.get(task.number, 0):
            return False
        return self.version >= task.not_before and self.unapplied <= task.delay_bound

    def start_task(self) -> tuple[Task, TaskStarted]:
        self._current, self._started_from = self._tasks.popleft(), self.version
        self._after.pop(self._current.number, None)
        return self._current, TaskStarted(self.rank, self._current.number, self.version)

    def finish_task(
        self, seconds: float, loss_sum: float, work_seconds: float = 0.0, wait_seconds: float = 0.0
    ) -> TaskFinished:
        assert self._current is not None
        task, self._current = self._current, None
        if task.synchronous_round is None:
            self._finished.append(HeldTask(task, self._started_from))
        return TaskFinished(self.rank, task.number, task.samples, seconds, loss_sum, work_seconds, wait_seconds)

    def spoil_task(self, spans: tuple[Span, ...]) -> TaskSpoiled:
        """The current task of delayed mode is given up. No other starts before all who keep the books know (`drop`):
        of what a round holds they see nothing but samples."""
        assert self._current is not None
        task, self._current = self._current, None
        self._spoiled = task.number
        return TaskSpoiled(self.rank, task.number, spans)

    def drop(self, number: int) -> None:
        """They will, before the round that comes after those announced so far."""
        if number == self._spoiled:
            self._spoiled = None
        self._tasks = deque(task.sooner for task in self._tasks)
        if self._joined < self._announced:
            self._after |= {task.number: self._announced for task in self._tasks}

    def contribute(self, round_number: int) -> tuple[Contributed, int]:
        """All that is finished goes into a round; with the staleness of the oldest of it."""
        taken, self._finished = self._finished, []
        self._in_flight += [held._replace(round=round_number) for held in taken]
        staleness = round_number - min(held.version for held in taken)
        return Contributed(self.rank, round_number, taken[-1].task.number), staleness

    def complete_round(self, round_number: int) -> None:
        self._in_flight = [held for held in self._in_flight if held.round != round_number]

    # A recovery (`recovery.py`).

    def holding(self) -> Holding:
        """What the rank has begun. Until `recover` it starts no other task, but may finish its current one."""
        self._recovering = True
        self._spoiled = None  # nobody takes it for held any more; one from now on is told after the recovery
        return self._held()

    def _held(self) -> Holding:
        current = None if self._current is None else HeldTask(self._current, self._started_from)
        return Holding((*self._in_flight, *self._finished), current, self._withdrawn)

    def recover(self, version: int, behind: bool) -> Returned:
        """All have agreed that the rounds below `version` count and no other: the inverse of `contribute` for those
        that are void. `behind`: the rank has adopted the anchor of one who had landed them all. Where its local weights
        are that anchor (D = 0, or the round was a drain), the caller sets `version`."""
        kept = kept_of(self._held(), version, behind)
        void = any(held.round is not None and held.round >= version for held in self._in_flight)
        dropped = [*self._tasks]
        if self._current is not None and kept.current is None:
            dropped, self._current = [self._current, *dropped], None
        self._finished, self._in_flight = list(kept.finished), []
        self._tasks.clear()
        self._after.clear()
        self._announced = self._joined = version
        self._recovering = False
        return Returned(void, tuple(dropped))


def kept_of(holding: Holding, version: int, behind: bool) -> Holding:
    """What a rank keeps of what it has begun, where the rounds below `version` count. Finished tasks of a void round
    wait for another. A synchronous task is kept where its round counts and its step is still to be made."""
    finished = [held._replace(round=None) for held in holding.finished if held.round is None or held.round >= version]
    current = holding.current
    if current is not None and (own_round := current.task.synchronous_round) is not None:
        current = current if own_round < version and not behind else None
    return Holding(tuple(finished), current, holding.withdrawn)


def _without_samples(task: Task) -> Task:
    return task._replace(slices=())
