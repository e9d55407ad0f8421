"""Placements of whole models: on one rank, or one on every rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain

from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.search import Problem, Scored, Search


def whole(evaluator: Evaluator, ranks: Sequence[int], micro_batches: int) -> Placement:
    """The model on each of these."""
    blocks = tuple(range(len(evaluator.graph.blocks)))
    return Placement(tuple(Replica((Stage((rank,), blocks),), None, micro_batches) for rank in ranks))


class Whole(Search):
    """Subclasses say on which ranks."""

    name: str

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        ranks = self._ranks()
        if not self._is_of(problem.replicas):
            told = ";".join(",".join(map(str, replica)) for replica in problem.replicas or ())
            raise UserError(
                f"--replicas is {told}, but the plan of --search {self.name} has replicas of its own: leave --replicas"
                " out, or choose another search"
            )
        self._lots = self._lots_of(problem.numbers_for(len(ranks)))

    def propose(self) -> Sequence[Placement]:
        numbers = self._lots.pop(0) if self._lots else []
        return [whole(self.problem.evaluator, self._ranks(), number) for number in numbers]

    def hear(self, scored: Sequence[Scored]) -> None:
        if any(one.costs.feasible for one in scored):
            self._lots.clear()

    def _lots_of(self, numbers: Sequence[int]) -> list[list[int]]:
        """Numbers of micro-batches; those of a later lot only count where nothing of those before fits into memory."""
        return [list(numbers)]

    @abstractmethod
    def _ranks(self) -> Sequence[int]:
        """Those that hold the model."""

    def _is_of(self, replicas: tuple[tuple[int, ...], ...] | None) -> bool:
        """Whether its plan has these replicas, if any are given."""
        return replicas is None or replicas == tuple((rank,) for rank in self._ranks())


class Data(Whole):
    """Data parallelism: every rank has the whole model, and a share of the batch by its speed."""

    name = "data"

    def _ranks(self) -> Sequence[int]:
        return self.problem.ranks

    def _lots_of(self, numbers: Sequence[int]) -> list[list[int]]:
        """A rank needs samples of every micro-batch: more of these than its share by speed has would make shares
        others."""
        problem, evaluator, ranks = self.problem, self.problem.evaluator, self.problem.ranks
        if len(ranks) > evaluator.training.batch_size:
            return [list(numbers)]
        by_speed = evaluator.with_shares(whole(evaluator, ranks, 1))
        least = min(replica.share or 0 for replica in by_speed.replicas)
        by_least = [problem.wanted_share(number) <= least for number in numbers]
        lots = [[one for one, fits in zip(numbers, by_least, strict=True) if fits is kept] for kept in (True, False)]
        return [lot for lot in lots if lot]


class Single(Whole):
    """The fastest rank alone; the others of a replica that is given stay without blocks."""

    name = "single"

    def _ranks(self) -> Sequence[int]:
        times, batch = self.problem.evaluator.times, self.problem.evaluator.training.batch_size
        replicas = self.problem.given_replicas
        return [min(chain.from_iterable(replicas), key=lambda rank: (times[rank].seconds(batch), rank))]

    def _is_of(self, replicas: tuple[tuple[int, ...], ...] | None) -> bool:
        return replicas is None or len(replicas) == 1
