"""A slice of a replica: what each of its ranks computes and sends when, at some share. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.jitter import likely_factors
from hetsync.plan.division import parts_by_speed, pieces_by_rank
from hetsync.plan.graph import BATCH, BlockCost, BlockGraph
from hetsync.plan.pipeline import Send, Worker, end_times
from hetsync.plan.placement import Replica
from hetsync.plan.schedule import bounded_in_flight, micro_batch_sizes, schedule, stage_order

Array = npt.NDArray[np.float64]
SLICES = 256  # of which the mean is taken where devices have jitter
FORWARD, BACKWARD, SAVED, WEIGHTS = range(4)  # columns of figures: parts of a step, a sample's bytes, bytes


@dataclass(frozen=True)
class Staged:
    """A replica as far as its share does not matter. Rows are stages."""

    replica: Replica
    figures: Array  # summed over its blocks: the columns of Slices.figures
    sample_bytes: Mapping[tuple[int, int], float]  # between two stages, a sample's
    received_bytes: Array  # by stage: a sample's of these, which backward needs
    loss_bytes: Array  # by stage: a sample's of what is saved for backward, of one micro-batch at a time
    update_parts: Array  # by stage, of the whole model's update
    in_flight: tuple[int, ...]
    late: frozenset[tuple[int, int]]  # pairs of stages between which goes only what the loss needs


@dataclass(frozen=True)
class Slice:
    """A replica's slice at some share."""

    workers: tuple[tuple[int, int], ...]  # (stage, rank)
    work: tuple[Worker, ...]
    end_sums: Mapping[int, float]  # by stage of several ranks: seconds of its gradients' sum
    updates: tuple[float, ...]  # by worker, seconds of the optimizer's update
    bytes: float


