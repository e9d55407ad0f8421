"""One virtual rank: its device, its half of the protocol, its books."""

from __future__ import annotations

import math
from collections.abc import Callable

from hetsync.emulate import jitter_sampler
from hetsync.profiling.cluster import Cluster
from hetsync.sync.messages import Piece
from hetsync.sync.worker import Worker


class VirtualDevice:
    """The times of an emulated device, without its clock. `slow_by` multiplies what is drawn."""

    def __init__(self, cluster: Cluster, rank: int, rate: float, seed: int) -> None:
        self.slow_by = 1.0
        self.slices = 0
        self._seconds_per_sample = 1 / rate
        self._events = [event for event in cluster.events if event.rank == rank]
        self._jitter: Callable[[], float] = jitter_sampler(cluster.jitter, seed, rank)
        self._samples_before = 0

    def seconds(self, samples: int) -> float:
        """Seconds that the next slice takes."""
        drawn = samples * self._seconds_per_sample * self._jitter() * self.slow_by
        if self._events:  # the profile's, which go by the rank's own samples
            done = self._samples_before
            active = (e for e in self._events if e.after_samples <= done < (e.until_samples or math.inf))
            drawn *= math.prod(event.factor for event in active)
        self._samples_before += samples
        self.slices += 1
        return drawn


class Node:
    def __init__(self, rank: int, version: int, device: VirtualDevice) -> None:
        self.rank = rank
        self.worker = Worker(rank, version)
        self.device = device
        self.piece: Piece | None = None  # that it computes
        self.slice_index = 0
        self.slice_samples = 0
        self.slice_ends_at = 0.0
        self.piece_seconds = 0.0  # of the device
        self.piece_loss = 0.0  # summed over samples
        self.landed = version  # rounds that are complete here
        self.flying: int | None = None  # the round that its contribution is in
        self.idle_since: float | None = 0.0  # its main thread waits
        self.given_at = 0.0  # when the last piece arrives
        self.wait_seconds = 0.0
        self.waited_before = 0.0  # before this piece
        self.compute_seconds = 0.0
        self.samples = 0
        self.since_rest = 0

    def waiting_seconds(self, now: float) -> float:
        """How long it has been waiting."""
        return 0.0 if self.idle_since is None else now - self.idle_since

    def again(self, version: int, now: float) -> Node:
        """The rank back after an absence: with its device and its books, and nothing else."""
        node = Node(self.rank, version, self.device)
        node.idle_since = now
        node.wait_seconds = node.waited_before = self.wait_seconds
        node.compute_seconds, node.samples = self.compute_seconds, self.samples
        return node
