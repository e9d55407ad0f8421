"""What a search is, and how one is run to its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hetsync.errors import UserError
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement

MOST_MICRO_BATCHES = 64  # that are tried where the user names no number


@dataclass(frozen=True)
class Problem:
    """What to place, and where.

    Attributes:
        evaluator: Of the model on the cluster.
        replicas: Ranks of each replica, in the order of its stages.
        micro_batches: Numbers of micro-batches to choose from.
    """

    evaluator: Evaluator
    replicas: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]


class Search(ABC):
    """Proposes placements. One instance searches once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def propose(self) -> Sequence[Placement]:
        """Placements to be scored next; none once the search has ended."""

    def hear(self, costs: Sequence[Costs]) -> None:  # noqa: B027 (most searches propose once)
        """What the last proposals cost, in their order."""


@dataclass(frozen=True)
class Found:
    """The best of a search, with its shares; `evaluations` as many as it took."""

    placement: Placement
    costs: Costs
    evaluations: int


def run(search: Search, most_evaluations: int = 1000) -> Found:
    """The proposal with the shortest step of those that fit into memory. UserError where none fits."""
    evaluator, count = search.problem.evaluator, 0
    best: tuple[Placement, Costs] | None = None
    while count < most_evaluations and (proposed := search.propose()):
        proposed = proposed[: most_evaluations - count]
        costs = [evaluator.evaluate(placement) for placement in proposed]
        count += len(costs)
        for pair in zip(proposed, costs, strict=True):
            if best is None or _rank(pair[1]) < _rank(best[1]):
                best = pair
        search.hear(costs)
    if best is None:
        raise UserError("the search found nothing to try: raise the number of evaluations")
    _check_fits(best[1], evaluator, count)
    return Found(evaluator.with_shares(best[0]), best[1], count)


def micro_batch_numbers(given: int | None, batch_size: int, replicas: int) -> tuple[int, ...]:
    """What to choose from: the given number, or powers of two that leave micro-batches two samples on average, as batch
    norm does not train on one."""
    if given is not None:
        return (given,)
    most = min(MOST_MICRO_BATCHES, batch_size // (2 * replicas))
    return tuple(2**power for power in range(most.bit_length())) or (1,)


def _rank(costs: Costs) -> tuple[int, float]:
    """What fits before what does not, and that by the bytes it lacks. Differences by rounding are none."""
    return sum(costs.lacking_bytes.values()), float(f"{costs.step_seconds:.9g}")


def _check_fits(costs: Costs, evaluator: Evaluator, tried: int) -> None:
    for rank in costs.lacking_bytes:
        raise UserError(
            f"the model fits nowhere: of {tried} plans the nearest is {sum(costs.lacking_bytes.values()):,} bytes"
            f" short: rank {rank} needs {costs.memory_bytes[rank]:,} and may use {evaluator.limit_bytes[rank]:,}; give"
            " replicas more ranks, a smaller data.batch_size, more micro-batches, or sync.delay_bound 0"
        )
