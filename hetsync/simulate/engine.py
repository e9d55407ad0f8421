"""The ranks' main threads: compute slice after slice, hand over, wait."""

from __future__ import annotations

from hetsync.data.ledger import length
from hetsync.simulate.clock import Clock
from hetsync.simulate.communicator import Communicator
from hetsync.simulate.learner import Learner
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.telemetry import Telemetry
from hetsync.simulate.virtual_rank import VirtualRank, VirtualRanks
from hetsync.sync.messages import Event, Task, TaskFinished


class MainThreads:
    def __init__(
        self,
        *,
        scenario: Scenario,
        clock: Clock,
        ranks: VirtualRanks,
        learner: Learner,
        telemetry: Telemetry,
        communicator: Communicator,
    ) -> None:
        self._clock = clock
        self._ranks = ranks
        self._learner = learner
        self._telemetry = telemetry
        self._communicator = communicator
        self._profiles = scenario.ranks
        self._runtime = scenario.runtime

    def go_on(self, rank: VirtualRank, finished: TaskFinished | None = None) -> None:
        """The rank computes nothing: begin the next task where that is allowed, and say what there is to say."""
        communicator = self._communicator
        events: list[Event] = [] if finished is None else [finished]
        if not communicator.draining:
            communicator.take_over(rank)
            if rank.worker.may_start():
                events.append(self._begin(rank))
        if rank.task is None:
            self._ranks.wait(rank, self._clock.now, self.go_on)
            communicator.wake_after_landing(rank)
        if events:
            communicator.send_events(rank, events)

    def _begin(self, rank: VirtualRank) -> Event:
        task, started = rank.worker.start_task()
        self._ranks.end_wait(rank, self._clock.now)
        rank.task, rank.slice_index, rank.task_seconds, rank.task_loss = task, 0, 0.0, 0.0
        self._learner.begin_task(rank.number, task)
        self._next_slice(rank, task)
        return started

    def _next_slice(self, rank: VirtualRank, task: Task) -> None:
        if rank.slice_index == len(task.slices):
            self._computed(rank, task)
            return
        rank.slice_samples = length(task.slices[rank.slice_index])
        seconds = rank.device.seconds(rank.slice_samples)
        rank.task_seconds += seconds
        rank.slice_ends_at = self._clock.now + seconds + self._runtime.slice_seconds + self._pay_rounds(rank)
        if task.synchronous_round is not None and rank.slice_index == len(task.slices) - 1:
            self._communicator.release(task, seconds)
        self._clock.at(rank.slice_ends_at, self._end_slice, rank, task)

    def _pay_rounds(self, rank: VirtualRank) -> float:
        """What the rounds since the last slice take of the device's time."""
        seconds = (rank.landed - rank.rounds_paid) * self._runtime.round_seconds
        rank.rounds_paid = rank.landed
        rank.round_seconds += seconds
        return seconds

    def _end_slice(self, rank: VirtualRank, task: Task) -> None:
        rank.task_loss += rank.slice_samples * self._learner.compute_slice(rank.number, task, rank.slice_index)
        rank.slice_index += 1
        if task.synchronous_round is None:
            self._communicator.take_over(rank)
        self._next_slice(rank, task)

    def _computed(self, rank: VirtualRank, task: Task) -> None:
        if task.synchronous_round is None:
            self._communicator.join(rank)
            self._learner.finish_task(rank.number, task)
            self._finish(rank, task)
        else:
            self._learner.finish_task(rank.number, task)
            self._communicator.reduce(rank, task, then=self._finish)

    def _finish(self, rank: VirtualRank, task: Task) -> None:
        """The task is computed (synchronous: and its round is complete)."""
        rank.task = None
        now = (rank.round_seconds, rank.wait_seconds)
        (work, waits), rank.told = rank.told if rank.samples_since_rest else now, now
        finished = rank.worker.finish_task(rank.task_seconds, rank.task_loss, now[0] - work, now[1] - waits)
        rank.compute_seconds += finished.seconds
        rank.samples += finished.samples
        rank.samples_since_rest += finished.samples
        profile = self._profiles[rank.number]
        self._telemetry.task_finished(self._clock.now, rank, task, finished, profile.time, self._learner.learns)
        self.go_on(rank, finished)
