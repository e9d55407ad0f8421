"""What a placement costs: seconds of a step, bytes over links, bytes of memory. Pure, and fast enough to search with.

The three are never mixed here. What does not fit into a device's memory is infeasible.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hetsync.balance.profile import StepTime, fit
from hetsync.balance.shares import speed_shares
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.jitter import likely_factors
from hetsync.errors import UserError
from hetsync.plan.division import parts_by_speed, pieces_by_rank
from hetsync.plan.graph import BATCH, BlockCost, BlockGraph
from hetsync.plan.pipeline import Send, Worker, end_times
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.rounds import Replicas, Rounds, segments
from hetsync.plan.schedule import bounded_in_flight, micro_batch_sizes, schedule, stage_order
from hetsync.plane.wire import encoded_bytes
from hetsync.profiling.device import ENGINE_BUFFERS, USABLE_FRACTION

Array = npt.NDArray[np.float64]
FloatOrArray = TypeVar("FloatOrArray", float, npt.NDArray[np.float64])
BYTES_PER_VALUE = 4
SLICES = 256  # of which the mean is taken where devices have jitter
FORWARD, BACKWARD, SAVED, WEIGHTS = range(4)  # columns of figures: parts of a step, a sample's bytes, bytes


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


@dataclass(frozen=True)
class _Staged:
    """A replica as far as its share does not matter. Rows are stages."""

    replica: Replica
    figures: Array  # summed over its blocks: the columns of Evaluator's figures
    sample_bytes: Mapping[tuple[int, int], float]  # between two stages, a sample's
    received_bytes: Array  # by stage: a sample's of these, which backward needs
    loss_bytes: Array  # by stage: a sample's of what is saved for backward, of one micro-batch at a time
    update_parts: Array  # by stage, of the whole model's update
    in_flight: tuple[int, ...]
    late: frozenset[tuple[int, int]]  # pairs of stages between which goes only what the loss needs


@dataclass(frozen=True)
class _Slice:
    """A replica's slice at some share."""

    workers: tuple[tuple[int, int], ...]  # (stage, rank)
    work: tuple[Worker, ...]
    end_sums: Mapping[int, float]  # by stage of several ranks: seconds of its gradients' sum
    updates: tuple[float, ...]  # by worker, seconds of the optimizer's update
    bytes: float


