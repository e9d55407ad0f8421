"""What is simulated: a job on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares, makespan
from hetsync.config.schema import SyncConfig, WireFormat
from hetsync.emulation.cluster import Cluster, Link
from hetsync.emulation.link import LinkTimes
from hetsync.plane.wire import of_gradients
from hetsync.simulate.polling import Runtime
from hetsync.sync.gradients import make_buckets
from hetsync.sync.messages import settings_of
from hetsync.sync.milestones import Marks, Milestones, no_marks, rests_at
from hetsync.sync.rounds_rule import RoundsChange, begun_behind
from hetsync.sync.tail import shared_buffers, travelling_bytes, travelling_values


@dataclass(frozen=True)
class Traffic:
    """What travels, in float32 values, of which a float64 takes the place of two.

    Args:
        values: Of a delayed round: weights and float buffers.
        buckets: Of a synchronous round's gradient buckets, in backward order.
        tail: Of a synchronous round's last collective: usage counts and float buffers.
        buffers: Those of `values` that a delayed round sums in a collective of their own.
    """

    values: int = 1
    buckets: tuple[int, ...] = (1,)
    tail: int = 0
    buffers: int = 0

    @staticmethod
    def of(model: torch.nn.Module, bucket_bytes: int) -> Traffic:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        values, n_bytes = travelling_values(model), travelling_bytes(model)
        buffers = sum(buffer.numel() for buffer in shared_buffers(model)) * n_bytes // max(1, 4 * values)
        buckets = tuple(bucket.flat.nbytes // 4 for bucket in make_buckets(weights, bucket_bytes))
        return Traffic(n_bytes // 4, buckets, len(weights) + buffers, buffers)

    @property
    def weights(self) -> int:
        """Those of `values` that are no buffers'."""
        return self.values - self.buffers

    @property
    def bucket_shares(self) -> list[float]:
        """The part of backward after which each bucket is full."""
        return [sum(self.buckets[: i + 1]) / max(1, sum(self.buckets)) for i in range(len(self.buckets))]


@dataclass(frozen=True)
class Scenario:
    """A job on a cluster.

    Args:
        cluster: Whose jitter, events and link are drawn as `--emulate` draws them for the same seed.
        ranks: Every rank's profile.
        sync: Settings at the start, shares, wire format; `fragments` as they are for these weights.
        batch_size: B, samples of one slice of all ranks.
        total_samples: Samples to train on, over all ranks.
        milestones: Where all ranks come to rest; None only at the end.
        seed: Of the jitter and of the moments at which threads poll.
        traffic: What travels.
        runtime: What HetSync itself takes.
        evaluations: Where the anchor is evaluated while ranks go on.
        adaptive: Not all optimizers are known to lose little by delay (`sync/rounds_rule.py`).
        judged: Milestones at which all ranks evaluate what they share.
    """

    cluster: Cluster
    ranks: Sequence[RankProfile]
    sync: SyncConfig
    batch_size: int
    total_samples: int
    milestones: Milestones | None = None
    seed: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    runtime: Runtime = field(default_factory=Runtime)
    evaluations: Marks = no_marks
    judged: Marks = no_marks
    adaptive: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", self.sync.for_model(self.traffic.weights))

    @property
    def rests(self) -> Milestones:
        return self.milestones or rests_at(no_marks, "", self.total_samples)

    @cached_property
    def _shares(self) -> tuple[int, ...]:
        """Samples of each rank in a slice, as the recipe has them."""
        return choose_shares(self.sync, self.batch_size, self.ranks)

    @cached_property
    def _slice_seconds(self) -> float:
        return makespan(self._shares, [profile.time for profile in self.ranks])

    @cached_property
    def begun(self) -> RoundsChange | None:
        """Other settings to begin with, by what is seen of the link."""
        seconds = self.link_seconds(self.traffic.values, of_gradients(self.sync.first_wire))
        slices = seconds / self._slice_seconds if seconds else 0.0
        return begun_behind(self.sync, settings_of(self.sync), slices)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a slice, at the start."""
        if self.begun is None:
            return self._shares
        return choose_shares(replace(self.sync, delay_bound=self.begun.delay_bound), self.batch_size, self.ranks)

    @cached_property
    def link(self) -> Link:
        """What an allreduce of all ranks travels on."""
        return self.cluster.ring_link(range(len(self.ranks)))

    def link_seconds(self, values: int, wire: WireFormat = "float32") -> float:
        """One collective of so many values, at the first shares."""
        if self.link == Link() or len(self.ranks) == 1:
            return 0.0
        times = LinkTimes.of(self.link, len(self.ranks), 4 * self.traffic.values, self._slice_seconds)
        return times.seconds(values, wire)
