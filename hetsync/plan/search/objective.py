"""The three costs of a plan as one figure to search by: w_t·T/T0 + w_c·C/C0 + w_m·M/M0. Pure.

T is seconds a sample, C bytes a sample over all links, M the greatest fraction of a device's memory that may be used;
those with 0 are a reference's: of data parallelism by speed, or of `list` where that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetsync.errors import UserError
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.graph import BATCH
from hetsync.plan.slices import BACKWARD, FORWARD, WEIGHTS


class Weights(NamedTuple):
    """Of the three costs in the objective."""

    time: float = 1.0
    bytes: float = 0.0
    memory: float = 0.0


class Figures(NamedTuple):
    """T, C and M of a plan."""

    seconds_per_sample: float
    bytes_per_sample: float
    memory_fraction: float


def check_weights(weights: Sequence[float]) -> Weights:
    """UserError unless there are three, none negative and one above 0."""
    told = ",".join(f"{weight:g}" for weight in weights)
    if len(weights) != 3:
        raise UserError(f"--weights is {told}: give three, of time, bytes and memory, such as 1,0,0")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise UserError(f"--weights is {told}: give finite numbers that are not negative")
    if not any(weights):
        raise UserError(f"--weights is {told}, by which all plans are alike: make one of them more than 0")
    return Weights(*weights)


def figures_of(costs: Costs, evaluator: Evaluator) -> Figures:
    fractions = [size / evaluator.limit_bytes[rank] for rank, size in costs.memory_bytes.items()]
    return Figures(1 / costs.samples_per_second, costs.bytes_per_sample, max(fractions))


@dataclass(frozen=True)
class Objective:
    """`reference`: T0, C0 and M0, all above 0."""

    weights: Weights
    reference: Figures
    evaluator: Evaluator

    def of(self, costs: Costs) -> float:
        return self.weighted(figures_of(costs, self.evaluator))

    def weighted(self, figures: Figures) -> float:
        return sum(
            weight * value / scale
            for weight, value, scale in zip(self.weights, figures, self.reference, strict=True)
            if weight
        )

    def bound(self, most_micro_batches: int, most_replicas: int) -> float:
        """No plan whose stages are of one rank each has an objective below it."""
        seconds = least_seconds_per_sample(self.evaluator, most_micro_batches, most_replicas)
        return self.weighted(Figures(seconds, 0.0, 0.0))


def objective(weights: Weights, costs: Costs, evaluator: Evaluator) -> Objective:
    """By the costs of the reference. A reference that carries nothing counts as the weights, carried once a step.

    UserError where memory has a weight, and no device has a limit.
    """
    seconds, carried, memory = figures_of(costs, evaluator)
    limited = any(evaluator.cluster.device_of(rank).memory_bytes for rank in range(len(evaluator.times)))
    if weights.memory and not limited:
        raise UserError(
            f"--weights gives memory {weights.memory:g}, but no device of cluster profile {evaluator.cluster.name} has "
            "memory_gib: give it, or weight 0"
        )
    weight_bytes = float(evaluator.figures[:, WEIGHTS].sum()) / evaluator.training.batch_size
    return Objective(weights, Figures(seconds, carried or weight_bytes or 1.0, memory or 1.0), evaluator)


def least_seconds_per_sample(evaluator: Evaluator, most_micro_batches: int, most_replicas: int) -> float:
    """Of any plan whose stages are of one rank each: all work at the summed speeds, with an update where it costs the
    fewest samples; or one micro-batch on the longest way through the model, all of it on the fastest device."""
    each = [time.seconds_per_sample for time in evaluator.times]
    work = 0.0
    if min(each) > 0:
        update = min(seconds / one for seconds, one in zip(evaluator.update_seconds, each, strict=True))
        work = (1 + update / evaluator.training.batch_size) / sum(1 / seconds for seconds in each)
    return max(work, _longest_way(evaluator) * min(each) / (most_micro_batches * most_replicas))


def _longest_way(evaluator: Evaluator) -> float:
    """Its part of a step."""
    own = (evaluator.figures[:, FORWARD] + evaluator.figures[:, BACKWARD]).tolist()
    ends = list(own)
    for edge in sorted(evaluator.graph.edges, key=lambda edge: edge.target):
        if edge.source != BATCH:
            ends[edge.target] = max(ends[edge.target], ends[edge.source] + own[edge.target])
    return max(ends)