class Evaluator:
    """Scores placements of one model on one cluster.

    Seconds are means: where devices of the cluster have jitter, of slices in which each of them is as slow as it draws.
    `step_times` are the ranks' of a step of the whole model. The optimizer's update and each block's passes have the
    parts of it that they have on the profiled device, for as many samples as ranks have on average. A stage's update
    comes once a step, after its last backward pass and its sums; where replicas are in step, after those of all.
    UserError for a cluster whose link is a fraction of computing.

    Attributes:
        times: Of the passes of the whole model, forward and backward, by rank.
        update_seconds: Of the update of the whole model, by rank.
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
        if cluster.link is not None and cluster.link.compute_fraction is not None:
            raise UserError(
                f"cluster profile {cluster.name}: link.compute_fraction is {cluster.link.compute_fraction}, by which "
                "nobody can tell how long activations take: give bytes_per_second"
            )
        self.graph, self.block_costs, self.cluster = graph, tuple(costs), cluster
        self.step_times, self.training = tuple(step_times), training
        samples = training.batch_size / len(step_times)
        self.figures = _figures(costs, samples)
        self._update_parts = _update_parts(costs)
        divided = [_divided(time, costs, samples) for time in step_times]
        self.times = tuple(passes for passes, _ in divided)
        self.update_seconds = tuple(update for _, update in divided)
        self.output_bytes = np.array([cost.output_bytes for cost in costs], dtype=float)
        self._needed_bytes = np.array([cost.received_bytes for cost in costs], dtype=float)
        self.loss_bytes = np.array([cost.loss_bytes for cost in costs], dtype=float)
        self._padding = np.array([cost.padding for cost in costs])
        self._padded_samples = np.array([cost.padded_samples for cost in costs])
        inner = [(edge.source, edge.target) for edge in graph.edges if edge.source != BATCH]
        self._sources, self._targets = np.array(inner, dtype=int).reshape(-1, 2).T
        self._sinks = sorted(set(range(len(costs))) - {source for source, _ in inner})
        values = [-(-cost.weight_bytes // BYTES_PER_VALUE) for cost in costs]
        self._wire_bytes = [encoded_bytes(number, training.sync.wire) for number in values]
        # By rank; a tenth of a device's memory stays free.
        self.limit_bytes = [_usable_bytes(cluster, rank) for rank in range(len(step_times))]
        self._links: dict[tuple[int, int], tuple[float, float]] = {}  # latency, seconds a byte
        self._parts: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        self._drawn: dict[int, Array] = {}  # by rank, factors of `SLICES` slices

    def evaluate(self, placement: Placement) -> Costs:
        """All costs. Shares that are left out are those by predicted speed; UserError where there are none."""
        staged = [self._staged(replica) for replica in placement.replicas]
        shares = self._shares(staged)
        slices = [self._slice(one, share) for one, share in zip(staged, shares, strict=True)]
        alone = [self._slice_seconds(one) for one in slices]
        seconds = tuple(map(_mean, alone))
        carried = sum(one.bytes for one in slices)
        step, round_seconds = max(seconds), 0.0
        if len(staged) > 1:
            in_step = self._in_step(len(staged))
            drawn = [self._slice_seconds(one, updating=False) for one in slices] if in_step else alone
            waiting = None if self.cluster.jitter is None else _mean(reduce(np.maximum, drawn))
            whole = all(replica.at_once for replica in placement.replicas)
            rounds, replicas = self._rounds(placement), Replicas(shares, list(map(_mean, drawn)), whole, waiting)
            round_seconds = rounds.seconds(max(replicas.seconds))
            step = rounds.step_seconds(replicas, round_seconds)
            if in_step:
                step += self._last_update(slices) / self.training.sync.first_accumulation
            carried += rounds.carried_bytes() * rounds.per_step(replicas, round_seconds, step)
        memory = self._memory(staged, shares)
        lacking = {rank: need - limit for rank, need in memory.items() if need > (limit := self.limit_bytes[rank])}
        return Costs(step, carried, memory, lacking, shares, seconds, round_seconds)

    def with_shares(self, placement: Placement) -> Placement:
        """The placement with those shares that are left out by predicted speed."""
        shares = self._shares([self._staged(replica) for replica in placement.replicas])
        pairs = zip(placement.replicas, shares, strict=True)
        return Placement(tuple(dataclasses.replace(replica, share=share) for replica, share in pairs))

    def timeline(self, placement: Placement) -> list[Span]:
        """What every rank does in a slice, by rank and in order."""
        spans = []
        for index, replica in enumerate(self.with_shares(placement).replicas):
            one = self._slice(self._staged(replica), replica.share or 0)
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
            one = self._slice(self._staged(replica), replica.share or 0)
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
        figures = self._staged(replica).figures
        return [(float(stage[FORWARD]), float(stage[BACKWARD])) for stage in figures]

    def update_of(self, replica: Replica, stage: int, rank: int) -> float:
        """Seconds that a rank's update of its stage takes."""
        return float(self._staged(replica).update_parts[stage]) * self.update_seconds[rank]

    def held_bytes(self, weight_bytes: FloatOrArray, replicas: int) -> FloatOrArray:
        """Of weights, and of all that has their size: gradients, the optimizer's state, delayed mode's buffers."""
        delayed = replicas > 1 and self.training.sync.delay_bound != 0
        return weight_bytes * (2 + self.training.optimizer_buffers + (ENGINE_BUFFERS if delayed else 0))

    def _staged(self, replica: Replica) -> _Staged:
        stage_of = np.empty(len(self.graph.blocks), dtype=int)
        for index, stage in enumerate(replica.stages):
            stage_of[list(stage.blocks)] = index
        member = stage_of == np.arange(len(replica.stages))[:, None]
        sample_bytes, late = self._sample_bytes(stage_of, len(replica.stages))
        in_flight = bounded_in_flight(
            len(replica.stages), sample_bytes, replica.micro_batches, [stage.in_flight for stage in replica.stages]
        )
        received = self._received_bytes(stage_of, sample_bytes, len(replica.stages))
        loss = member @ self.loss_bytes
        updates = member @ self._update_parts
        return _Staged(replica, member @ self.figures, sample_bytes, received, loss, updates, in_flight, late)

    def _received_bytes(
        self, stage_of: npt.NDArray[Any], sample_bytes: Mapping[tuple[int, int], float], stages: int
    ) -> Array:
        """By stage, what its blocks save that others have made; what several of them need comes once."""
        entered = np.unique(self._targets[stage_of[self._sources] != stage_of[self._targets]])
        needed: Array = np.bincount(stage_of[entered], self._needed_bytes[entered], stages).astype(float)
        for stage in range(stages):
            came = sum(size for (_, target), size in sample_bytes.items() if target == stage)
            needed[stage] = min(needed[stage], came)
        return needed

    def _sample_bytes(
        self, stage_of: npt.NDArray[Any], stages: int
    ) -> tuple[dict[tuple[int, int], float], frozenset[tuple[int, int]]]:
        """Between stages: a block's output goes to each stage once, however many of its blocks need it.

        And the pairs of which the second needs nothing for its blocks, but what the model returns, for the loss.
        """
        source_stage, target_stage = stage_of[self._sources], stage_of[self._targets]
        across = source_stage != target_stage
        block_to_stage = np.unique(self._sources[across] * stages + target_stage[across])
        found: dict[tuple[int, int], float] = {}
        for block, target in zip(*(part.tolist() for part in np.divmod(block_to_stage, stages)), strict=True):
            pair = (int(stage_of[block]), target)
            found[pair] = found.get(pair, 0.0) + float(self.output_bytes[block])
        needed = frozenset(found)
        if len(self._sinks) > 1:  # what the model returns goes to the last stage, which computes the loss
            last = stage_order(stages, found)[-1]
            for block in self._sinks:
                if stage_of[block] != last:
                    pair = (int(stage_of[block]), last)
                    found[pair] = found.get(pair, 0.0) + float(self.output_bytes[block])
        return found, frozenset(found) - needed

    def _shares(self, staged: Sequence[_Staged]) -> tuple[int, ...]:
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
        # In step, all update once the last has ended its passes: what that takes no share can make up for.
        updating = not self._in_step(len(staged))
        times = [self._step_time(one, low, batch, updating) for one, low in zip(staged, least, strict=True)]
        shares = speed_shares(times, batch, pins=given)
        if short := {index: low for index, low in enumerate(least) if shares[index] < low}:
            shares = speed_shares(times, batch, pins=given | short)  # a sample for every micro-batch, at least
        return shares

    def _step_time(self, staged: _Staged, least: int, most: int, updating: bool) -> StepTime:
        """Of a replica's slice by its share: a line through a small and a large one."""
        shares = [least, most] if most > least else [least]
        slices = [self._slice(staged, share) for share in shares]
        return fit(shares, [_mean(self._slice_seconds(one, updating)) for one in slices])

    def _in_step(self, replicas: int) -> bool:
        """Do they wait for each other's sums, before all update at once?"""
        return replicas > 1 and self.training.sync.delay_bound == 0

    def _slice_seconds(self, one: _Slice, updating: bool = True) -> float | Array:
        """With jitter those of `SLICES` slices, in which each rank draws a factor for all that it computes. The
        update is in it if `updating`."""
        updates = self._update_seconds(one) if updating else [0.0] * len(one.updates)
        if self.cluster.jitter is None:
            return _last_end(one, end_times(one.work), updates, max)
        work = []
        for (_, rank), worker in zip(one.workers, one.work, strict=True):
            scattered = {seconds: seconds * self._factors(rank) for seconds in set(worker.seconds)}
            work.append(dataclasses.replace(worker, seconds=[scattered[seconds] for seconds in worker.seconds]))
        return _last_end(one, end_times(work, np.maximum), updates, np.maximum)

    def _update_seconds(self, one: _Slice) -> Sequence[float | Array]:
        """By worker, scattered as its slices are."""
        if self.cluster.jitter is None:
            return one.updates
        return [seconds * self._factors(rank) for (_, rank), seconds in zip(one.workers, one.updates, strict=True)]

    def _last_update(self, slices: Sequence[_Slice]) -> float:
        """Until all have updated that have begun it at once."""
        return _mean(reduce(np.maximum, [each for one in slices for each in self._update_seconds(one)]))

    def _factors(self, rank: int) -> Array:
        """By which its slices scatter, in an order of the rank's own, so that ranks are independent."""
        if rank not in self._drawn:
            assert self.cluster.jitter is not None
            factors = likely_factors(self.cluster.jitter, rank, SLICES)
            random.Random(str(rank)).shuffle(factors)
            self._drawn[rank] = np.array(factors)
        return self._drawn[rank]

    def _slice(self, staged: _Staged, share: int) -> _Slice:
        replica, stages = staged.replica, staged.replica.stages
        sizes = micro_batch_sizes(share, replica.micro_batches)
        parts = {size: [self._split(stage.ranks, size) for stage in stages] for size in set(sizes)}
        workers = tuple((index, rank) for index, stage in enumerate(stages) for rank in stage.ranks)
        pieces = {size: pieces_by_rank(parts[size]) for size in parts}
        sends = {size: self._sends(staged, workers, parts[size]) for size in parts}
        work = []
        for place, (index, rank) in enumerate(workers):
            own = {size: pieces[size][index][stages[index].ranks.index(rank)] for size in parts}
            forward = {size: self._seconds(staged, index, rank, each, backward=False) for size, each in own.items()}
            backward = {size: self._seconds(staged, index, rank, each, backward=True) for size, each in own.items()}
            order = schedule(len(sizes), staged.in_flight[index])
            work.append(
                Worker(
                    [number if kind == "forward" else number + len(sizes) for kind, number in order],
                    [*(forward[size] for size in sizes), *(backward[size] for size in sizes)],
                    [*(sends[size][0][place] for size in sizes), *(sends[size][1][place] for size in sizes)],
                )
            )
        end_sums, sum_bytes = self._lockstep_sums(staged)
        updates = tuple(float(staged.update_parts[index]) * self.update_seconds[rank] for index, rank in workers)
        carried = 2 * sum(staged.sample_bytes.values()) * share + sum_bytes
        return _Slice(workers, tuple(work), end_sums, updates, carried)

    def _split(self, ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
        """The samples of a micro-batch that each rank of a stage computes: by speed."""
        if len(ranks) == 1:
            return (size,)
        key = (ranks, size)
        if key not in self._parts:
            self._parts[key] = parts_by_speed([self.times[rank] for rank in ranks], size)
        return self._parts[key]

    def _seconds(self, staged: _Staged, stage: int, rank: int, pieces: Sequence[int], backward: bool) -> float:
        """Of a micro-batch, whose pieces go through the stage one after another."""
        part = float(staged.figures[stage, BACKWARD if backward else FORWARD])
        return part * sum(self.times[rank].seconds(samples) for samples in pieces)

    def _sends(
        self, staged: _Staged, workers: Sequence[tuple[int, int]], parts: Sequence[tuple[int, ...]]
    ) -> tuple[list[list[Send]], list[list[Send]]]:
        """What each worker sends after the forward and after the backward pass of a micro-batch: for the samples that
        both ends compute. What is late only the backward pass waits for, which begins with the loss."""
        onwards: list[list[Send]] = [[] for _ in workers]
        back: list[list[Send]] = [[] for _ in workers]
        spans = [list(pairwise([0, *accumulate(sizes)])) for sizes in parts]
        first = [0, *accumulate(len(sizes) for sizes in parts)]
        for (source, target), sample_bytes in sorted(staged.sample_bytes.items()):
            ahead = staged.replica.micro_batches if (source, target) in staged.late else 0
            for i, (begin, end) in enumerate(spans[source], first[source]):
                for j, (other_begin, other_end) in enumerate(spans[target], first[target]):
                    samples = min(end, other_end) - max(begin, other_begin)
                    if samples > 0:
                        latency, byte_seconds = self.link(workers[i][1], workers[j][1])
                        onwards[i].append(Send(j, samples * sample_bytes * byte_seconds, latency, ahead))
                        back[j].append(Send(i, samples * sample_bytes * byte_seconds, latency))
        return onwards, back

    def link(self, rank: int, other: int) -> tuple[float, float]:
        """Latency, and seconds a byte, from one rank to another."""
        key = (rank, other)
        if key not in self._links:
            link = self.cluster.link_between(rank, other)
            self._links[key] = (link.latency_seconds, 1 / link.bytes_per_second if link.bytes_per_second else 0.0)
        return self._links[key]

    def _lockstep_sums(self, staged: _Staged) -> tuple[dict[int, float], float]:
        """Of the gradients of stages on several ranks: seconds by stage, bytes of all."""
        seconds, carried = {}, 0.0
        for index, stage in enumerate(staged.replica.stages):
            if (ranks := len(stage.ranks)) > 1:
                size = int(staged.figures[index, WEIGHTS])
                seconds[index] = self.cluster.ring_link(stage.ranks).seconds(size, ranks, 0.0)
                carried += 2 * (ranks - 1) * size
        return seconds, carried

    def _rounds(self, placement: Placement) -> Rounds:
        holders = []
        for replica in placement.replicas:
            ranks_of: list[tuple[int, ...]] = [()] * len(self.graph.blocks)
            for stage in replica.stages:
                for block in stage.blocks:
                    ranks_of[block] = stage.ranks
            holders.append(ranks_of)
        return Rounds(segments(holders, self._wire_bytes), self.cluster, self.training.sync)

    def _memory(self, staged: Sequence[_Staged], shares: Sequence[int]) -> dict[int, int]:
        found = {}
        # In step, whole models add their gradients up in buckets, which leave while backward runs.
        in_buckets = self._in_step(len(staged)) and all(one.replica.at_once for one in staged)
        for one, share in zip(staged, shares, strict=True):
            largest = max(micro_batch_sizes(share, one.replica.micro_batches))
            for index, stage in enumerate(one.replica.stages):
                weights = float(one.figures[index, WEIGHTS])
                held = self.held_bytes(weights, len(staged)) + (weights if in_buckets else 0)
                saved = float(one.figures[index, SAVED] + one.received_bytes[index])
                # A loss is computed just before its backward pass, so that there is one at a time.
                others = (saved - float(one.loss_bytes[index])) * (one.in_flight[index] - 1)
                for rank, part in zip(stage.ranks, self._split(stage.ranks, largest), strict=True):
                    # The longest sample, to which all of its micro-batch are padded, is in one of them.
                    found[rank] = int(held + (saved + others * self._unpadded(stage, part)) * part)
        return dict(sorted(found.items()))

    def _unpadded(self, stage: Stage, samples: int) -> float:
        """Of what a sample of the profiled batch saves, the part that one of a micro-batch of so many does."""
        if not self._padding.any():
            return 1.0
        blocks = list(stage.blocks)
        saved = self.figures[blocks, SAVED]
        smaller = np.minimum(1.0, samples / self._padded_samples[blocks]) ** self._padding[blocks]
        return float(saved @ smaller / saved.sum()) if saved.any() else 1.0


def _figures(costs: Sequence[BlockCost], samples: float) -> Array:
    """A row a block, with its parts of all passes of so many samples, which add up to 1, and its bytes."""
    forward = np.array([cost.fixed_forward_seconds + samples * cost.forward_seconds for cost in costs])
    backward = np.array([cost.fixed_backward_seconds + samples * cost.backward_seconds for cost in costs])
    passes = forward.sum() + backward.sum()
    if not passes > 0:
        raise ValueError("blocks that take no time cannot be planned")
    memory = np.array([(cost.saved_bytes, cost.weight_bytes) for cost in costs], dtype=float)
    return np.column_stack([forward / passes, backward / passes, memory])


def _update_parts(costs: Sequence[BlockCost]) -> Array:
    """By block, of the whole model's update."""
    seconds = np.array([cost.update_seconds for cost in costs])
    return seconds / (seconds.sum() or 1.0)


def _divided(time: StepTime, costs: Sequence[BlockCost], samples: float) -> tuple[StepTime, float]:
    """Of a step: the passes, and seconds of the update.

    Each has the part that it has on the profiled device, of so many samples as of what is fixed: the update is, and
    comes once however many micro-batches there are.
    """
    update = sum(cost.update_seconds for cost in costs)
    fixed = sum(cost.fixed_forward_seconds + cost.fixed_backward_seconds for cost in costs)
    passes = fixed + samples * sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    own = update / (passes + update) * (time.fixed_seconds + samples * time.seconds_per_sample)
    of_fixed = update / (fixed + update) * time.fixed_seconds if update else 0.0
    each = time.seconds_per_sample - (own - of_fixed) / samples
    return StepTime(time.fixed_seconds - of_fixed, max(0.0, each)), own


def _usable_bytes(cluster: Cluster, rank: int) -> int:
    memory = cluster.device_of(rank).memory_bytes
    return sys.maxsize if memory is None else int(USABLE_FRACTION * memory)


def _last_end(
    one: _Slice, ends: Sequence[Sequence[Any]], updates: Sequence[Any], later: Callable[[Any, Any], Any]
) -> Any:
    """Ranks of a stage add up its gradients once all of them have ended their passes, and then update."""
    last: dict[int, Any] = {}
    for (stage, _), times in zip(one.workers, ends, strict=True):
        last[stage] = later(last.get(stage, 0.0), times[-1])
    pairs = zip(one.workers, updates, strict=True)
    return reduce(later, (last[stage] + one.end_sums.get(stage, 0.0) + update for (stage, _), update in pairs))


def _mean(seconds: float | Array) -> float:
    return float(seconds.mean()) if isinstance(seconds, np.ndarray) else float(seconds)
