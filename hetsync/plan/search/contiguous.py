"""What an expert does: each replica's blocks are cut into consecutive stages, by speed and memory.

For each number of micro-batches, the cut whose slowest stage or link is fastest, of those that fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetsync.balance.profile import StepTime
from hetsync.balance.shares import speed_shares
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.group_figures import Array, crossing_bytes, figures_before
from hetsync.plan.search.search import Problem, Scored, Search


class Contiguous(Search):
    """Stages in the order in which a replica's ranks are given."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self._left = list(problem.numbers_for(len(problem.given_replicas)))
        blocks = len(problem.evaluator.graph.blocks)
        for ranks in problem.given_replicas:
            if len(ranks) > blocks:
                raise UserError(
                    f"a replica has {len(ranks)} ranks, but the model has {blocks} blocks, and each rank needs one: "
                    "give more replicas, of fewer ranks"
                )

    def propose(self) -> Sequence[Placement]:
        numbers, self._left = self._left, []
        return [self._placement(number) for number in numbers]

    def _placement(self, micro_batches: int) -> Placement:
        return contiguous_placement(self.problem, self.problem.given_replicas, micro_batches)


def contiguous_placement(problem: Problem, replicas: Sequence[Sequence[int]], micro_batches: int) -> Placement:
    """Each replica's best cut over its ranks in the given order."""
    shares = first_shares(problem.evaluator, replicas)
    return Placement(
        tuple(
            contiguous_replica(problem, ranks, micro_batches, -(-share // micro_batches), len(replicas))
            for ranks, share in zip(replicas, shares, strict=True)
        )
    )


def first_shares(evaluator: Evaluator, replicas: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Of each replica, as if no rank of it ever waited."""
    batch = evaluator.training.batch_size  # a measured slice may seem to take no longer for more samples
    rates = [sum(evaluator.times[rank].rate(batch) for rank in ranks) for ranks in replicas]
    return speed_shares([StepTime(0.0, 1 / rate) for rate in rates], batch)


def contiguous_replica(
    problem: Problem, ranks: Sequence[int], micro_batches: int, samples: int, replicas: int
) -> Replica:
    """The best cut for micro-batches of so many samples, or where none fits the one that lacks least memory."""
    seconds, lacking = [], []
    evaluator, bounds = problem.evaluator, problem.groups.bounds
    sums = figures_before(evaluator, problem.groups)
    stages = sums[None, :, :] - sums[:, None, :]  # [i, j]: of the groups from i to before j
    crossing = crossing_bytes(evaluator, problem.groups) * samples
    for place, rank in enumerate(ranks):
        forward, backward, _, weights = np.moveaxis(stages, 2, 0)
        computing = evaluator.times[rank].seconds(samples) * (forward + backward)
        if place + 1 < len(ranks):
            _, byte_seconds = evaluator.link(rank, ranks[place + 1])
            computing = np.maximum(computing, byte_seconds * crossing[None, :])
        in_flight = min(len(ranks) - place, micro_batches)
        held = np.floor(evaluator.held_bytes(weights, replicas) + problem.run_saved_bytes(in_flight, samples))
        seconds.append(computing)
        lacking.append(np.maximum(held - evaluator.limit_bytes[rank], 0.0))
    fitting = [np.where(lack > 0, np.inf, second) for lack, second in zip(lacking, seconds, strict=True)]
    cuts = _least_worst(fitting) or _least_worst(lacking)
    assert cuts is not None  # there are at least as many groups as ranks
    parts = zip(ranks, cuts[:-1], cuts[1:], strict=True)
    stages_of = (Stage((rank,), tuple(range(bounds[i], bounds[j]))) for rank, i, j in parts)
    return Replica(tuple(stages_of), None, micro_batches)


def _least_worst(costs: Sequence[Array]) -> list[int] | None:
    """Where to cut so that the greatest cost of a stage is least; None where each way has an infinite one.

    `costs[s][i, j]`: of stage s with the groups from i to before j. Every stage has at least one group.
    """
    groups = len(costs[0]) - 1
    best = np.full(groups + 1, np.inf)
    best[0] = -np.inf
    choices = []
    allowed = np.triu(np.ones((groups + 1, groups + 1), dtype=bool), 1)
    for cost in costs:
        worst = np.where(allowed, np.maximum(best[:, None], cost), np.inf)
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    cuts = [groups]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return cuts[::-1]
