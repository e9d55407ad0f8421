"""Placements by chance: what any search must beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetsync.plan.placement import Placement, Replica
from hetsync.plan.search.search import Problem, Scored, Search

AT_ONCE = 16


class Random(Search):
    """Each group on any of its replica's ranks, or of some of them."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self._rng = np.random.default_rng(seed)

    def propose(self) -> Sequence[Placement]:
        return [self._draw() for _ in range(AT_ONCE)]

    def _draw(self) -> Placement:
        replicas = self.problem.given_replicas
        number = int(self._rng.choice(self.problem.numbers_for(len(replicas))))
        return Placement(tuple(self._replica(ranks, number) for ranks in replicas))

    def _replica(self, ranks: Sequence[int], micro_batches: int) -> Replica:
        some = self._rng.permutation(ranks)[: self._rng.integers(1, len(ranks) + 1)]
        chosen = self._rng.choice(some, len(self.problem.groups))
        return self.problem.replica(chosen.tolist(), micro_batches)
