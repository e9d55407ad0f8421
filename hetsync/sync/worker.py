"""A rank's half of the protocol: when it may start its next task. Pure, like the state machine; the engine and the
simulator share it.
"""

from __future__ import annotations

from collections import deque

from hetsync.sync.messages import Contributed, RankWithdrew, Task, TaskFinished, TaskStarted


class Worker:
    """What one rank holds. `version` is the anchor version that its local weights have seen."""

    def __init__(self, rank: int, version: int = 0) -> None:
        self.rank = rank
        self.version = version
        self._tasks: deque[Task] = deque()
        self._finished: list[tuple[int, int]] = []  # (task, version it started from), in no round yet
        self._in_flight: list[tuple[int, int]] = []  # (round, task) of rounds that are not complete
        self._current: Task | None = None
        self._started_from = version
        self._withdrawn = False

    @property
    def upcoming(self) -> Task | None:
        """The task that comes next (to load its samples ahead)."""
        return self._tasks[0] if self._tasks else None

    @property
    def current(self) -> Task | None:
        """What it computes."""
        return self._current

    @property
    def unapplied(self) -> int:
        """Finished tasks whose rounds are not complete."""
        return len(self._finished) + len(self._in_flight)

    def assign(self, task: Task) -> None:
        self._tasks.append(task)
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
        if self._current is not None or not self._tasks:
            return False
        task = self._tasks[0]
        if task.synchronous_round is not None:
            return self.version == task.synchronous_round
        return self.version >= task.not_before and self.unapplied <= task.delay_bound

    def start_task(self) -> tuple[Task, TaskStarted]:
        self._current, self._started_from = self._tasks.popleft(), self.version
        return self._current, TaskStarted(self.rank, self._current.number, self.version)

    def finish_task(
        self, seconds: float, loss_sum: float, work_seconds: float = 0.0, wait_seconds: float = 0.0
    ) -> TaskFinished:
        assert self._current is not None
        task, self._current = self._current, None
        if task.synchronous_round is None:
            self._finished.append((task.number, self._started_from))
        return TaskFinished(self.rank, task.number, task.samples, seconds, loss_sum, work_seconds, wait_seconds)

    def contribute(self, round_number: int) -> tuple[Contributed, int]:
        """All that is finished goes into a round; with the staleness of the oldest of it."""
        taken, self._finished = self._finished, []
        self._in_flight += [(round_number, task) for task, _ in taken]
        return Contributed(self.rank, round_number, taken[-1][0]), round_number - min(version for _, version in taken)

    def complete_round(self, round_number: int) -> None:
        self._in_flight = [(number, task) for number, task in self._in_flight if number != round_number]


def _without_samples(task: Task) -> Task:
    return task._replace(slices=())
