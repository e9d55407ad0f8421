"""What is simulated: a cluster, a job on it, and what HetSync's own runtime takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hetsync.config import SyncConfig
from hetsync.plane.wire import encoded_bytes
from hetsync.profiling.cluster import Cluster
from hetsync.session import RankProfile, choose_shares
from hetsync.sync.gradients import make_buckets
from hetsync.sync.milestones import Marks, Milestones, no_marks, rests_at
from hetsync.sync.naps import (
    FRACTION_COMPUTING,
    FRACTION_WAITING,
    LONGEST_COLLECTIVE_SECONDS,
    LONGEST_IDLE_SECONDS,
)


@dataclass(frozen=True)
class Runtime:
    """What the engine itself takes, in seconds. The naps are the engine's own constants; the other defaults were fitted
    to runs of eight ranks on one machine of two cores (docs/simulator.md).

    Args:
        message_seconds: A message from one communication thread to another, once that one looks.
        slice_seconds: From the end of a rank's slice to the begin of its next: books, hand-over, next batch.
        step_seconds: What a synchronous step takes beyond devices, link and looks: gradients to the optimizer and
            back, and all ranks' waking at once.
        idle_nap_seconds: Longest time between two looks of a communication thread with no sum under way.
        collective_nap_seconds: The same while a sum is under way. A sum moves on when both ends of a message have
            looked, and takes log2(ranks) such steps.
        computing_fraction: A thread whose rank computes sleeps this fraction of the time since something happened.
        waiting_fraction: The same for a rank that waits.
    """

    message_seconds: float = 0.3e-3
    slice_seconds: float = 2e-3
    step_seconds: float = 15e-3
    idle_nap_seconds: float = LONGEST_IDLE_SECONDS
    collective_nap_seconds: float = LONGEST_COLLECTIVE_SECONDS
    computing_fraction: float = FRACTION_COMPUTING
    waiting_fraction: float = FRACTION_WAITING


@dataclass(frozen=True)
class Traffic:
    """What travels, in float32 values.

    Args:
        values: Of a delayed round: weights and float buffers.
        buckets: Of a synchronous round's gradient buckets, in backward order.
        tail: Of a synchronous round's last collective: usage counts and float buffers.
    """

    values: int = 1
    buckets: tuple[int, ...] = (1,)
    tail: int = 0

    @staticmethod
    def of(model: torch.nn.Module, bucket_bytes: int) -> Traffic:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buffers = sum(b.numel() for b in model.buffers() if b.is_floating_point())
        buckets = tuple(bucket.flat.numel() for bucket in make_buckets(weights, bucket_bytes))
        return Traffic(sum(w.numel() for w in weights) + buffers, buckets, len(weights) + buffers)


@dataclass(frozen=True)
class Scenario:
    """A job on a cluster.

    Args:
        cluster: Whose jitter, events and link are drawn as `--emulate` draws them for the same seed.
        ranks: Every rank's profile.
        sync: Settings at the start, shares, wire format.
        batch_size: B, samples of one slice of all ranks.
        total_samples: Samples to train on, over all ranks.
        milestones: Where all ranks come to rest; None only at the end.
        seed: Of the jitter and of the moments at which threads look.
        traffic: What travels.
        runtime: What HetSync itself takes.
        evaluations: Where the anchor is evaluated.
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

    @property
    def rests(self) -> Milestones:
        return self.milestones or rests_at(no_marks, "", self.total_samples)

    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a slice."""
        return choose_shares(self.sync, self.batch_size, self.ranks)

    def link_seconds(self, values: int, shares: Sequence[int]) -> float:
        """One collective of so many values, where each rank has this share of a slice."""
        link, ranks = self.cluster.link, len(self.ranks)
        if link is None or ranks == 1:
            return 0.0
        slice_seconds = max(p.time.seconds(n) for p, n in zip(self.ranks, shares, strict=True))
        # As the trainer does: a round of float32 values takes the profile's time, in however many buckets it travels.
        whole_bytes = 4 * self.traffic.values
        transfer = link.seconds(whole_bytes, ranks, slice_seconds) - link.latency_seconds
        return link.latency_seconds + transfer * encoded_bytes(values, self.sync.wire) / whole_bytes
