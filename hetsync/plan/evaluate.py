"""What a placement costs: seconds of a step, bytes over links, bytes of memory. Pure, and fast enough to search with.

The three are never mixed here. What does not fit into a device's memory is infeasible.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hetsync.balance.profile import StepTime, fit
from hetsync.balance.shares import speed_shares
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster
from hetsync.errors import UserError
from hetsync.plan.graph import BlockCost, BlockGraph
from hetsync.plan.pipeline import end_times
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.rounds import GradientCost, Replicas, Rounds, buckets_of_blocks, segments
from hetsync.plan.schedule import micro_batch_sizes
from hetsync.plan.slices import BACKWARD, FORWARD, SAVED, WEIGHTS, Array, Slice, Slices, Staged
from hetsync.plane.wire import encoded_bytes
from hetsync.profiling.device import ENGINE_BUFFERS, USABLE_FRACTION, buckets_of

FloatOrArray = TypeVar("FloatOrArray", float, npt.NDArray[np.float64])
BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Training:
    """What a recipe says of a step. `optimizer_buffers`: values that the optimizer keeps for each weight."""

    batch_size: int
    sync: SyncConfig = field(default_factory=SyncConfig)
    optimizer_buffers: int = 2


@dataclass(frozen=True)
class Costs:
    """Of a step, which is a slice of all replicas.

    Attributes:
        step_seconds: Of `batch_size` samples.
        step_bytes: Over all links: activations, their gradients, sums.
        memory_bytes: By rank.
        lacking_bytes: By rank, where memory is not enough; empty where the placement is feasible.
        shares: Samples of each replica.
        replica_seconds: Of each replica's slice, alone.
        round_seconds: Of a round, alone; 0 for one replica.
    """

    step_seconds: float
    step_bytes: float
    memory_bytes: Mapping[int, int]
    lacking_bytes: Mapping[int, int]
    shares: tuple[int, ...]
    replica_seconds: tuple[float, ...]
    round_seconds: float

    @property
    def feasible(self) -> bool:
        return not self.lacking_bytes

    @property
    def samples_per_second(self) -> float:
        return sum(self.shares) / self.step_seconds

    @property
    def bytes_per_sample(self) -> float:
        return self.step_bytes / sum(self.shares)


@dataclass(frozen=True)
class Span:
    """A forward or backward pass of a timeline; seconds after the slice's begin."""

    replica: int
    stage: int
    rank: int
    micro_batch: int
    forward: bool
    begin: float
    end: float


