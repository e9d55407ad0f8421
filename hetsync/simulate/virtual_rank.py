"""The virtual ranks: each with its device, its half of the protocol, its books."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, slowdown_factor
from hetsync.emulation.jitter import jitter_sampler
from hetsync.simulate.scenario import Scenario
from hetsync.sync.messages import Task
from hetsync.sync.worker import Worker


class VirtualDevice:
    """The times of an emulated device, without its clock. `slow_by` multiplies what is drawn."""

    def __init__(self, cluster: Cluster, rank: int, time: StepTime, seed: int) -> None:
        self.slow_by = 1.0
        self.slices = 0
        self._time = time
        self._slowdowns = [event for event in cluster.events if event.rank == rank]
        self._jitter: Callable[[], float] = jitter_sampler(cluster.jitter, seed, rank)
        self._samples_before = 0

    def seconds(self, samples: int) -> float:
        """Seconds that the next slice takes."""
        drawn = self._time.seconds(samples) * self._jitter() * self.slow_by
        drawn *= slowdown_factor(self._slowdowns, self._samples_before)
        self._samples_before += samples
        self.slices += 1
        return drawn


class VirtualRank:
    """`share` is its samples of a slice when it comes. Seconds are virtual."""

    def __init__(self, number: int, version: int, share: int, device: VirtualDevice) -> None:
        self.number = number
        self.share = share
        self.worker = Worker(number, version)
        self.device = device
        self.task: Task | None = None  # that it computes
        self.slice_index = 0
        self.slice_samples = 0
        self.slice_ends_at = 0.0
        self.task_seconds = 0.0  # of the device
        self.task_loss = 0.0  # summed over samples
        self.landed = version  # rounds that are complete here
        self.in_flight: int | None = None  # the round that its contribution is in
        self.idle_since: float | None = 0.0  # its main thread waits
        self.resume: Callable[[VirtualRank], None] | None = None  # what that does with news
        self.assigned_at = 0.0  # when the last task arrives
        self.wait_seconds = 0.0
        self.round_seconds = 0.0  # that rounds have taken from its device
        self.rounds_paid = version
        self.told = (0.0, 0.0)  # of rounds and waits, with the last task
        self.waited_before = 0.0  # before this task
        self.compute_seconds = 0.0
        self.samples = 0
        self.samples_since_rest = 0

    def receive(self, task: Task) -> None:
        """A task has come."""
        self.worker.assign(task)
        self.wake()

    def wake(self) -> None:
        """What its main thread waits for may be there."""
        if self.resume is not None:
            self.resume(self)

    def waiting_seconds(self, now: float) -> float:
        """How long it has been waiting."""
        return 0.0 if self.idle_since is None else now - self.idle_since

    def rejoined(self, version: int, now: float) -> VirtualRank:
        """The rank back after an absence: with its device and its books, and nothing else."""
        rank = VirtualRank(self.number, version, self.share, self.device)
        rank.idle_since = now
        rank.wait_seconds = rank.waited_before = self.wait_seconds
        rank.compute_seconds, rank.samples = self.compute_seconds, self.samples
        return rank


class VirtualRanks:
    """Who is there, who waits, who has left; each by number."""

    def __init__(self, ranks: Iterable[VirtualRank]) -> None:
        self.present = {rank.number: rank for rank in ranks}
        self.idle = dict(self.present)  # their main threads wait
        self.away: dict[int, VirtualRank] = {}

    @staticmethod
    def of(scenario: Scenario) -> VirtualRanks:
        """At version 0, with nothing to do."""
        return VirtualRanks(
            VirtualRank(number, 0, share, VirtualDevice(scenario.cluster, number, profile.time, scenario.seed))
            for number, (profile, share) in enumerate(zip(scenario.ranks, scenario.shares, strict=True))
        )

    def __len__(self) -> int:
        """Of those who are there."""
        return len(self.present)

    @property
    def all_idle(self) -> bool:
        return len(self.idle) == len(self.present)

    def wait(self, rank: VirtualRank, now: float, resume: Callable[[VirtualRank], None] | None = None) -> None:
        """Its main thread waits from now on, and does `resume` when it is woken."""
        rank.resume = resume
        if rank.idle_since is None:
            rank.idle_since = now
            self.idle[rank.number] = rank

    def end_wait(self, rank: VirtualRank, now: float) -> None:
        rank.resume = None
        if rank.idle_since is not None:
            rank.wait_seconds += now - rank.idle_since
            rank.idle_since = None
            del self.idle[rank.number]

    def remove(self, number: int, now: float) -> None:
        self.away[number] = rank = self.present.pop(number)
        self.end_wait(rank, now)

    def add_back(self, number: int, version: int, now: float) -> VirtualRank:
        """The rank that was away, with the anchor of this version."""
        rank = self.away.pop(number).rejoined(version, now)
        self.present[number] = self.idle[number] = rank
        return rank
