"""Placements of whole models: on one rank, or one on every rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.search import Problem, Search


class _Whole(Search):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        batch, ranks = problem.evaluator.training.batch_size, len(self._ranks())
        fitting = [number for number in problem.micro_batches if number * ranks <= batch]
        self._left = fitting or [min(problem.micro_batches)]

    def propose(self) -> Sequence[Placement]:
        blocks = tuple(range(len(self.problem.evaluator.graph.blocks)))
        numbers, self._left = self._left, []
        return [
            Placement(tuple(Replica((Stage((rank,), blocks),), None, number) for rank in self._ranks()))
            for number in numbers
        ]

    @abstractmethod
    def _ranks(self) -> Sequence[int]:
        """Those that hold the model."""


class Data(_Whole):
    """Data parallelism: every rank has the whole model, and a share of the batch by its speed."""

    def _ranks(self) -> Sequence[int]:
        return sorted(rank for ranks in self.problem.replicas for rank in ranks)


class Single(_Whole):
    """The fastest rank alone."""

    def _ranks(self) -> Sequence[int]:
        times, batch = self.problem.evaluator.times, self.problem.evaluator.training.batch_size
        ranks = [rank for ranks in self.problem.replicas for rank in ranks]
        return [min(ranks, key=lambda rank: (times[rank].seconds(batch), rank))]
