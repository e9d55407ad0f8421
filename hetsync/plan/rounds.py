"""What synchronising the replicas adds to a step: its seconds and its bytes. Pure.

The closed forms for delayed mode are those that the state machine shows on a virtual clock (tests/unit/plan): rates add
as long as rounds are short enough, and in D + 1 rounds a replica has room for as many halves of contributions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster

Segments = Mapping[tuple[int, ...], int]  # bytes, by the ranks that hold them


@dataclass(frozen=True)
class Replicas:
    """Replicas as rounds see them.

    Attributes:
        shares: Samples of each in a slice.
        seconds: That these take it, on average.
        waiting_seconds: Until the last of them has ended a slice, on average; None where slices do not scatter.
    """

    shares: Sequence[int]
    seconds: Sequence[float]
    waiting_seconds: float | None = None

    @property
    def slowest_seconds(self) -> float:
        """Of a slice of all, each of which waits for the others."""
        return max(self.seconds) if self.waiting_seconds is None else self.waiting_seconds

    @property
    def delayed_seconds(self) -> float:
        """Of a step of all, where none waits for another: their rates add up."""
        return sum(self.shares) / sum(share / seconds for share, seconds in zip(self.shares, self.seconds, strict=True))


def segments(holders: Iterable[Sequence[tuple[int, ...]]], weight_bytes: Sequence[int]) -> Segments:
    """What is summed over the same ranks. `holders`: for each replica, by block, the ranks that hold it."""
    found: Counter[tuple[int, ...]] = Counter()
    for ranks, size in zip(zip(*holders, strict=True), weight_bytes, strict=True):
        found[tuple(chain.from_iterable(ranks))] += size
    return found


@dataclass(frozen=True)
class Rounds:
    """Sums of `segments` over their holders, one after another where they share a rank.

    Attributes:
        buckets: Of gradients, where each replica is one rank that runs its share at once: in the order in which they
            leave, the part of a slice after which each is full, and bytes.
        fragments: Of which a round of delayed mode sums one.
    """

    segments: Segments
    cluster: Cluster
    sync: SyncConfig
    buckets: Sequence[tuple[float, int]] = ()
    fragments: int = 1

    @property
    def delayed(self) -> bool:
        return self.sync.most_delay_bound != 0

    @property
    def summed(self) -> Segments:
        """What one round sums."""
        fragments = self.fragments if self.delayed else 1
        return {ranks: -(-size // fragments) for ranks, size in self.segments.items()}

    def seconds(self, slice_seconds: float) -> float:
        """Of one round, with nobody to wait for."""
        free: dict[int, float] = {}
        for ranks, size in self.summed.items():
            link = self.cluster.ring_link(sorted(ranks))
            seconds = link.seconds(size, len(ranks), slice_seconds)
            seconds += (self._buckets(size) - 1) * link.latency_seconds
            end = max(free.get(rank, 0.0) for rank in ranks) + seconds
            free.update(dict.fromkeys(ranks, end))
        return max(free.values())

    def carried_bytes(self) -> int:
        """Of one round, over all links."""
        return sum(2 * (len(ranks) - 1) * size for ranks, size in self.summed.items())

    def step_seconds(self, replicas: Replicas, round_seconds: float) -> float:
        """Of a slice of all replicas, with the rounds that go with it."""
        slowest, slices = replicas.slowest_seconds, self.sync.first_accumulation
        if not self.delayed:
            return slowest + (self._synchronous_end(replicas, round_seconds) - slowest) / slices
        waiting = self.sync.first_quorum == 1
        computing = slowest if waiting else replicas.delayed_seconds
        bound = self.sync.most_delay_bound
        room = math.inf if bound is None else slices * (bound + 1) / 2  # slices that fit into a round
        return max(computing, round_seconds / room)

    def per_step(self, replicas: Replicas, round_seconds: float, step_seconds: float) -> float:
        """Rounds in a step: as many as have a quorum, one with grace, as a slice may last, and as the link carries.

        The state machine starts up to a third fewer, where work under way would become too stale.
        """
        slices = self.sync.first_accumulation
        if not self.delayed:
            return 1 / slices
        most = 1 if self.sync.first_grace else quorums(replicas.shares, self.sync.first_quorum)
        if self.sync.most_delay_bound is not None:
            most = min(most, self.sync.most_delay_bound)
        by_link = step_seconds / round_seconds if round_seconds else math.inf
        return min(most / slices, by_link)

    def _buckets(self, size: int) -> int:
        """Collectives that a sum of this size is."""
        return 1 if self.delayed else len(self.buckets) or -(-size // self.sync.bucket_bytes)

    def _synchronous_end(self, replicas: Replicas, round_seconds: float) -> float:
        """Buckets leave one after the other, as they become full while the last backward pass runs."""
        slowest, carried = replicas.slowest_seconds, sum(size for _, size in self.buckets)
        if not (self.sync.overlap and carried):
            return slowest + round_seconds
        end = 0.0
        for full, size in self.buckets:
            end = max(end, full * slowest) + round_seconds * size / carried
        return max(end, slowest)


class GradientCost(NamedTuple):
    """Of a block. `part`: of a slice, that its backward pass takes; `wire_bytes`: what is carried of its `bytes`."""

    part: float
    bytes: int
    wire_bytes: int


def buckets_of_blocks(forward: float, blocks: Sequence[GradientCost], bucket_bytes: int) -> list[tuple[float, int]]:
    """`Rounds.buckets` of a model whose forward pass is this part of a slice: filled from the last block to the first,
    as `sync/gradients.py` does it parameter by parameter."""
    found, size, carried, full, done = [], 0, 0, 0.0, forward
    for block in reversed(blocks):
        done += block.part
        if not block.bytes:
            continue
        if size and size + block.bytes > bucket_bytes:
            found.append((full, carried))
            size, carried = 0, 0
        size, carried, full = size + block.bytes, carried + block.wire_bytes, done
    return [*found, (full, carried)] if size else found


def quorums(shares: Sequence[int], quorum: float) -> int:
    """Rounds that contributions of all replicas can start: one whenever enough samples are there."""
    found, waiting = 0, 0
    for share in sorted(shares, reverse=True):
        waiting += share
        if waiting >= quorum * sum(shares):
            found, waiting = found + 1, 0
    return found