class Slices:
    """Of one model on one cluster, whose ranks take `step_times` for a step of the whole model.

    The optimizer's update and each block's passes have the parts of a step that they have on the profiled device, for
    so many `samples`.

    Attributes:
        figures: A row a block: the parts that its forward and backward passes have of all passes, a sample's saved
            bytes, and bytes of weights.
        output_bytes: By block, a sample's of what others need.
        needed_bytes: By block, a sample's of what others have made, and it saves.
        loss_bytes: By block, a sample's of what the loss saves.
        times: Of the passes of the whole model, forward and backward, by rank.
        update_seconds: Of the update of the whole model, by rank.
    """

    def __init__(
        self,
        graph: BlockGraph,
        costs: Sequence[BlockCost],
        cluster: Cluster,
        step_times: Sequence[StepTime],
        samples: float,
    ) -> None:
        self.cluster = cluster
        self.figures = _figures(costs, samples)
        self._update_parts = _update_parts(costs)
        divided = [_divided(time, costs, samples) for time in step_times]
        self.times = tuple(passes for passes, _ in divided)
        self.update_seconds = tuple(update for _, update in divided)
        self.output_bytes = np.array([cost.output_bytes for cost in costs], dtype=float)
        self.needed_bytes = np.array([cost.received_bytes for cost in costs], dtype=float)
        self.loss_bytes = np.array([cost.loss_bytes for cost in costs], dtype=float)
        inner = [(edge.source, edge.target) for edge in graph.edges if edge.source != BATCH]
        self._sources, self._targets = np.array(inner, dtype=int).reshape(-1, 2).T
        self._sinks = sorted(set(range(len(costs))) - {source for source, _ in inner})
        self._links: dict[tuple[int, int], tuple[float, float]] = {}  # latency, seconds a byte
        self._parts: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        self._drawn: dict[int, Array] = {}  # by rank, factors of `SLICES` slices

    def staged(self, replica: Replica) -> Staged:
        stage_of = np.empty(len(self.figures), dtype=int)
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
        return Staged(replica, member @ self.figures, sample_bytes, received, loss, updates, in_flight, late)

    def _received_bytes(
        self, stage_of: npt.NDArray[Any], sample_bytes: Mapping[tuple[int, int], float], stages: int
    ) -> Array:
        """By stage, what its blocks save that others have made; what several of them need comes once."""
        entered = np.unique(self._targets[stage_of[self._sources] != stage_of[self._targets]])
        needed: Array = np.bincount(stage_of[entered], self.needed_bytes[entered], stages).astype(float)
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

    def at(self, staged: Staged, share: int) -> Slice:
        replica, stages = staged.replica, staged.replica.stages
        sizes = micro_batch_sizes(share, replica.micro_batches)
        parts = {size: [self.split(stage.ranks, size) for stage in stages] for size in set(sizes)}
        workers = tuple((index, rank) for index, stage in enumerate(stages) for rank in stage.ranks)
        pieces = {size: pieces_by_rank(parts[size]) for size in parts}
        sends = {size: self._sends(staged, workers, parts[size]) for size in parts}
        work = []
        for place, (index, rank) in enumerate(workers):
            own = {size: pieces[size][index][stages[index].ranks.index(rank)] for size in parts}
            forward = {
                size: self._pass_seconds(staged, index, rank, each, backward=False) for size, each in own.items()
            }
            backward = {
                size: self._pass_seconds(staged, index, rank, each, backward=True) for size, each in own.items()
            }
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
        return Slice(workers, tuple(work), end_sums, updates, carried)

    def split(self, ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
        """The samples of a micro-batch that each rank of a stage computes: by speed."""
        if len(ranks) == 1:
            return (size,)
        key = (ranks, size)
        if key not in self._parts:
            self._parts[key] = parts_by_speed([self.times[rank] for rank in ranks], size)
        return self._parts[key]

    def _pass_seconds(self, staged: Staged, stage: int, rank: int, pieces: Sequence[int], backward: bool) -> float:
        """Of a micro-batch, whose pieces go through the stage one after another."""
        part = float(staged.figures[stage, BACKWARD if backward else FORWARD])
        return part * sum(self.times[rank].seconds(samples) for samples in pieces)

    def _sends(
        self, staged: Staged, workers: Sequence[tuple[int, int]], parts: Sequence[tuple[int, ...]]
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

    def _lockstep_sums(self, staged: Staged) -> tuple[dict[int, float], float]:
        """Of the gradients of stages on several ranks: seconds by stage, bytes of all."""
        seconds, carried = {}, 0.0
        for index, stage in enumerate(staged.replica.stages):
            if (ranks := len(stage.ranks)) > 1:
                size = int(staged.figures[index, WEIGHTS])
                seconds[index] = self.cluster.ring_link(stage.ranks).seconds(size, ranks, 0.0)
                carried += 2 * (ranks - 1) * size
        return seconds, carried

    def seconds(self, one: Slice, updating: bool = True) -> float | Array:
        """With jitter those of `SLICES` slices, in which each rank draws a factor for all that it computes. The
        update is in it if `updating`."""
        updates = self.updates(one) if updating else [0.0] * len(one.updates)
        if self.cluster.jitter is None:
            return _last_end(one, end_times(one.work), updates, max)
        work = []
        for (_, rank), worker in zip(one.workers, one.work, strict=True):
            scattered = {seconds: seconds * self._factors(rank) for seconds in set(worker.seconds)}
            work.append(dataclasses.replace(worker, seconds=[scattered[seconds] for seconds in worker.seconds]))
        return _last_end(one, end_times(work, np.maximum), updates, np.maximum)

    def updates(self, one: Slice) -> Sequence[float | Array]:
        """By worker, scattered as its slices are."""
        if self.cluster.jitter is None:
            return one.updates
        return [seconds * self._factors(rank) for (_, rank), seconds in zip(one.workers, one.updates, strict=True)]

    def _factors(self, rank: int) -> Array:
        """By which its slices scatter, in an order of the rank's own, so that ranks are independent."""
        if rank not in self._drawn:
            assert self.cluster.jitter is not None
            factors = likely_factors(self.cluster.jitter, rank, SLICES)
            random.Random(str(rank)).shuffle(factors)
            self._drawn[rank] = np.array(factors)
        return self._drawn[rank]


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


def _last_end(
    one: Slice, ends: Sequence[Sequence[Any]], updates: Sequence[Any], later: Callable[[Any, Any], Any]
) -> Any:
    """Ranks of a stage add up its gradients once all of them have ended their passes, and then update."""
    last: dict[int, Any] = {}
    for (stage, _), times in zip(one.workers, ends, strict=True):
        last[stage] = later(last.get(stage, 0.0), times[-1])
    pairs = zip(one.workers, updates, strict=True)
    return reduce(later, (last[stage] + one.end_sums.get(stage, 0.0) + update for (stage, _), update in pairs))