class Evaluator:
    """Scores placements of one model on one cluster.

    Seconds are means: where devices of the cluster have jitter, of slices in which each of them is as slow as it draws.
    `step_times` are the ranks' of a step of the whole model, whose parts are those of as many samples as ranks have on
    average. A stage's update comes once a step, after its last backward pass and its sums; where replicas that are cut
    are in step, after those of all.
    UserError for a cluster whose link is a fraction of computing.

    Attributes:
        slices: What replicas do in a slice; it explains `figures`, `output_bytes`, `needed_bytes`, `loss_bytes`,
            `times` and `update_seconds`, which are there, too.
        limit_bytes: By rank, of memory that may be used.
    """

    def __init__(
        self,
        graph: BlockGraph,
        costs: Sequence[BlockCost],
        cluster: Cluster,
        step_times: Sequence[StepTime],
        training: Training,
    ) -> None:
        if len(costs) != len(graph.blocks):
            raise ValueError(f"{len(costs)} costs for {len(graph.blocks)} blocks")
        check_link(cluster)
        self.graph, self.block_costs, self.cluster = graph, tuple(costs), cluster
        self.step_times, self.training = tuple(step_times), training
        self.slices = Slices(graph, costs, cluster, step_times, training.batch_size / len(step_times))
        self.figures, self.output_bytes = self.slices.figures, self.slices.output_bytes
        self.needed_bytes, self.loss_bytes = self.slices.needed_bytes, self.slices.loss_bytes
        self.times, self.update_seconds = self.slices.times, self.slices.update_seconds
        self._padding = np.array([cost.padding for cost in costs])
        self._padded_samples = np.array([cost.padded_samples for cost in costs])
        values = [-(-cost.weight_bytes // BYTES_PER_VALUE) for cost in costs]
        self._wire_bytes = [encoded_bytes(number, training.sync.first_wire) for number in values]
        self._fragments = training.sync.for_model(sum(values)).first_fragments
        parts, sizes = self.figures[:, BACKWARD].tolist(), [BYTES_PER_VALUE * number for number in values]
        gradients = [GradientCost(*block) for block in zip(parts, sizes, self._wire_bytes, strict=True)]
        self._buckets = buckets_of_blocks(float(self.figures[:, FORWARD].sum()), gradients, training.sync.bucket_bytes)
        # By rank; a tenth of a device's memory stays free.
        self.limit_bytes = [_usable_bytes(cluster, rank) for rank in range(len(step_times))]

    def evaluate(self, placement: Placement) -> Costs:
        """All costs. Shares that are left out are those by predicted speed; UserError where there are none."""
        staged = [self.slices.staged(replica) for replica in placement.replicas]
        shares = self._shares(staged)
        slices = [self.slices.at(one, share) for one, share in zip(staged, shares, strict=True)]
        alone = [self.slices.seconds(one) for one in slices]
        seconds = tuple(map(_mean, alone))
        carried = sum(one.bytes for one in slices)
        step, round_seconds = max(seconds), 0.0
        if len(staged) > 1:
            in_step = self._in_step(placement.replicas)
            drawn = [self.slices.seconds(one, updating=False) for one in slices] if in_step else alone
            waiting = None if self.cluster.jitter is None else _mean(reduce(np.maximum, drawn))
            rounds, replicas = self._rounds(placement), Replicas(shares, list(map(_mean, drawn)), waiting)
            round_seconds = rounds.seconds(max(replicas.seconds))
            step = rounds.step_seconds(replicas, round_seconds)
            if in_step:
                step += self._last_update(slices)
            carried += rounds.carried_bytes() * rounds.per_step(replicas, round_seconds, step)
        memory = self._memory(staged, shares)
        lacking = {rank: need - limit for rank, need in memory.items() if need > (limit := self.limit_bytes[rank])}
        return Costs(step, carried, memory, lacking, shares, seconds, round_seconds)

    def with_shares(self, placement: Placement) -> Placement:
        """The placement with those shares that are left out by predicted speed."""
        shares = self._shares([self.slices.staged(replica) for replica in placement.replicas])
        pairs = zip(placement.replicas, shares, strict=True)
        return Placement(tuple(dataclasses.replace(replica, share=share) for replica, share in pairs))

    def timeline(self, placement: Placement) -> list[Span]:
        """What every rank does in a slice, by rank and in order."""
        spans = []
        for index, replica in enumerate(self.with_shares(placement).replicas):
            one = self.slices.at(self.slices.staged(replica), replica.share or 0)
            for (stage, rank), worker, ends in zip(one.workers, one.work, end_times(one.work), strict=True):
                for number, end in zip(worker.work, ends, strict=True):
                    forward, seconds = number < replica.micro_batches, worker.seconds[number]
                    spans.append(Span(index, stage, rank, number % replica.micro_batches, forward, end - seconds, end))
        return sorted(spans, key=lambda span: (span.rank, span.begin, span.end))

    def link_seconds(self, placement: Placement) -> dict[tuple[int, int], float]:
        """By pair of ranks, from one to the other: for how long activations and their gradients take the link in a
        slice. Without rounds."""
        found: dict[tuple[int, int], float] = {}
        for replica in self.with_shares(placement).replicas:
            one = self.slices.at(self.slices.staged(replica), replica.share or 0)
            for (_, rank), worker in zip(one.workers, one.work, strict=True):
                for send in (send for sends in worker.sends for send in sends):
                    pair = (rank, one.workers[send.target][1])
                    found[pair] = found.get(pair, 0.0) + send.seconds
        return found

    def check_hosts(self, placement: Placement) -> None:
        """UserError where a stage of several ranks is on several hosts, as far as the cluster says where they are."""
        for index, replica in enumerate(placement.replicas):
            for number, stage in enumerate(replica.stages):
                hosts = {self.cluster.device_of(rank).host or "" for rank in stage.ranks}
                if len(hosts) > 1:
                    raise UserError(
                        f"replicas[{index}].stages[{number}].ranks is {list(stage.ranks)}, which are on the hosts"
                        f" {', '.join(sorted(hosts))}: ranks that share a stage must share a host"
                    )

    def check_memory(self, costs: Costs) -> None:
        """UserError where a rank's stage needs more than its device has: rank, bytes needed, bytes there."""
        for rank in costs.lacking_bytes:
            raise UserError(
                f"rank {rank} needs {costs.memory_bytes[rank]:,} bytes for its stage, and {self.limit_bytes[rank]:,} of"
                f" its {self.cluster.device_of(rank).name} may be used: give it fewer blocks, a smaller share, or more"
                " micro-batches"
            )

    def parts_of_passes(self, replica: Replica) -> list[tuple[float, float]]:
        """By stage, the parts that its forward and its backward passes have of those of the whole model."""
        figures = self.slices.staged(replica).figures
        return [(float(stage[FORWARD]), float(stage[BACKWARD])) for stage in figures]

    def whole_step(self, rank: int) -> StepTime:
        """Of the whole model on one rank: its passes, and the update, whose time is the same for any share."""
        passes = self.times[rank]
        return StepTime(passes.fixed_seconds + self.update_seconds[rank], passes.seconds_per_sample)

    def update_of(self, replica: Replica, stage: int, rank: int) -> float:
        """Seconds that a rank's update of its stage takes."""
        return float(self.slices.staged(replica).update_parts[stage]) * self.update_seconds[rank]

    def held_bytes(self, weight_bytes: FloatOrArray, replicas: int) -> FloatOrArray:
        """Of weights, and of all that has their size: gradients, the optimizer's state, delayed mode's buffers."""
        delayed = replicas > 1 and self.training.sync.most_delay_bound != 0
        return weight_bytes * (2 + self.training.optimizer_buffers + (ENGINE_BUFFERS if delayed else 0))

    def _shares(self, staged: Sequence[Staged]) -> tuple[int, ...]:
        given = {index: one.replica.share for index, one in enumerate(staged) if one.replica.share is not None}
        if len(given) == len(staged):
            return tuple(given.values())
        batch = self.training.batch_size
        if len(staged) == 1:
            return (batch,)
        least = [one.replica.micro_batches * max(len(stage.ranks) for stage in one.replica.stages) for one in staged]
        if sum(least) > batch:
            raise UserError(
                f"data.batch_size is {batch}, and {len(staged)} replicas need {sum(least)} samples for one in every"
                " micro-batch: give fewer micro-batches, fewer replicas, or a larger batch"
            )
        # Where all update at once, behind the last one's passes, no share can make up for what that takes.
        updating = not self._in_step([one.replica for one in staged])
        times = [self._step_time(one, low, batch, updating) for one, low in zip(staged, least, strict=True)]
        shares = speed_shares(times, batch, pins=given)
        # A sample for every micro-batch, at least; what that takes from the others may leave them short in turn.
        while short := {index: low for index, low in enumerate(least) if shares[index] < low}:
            given |= short
            shares = speed_shares(times, batch, pins=given)
        return shares

    def _step_time(self, staged: Staged, least: int, most: int, updating: bool) -> StepTime:
        """Of a replica's slice by its share: a line through a small and a large one."""
        shares = [least, most] if most > least else [least]
        slices = [self.slices.at(staged, share) for share in shares]
        return fit(shares, [_mean(self.slices.seconds(one, updating)) for one in slices])

    def _in_step(self, replicas: Sequence[Replica]) -> bool:
        """Do all update at once, and wait for each other once more, to tell of the step? Whole models at once do not:
        each goes on to its next slice as soon as it has updated, as ranks do without a plan."""
        return self._synchronous(replicas) and not all(replica.at_once for replica in replicas)

    def _synchronous(self, replicas: Sequence[Replica]) -> bool:
        """Do they wait for each other's sums?"""
        return len(replicas) > 1 and self.training.sync.most_delay_bound == 0

    def _last_update(self, slices: Sequence[Slice]) -> float:
        """Until all have updated that have begun it at once."""
        return _mean(reduce(np.maximum, [each for one in slices for each in self.slices.updates(one)]))

    def link(self, rank: int, other: int) -> tuple[float, float]:
        """Latency, and seconds a byte, from one rank to another."""
        return self.slices.link(rank, other)

    def _rounds(self, placement: Placement) -> Rounds:
        holders = []
        for replica in placement.replicas:
            ranks_of: list[tuple[int, ...]] = [()] * len(self.graph.blocks)
            for stage in replica.stages:
                for block in stage.blocks:
                    ranks_of[block] = stage.ranks
            holders.append(ranks_of)
        whole = all(replica.at_once for replica in placement.replicas)
        buckets, fragments = (self._buckets, self._fragments) if whole else ((), 1)
        return Rounds(segments(holders, self._wire_bytes), self.cluster, self.training.sync, buckets, fragments)

    def _memory(self, staged: Sequence[Staged], shares: Sequence[int]) -> dict[int, int]:
        found = {}
        # In step, whole models add their gradients up in buckets, which leave while backward runs.
        replicas = [one.replica for one in staged]
        buckets = buckets_of(self.training.sync) if self._synchronous(replicas) and not self._in_step(replicas) else 0
        for one, share in zip(staged, shares, strict=True):
            largest = max(micro_batch_sizes(share, one.replica.micro_batches))
            for index, stage in enumerate(one.replica.stages):
                weights = float(one.figures[index, WEIGHTS])
                held = self.held_bytes(weights, len(staged)) + buckets * weights
                saved = float(one.figures[index, SAVED] + one.received_bytes[index])
                loss, in_flight = float(one.loss_bytes[index]), one.in_flight[index]
                for rank, part in zip(stage.ranks, self.slices.split(stage.ranks, largest), strict=True):
                    unpadded = self._unpadded_of_stage(stage, part)
                    found[rank] = int(held + part * saved_in_flight(saved, loss, in_flight, unpadded))
        return dict(sorted(found.items()))

    def _unpadded_of_stage(self, stage: Stage, samples: int) -> float:
        """The mean of `unpadded_by_block` over a stage's blocks, weighted by what these save."""
        if not self._padding.any():
            return 1.0
        blocks = list(stage.blocks)
        saved = self.figures[blocks, SAVED]
        return float(saved @ self.unpadded_by_block(samples)[blocks] / saved.sum()) if saved.any() else 1.0

    def unpadded_by_block(self, samples: int) -> Array:
        """By block: the part of what a sample of the profiled batch saves that one of a micro-batch of so many does."""
        return np.minimum(1.0, samples / self._padded_samples) ** self._padding


def check_link(cluster: Cluster) -> None:
    """UserError for a link that is a fraction of computing."""
    if cluster.link is not None and cluster.link.compute_fraction is not None:
        raise UserError(
            f"cluster profile {cluster.name}: link.compute_fraction is {cluster.link.compute_fraction}, by which "
            "nobody can tell how long activations take: give bytes_per_second"
        )


def saved_in_flight(saved: FloatOrArray, loss: FloatOrArray, in_flight: int, unpadded: FloatOrArray) -> FloatOrArray:
    """Bytes that a sample of each of so many micro-batches saves on a stage, `loss` of which for the loss: that is
    computed just before its backward pass, so that there is one at a time. The longest sample, to which all of its
    micro-batch are padded, is in one of them: the others save the part `unpadded`."""
    return saved + (saved - loss) * (in_flight - 1) * unpadded


def _usable_bytes(cluster: Cluster, rank: int) -> int:
    memory = cluster.device_of(rank).memory_bytes
    return sys.maxsize if memory is None else int(USABLE_FRACTION * memory)


def _mean(seconds: float | Array) -> float:
    return float(seconds.mean()) if isinstance(seconds, np.ndarray) else float(seconds)
