"""What is searched for, and what a search is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError

import numpy as np

from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.schedule import stage_order
from hetsync.plan.search.group_figures import Array, run_received_bytes, run_saved_bytes
from hetsync.plan.search.groups import Groups, contract

MOST_MICRO_BATCHES = 64  # that are tried where the user names no number
LEAST_SAMPLES = 2  # of one of several micro-batches, where the user names no number: batch norm cannot train on one
MOST_GROUPS = 64
PENALTY = 10.0  # objective that searches hear of what does not fit, and the worst that they hear of anything


@dataclass(frozen=True)
class Problem:
    """What to place, and where.

    Attributes:
        evaluator: Of the model on the cluster. Searches leave scoring to the driver, which counts it.
        micro_batches: Numbers of micro-batches to choose from, ascending.
        replicas: Ranks of each replica, in the order of its stages; None leaves them to the search.
        most_groups: Into which blocks are contracted. At least the ranks of a replica.
        every_rank: Whether every rank must have blocks, as a job's must.
        least_samples: Of a micro-batch, where a replica has several: what has fewer counts only where nothing else
            does. Those that learn by costs are not told.
    """

    evaluator: Evaluator
    micro_batches: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...] | None = None
    most_groups: int = MOST_GROUPS
    every_rank: bool = False
    least_samples: int = 1

    @property
    def ranks(self) -> range:
        return range(len(self.evaluator.times))

    @property
    def given_replicas(self) -> tuple[tuple[int, ...], ...]:
        """One of all ranks where none are given."""
        return self.replicas or (tuple(self.ranks),)

    def order(self, scored: Scored) -> tuple[int, int, int, float]:
        """The least is the best: what fits before what does not, by the bytes it lacks; then, where every rank must
        have blocks, by those without; then by replicas whose micro-batches are too small; then by the objective.
        Differences by rounding are none."""
        lacking, unused = sum(scored.costs.lacking_bytes.values()), self.unused_ranks(scored.placement)
        return lacking, unused, self.small_replicas(scored), float(f"{scored.objective:.9g}")

    def small_replicas(self, scored: Scored) -> int:
        """Replicas whose micro-batches have too few samples."""
        pairs = zip(scored.placement.replicas, scored.costs.shares, strict=True)
        return sum(share < self.wanted_share(replica.micro_batches) for replica, share in pairs)

    def wanted_share(self, micro_batches: int) -> int:
        """Samples of a replica that has so many: one micro-batch may be of one sample, as a share may be."""
        return micro_batches * self.least_samples if micro_batches > 1 else 1

    def divides(self, numbers: Iterable[int]) -> bool:
        """Has a batch samples for so many micro-batches, by replica?"""
        return sum(map(self.wanted_share, numbers)) <= self.evaluator.training.batch_size

    def unused_ranks(self, placement: Placement) -> int:
        """Ranks without blocks, where every rank must have some: such a plan does not count."""
        return len(self.ranks) - len(placement.ranks) if self.every_rank else 0

    @cached_property
    def groups(self) -> Groups:
        return contract(self.evaluator, self.most_groups)

    @cached_property
    def _run_received_bytes(self) -> Array:
        return run_received_bytes(self.evaluator, self.groups)

    @cached_property
    def _run_saved_bytes(self) -> dict[tuple[int, int], Array]:
        return {}

    def run_saved_bytes(self, in_flight: int, samples: int) -> Array:
        """[i, j]: of the groups from i to before j on a stage, as in `group_figures.run_saved_bytes`. To be read only:
        the same searches ask for the same again and again."""
        found, key = self._run_saved_bytes, (in_flight, samples)
        if key not in found:
            found[key] = run_saved_bytes(self.evaluator, self.groups, self._run_received_bytes, *key)
        return found[key]

    def numbers_for(self, replicas: int) -> tuple[int, ...]:
        """Of micro-batches: those by which each of so many replicas can have samples for every micro-batch; where there
        are none, the smallest number."""
        fitting = tuple(number for number in self.micro_batches if self.divides([number] * replicas))
        return fitting or self.micro_batches[:1]

    def replica(self, ranks: Sequence[int], micro_batches: int, in_flight: int | None = None) -> Replica:
        """A replica with each group on the rank that is given for it, or, where stages would wait for each other, on
        that of a group that it needs (`acyclic`)."""
        of = acyclic(self.groups, ranks)
        stages = tuple(
            Stage((rank,), self.groups.blocks_of(group for group, own in enumerate(of) if own == rank), in_flight)
            for rank in dict.fromkeys(of)
        )
        return Replica(stages, None, micro_batches)


def acyclic(groups: Groups, ranks: Sequence[int]) -> list[int]:
    """Ranks by group, such that no stages wait for each other: as given, if they do not.

    Else ranks get an order, by the mean place of their groups, and a group moves onwards to the last rank of those that
    it needs.
    """
    edges = {(ranks[source], ranks[target]) for source, target in groups.edges if ranks[source] != ranks[target]}
    used = sorted(set(ranks), key=lambda rank: (np.mean([g for g, own in enumerate(ranks) if own == rank]), rank))
    place = {rank: index for index, rank in enumerate(used)}
    try:
        stage_order(len(used), {(place[source], place[target]) for source, target in edges})
    except CycleError:
        places = [place[rank] for rank in ranks]
        for source, target in sorted(groups.edges, key=lambda edge: edge[1]):
            places[target] = max(places[target], places[source])
        return [used[index] for index in places]
    return list(ranks)


@dataclass(frozen=True)
class Scored:
    """A placement, what it costs, and the objective that weighs the costs; the less the better."""

    placement: Placement
    costs: Costs
    objective: float

    @property
    def penalised(self) -> float:
        """The objective, bounded, for those who learn from it: `PENALTY` where the placement does not fit."""
        return min(self.objective, PENALTY) if self.costs.feasible else PENALTY


class Search(ABC):
    """Proposes placements, hears what they cost, and proposes again. One instance searches once.

    The driver calls `propose` and `hear` in turn, until nothing is proposed or the budget is spent; then it hears of no
    more than was scored. Every placement that is proposed must be one that the evaluator can score (`Problem.replica`,
    `Problem.numbers_for`). The same problem, seed and start give the same proposals.
    """

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        """`start`: the best that is known before, of those it `begins_from`, whether it fits or not; None where nothing
        is known.

        UserError where the search cannot search this problem.
        """
        self.problem, self.seed, self.start = problem, seed, start

    @classmethod
    def begins_from(cls, placement: Placement) -> bool:
        """Whether there is anything in it that this search would change."""
        return True

    @abstractmethod
    def propose(self) -> Sequence[Placement]:
        """Placements to be scored next; none once the search has ended."""

    def hear(self, scored: Sequence[Scored]) -> None:  # noqa: B027 (some searches propose once)
        """What the last proposals cost, in their order."""


def micro_batch_numbers(given: int | None, batch_size: int, replicas: int) -> tuple[int, ...]:
    """What to choose from: the given number, or powers of two that leave micro-batches `LEAST_SAMPLES` on average."""
    if given is not None:
        return (given,)
    most = min(MOST_MICRO_BATCHES, batch_size // (LEAST_SAMPLES * replicas))
    return tuple(2**power for power in range(most.bit_length())) or (1,)
