"""Local search: from a good plan always to a neighbour that is no worse, until none is better for long.

A neighbour has one group, or a run of groups, on another rank; two groups or two ranks in each other's places; another
number of micro-batches, or of those in flight; or, where replicas are not given, the ranks of one or two replicas in
other replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetsync.plan.placement import Placement, Replica
from hetsync.plan.search.contiguous import contiguous_replica
from hetsync.plan.search.search import Problem, Scored, Search

PATIENCE = 300  # neighbours in a row that are no better, until it ends
LONGEST_RUN = 8


class Local(Search):
    """From `start`, whether it fits or not; without one there is nothing to improve."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self._rng = np.random.default_rng(seed)
        self._at, self._failures = start, 0
        self._seen = set() if start is None else {start.placement}

    def propose(self) -> Sequence[Placement]:
        while self._at is not None and self._failures < PATIENCE:
            neighbour = self._neighbour(self._at.placement)
            if neighbour is not None and neighbour not in self._seen:
                self._seen.add(neighbour)
                return [neighbour]
            self._failures += 1
        return []

    def hear(self, scored: Sequence[Scored]) -> None:
        for one in scored:
            assert self._at is not None  # else nothing was proposed
            before, after = self.problem.order(self._at), self.problem.order(one)
            self._failures = 0 if after < before else self._failures + 1
            if after <= before:
                self._at = one

    def _neighbour(self, placement: Placement) -> Placement | None:
        """None where what was drawn is no neighbour."""
        index = int(self._rng.integers(len(placement.replicas)))
        replica = placement.replicas[index]
        if self.problem.replicas is None and self._rng.random() < 0.1:
            return self._regrouped(placement)
        moves = (self._shifted, self._moved, self._swapped, self._exchanged, self._renumbered, self._in_flight)
        move = moves[int(self._rng.choice(len(moves), p=(0.4, 0.2, 0.1, 0.1, 0.1, 0.1)))]
        changed = move(replica, len(placement.replicas))
        if changed is None:
            return None
        after = Placement((*placement.replicas[:index], changed, *placement.replicas[index + 1 :]))
        numbers = [one.micro_batches for one in after.replicas]
        if changed.micro_batches != replica.micro_batches and not self.problem.divides(numbers):
            return None
        return after

    def _shifted(self, replica: Replica, replicas: int) -> Replica | None:
        """A run of groups beside those of another rank joins them."""
        of = self._ranks_of_groups(replica)
        borders = [group for group in range(1, len(of)) if of[group] != of[group - 1]]
        if not borders:
            return None
        border, length = int(self._rng.choice(borders)), int(self._rng.integers(1, LONGEST_RUN + 1))
        if self._rng.random() < 0.5:
            run, rank = range(border, min(border + length, len(of))), of[border - 1]
        else:
            run, rank = range(max(border - length, 0), border), of[border]
        return self._with(replica, [rank if group in run else own for group, own in enumerate(of)])

    def _moved(self, replica: Replica, replicas: int) -> Replica | None:
        """A run of groups on any of the ranks that the replica may have."""
        of, begin = self._ranks_of_groups(replica), int(self._rng.integers(len(self.problem.groups)))
        run = range(begin, begin + int(self._rng.choice([1, 1, 2, 4, LONGEST_RUN])))
        rank = int(self._rng.choice(self._ranks_for(replica, replicas)))
        return self._with(replica, [rank if group in run else own for group, own in enumerate(of)])

    def _swapped(self, replica: Replica, replicas: int) -> Replica | None:
        of = self._ranks_of_groups(replica)
        one, other = (int(group) for group in self._rng.integers(len(of), size=2))
        of[one], of[other] = of[other], of[one]
        return self._with(replica, of)

    def _exchanged(self, replica: Replica, replicas: int) -> Replica | None:
        """Two ranks, of which one may have been unused, in each other's places."""
        ranks = self._ranks_for(replica, replicas)
        one, other = (int(rank) for rank in self._rng.choice(ranks, 2))
        turned = {one: other, other: one}
        return self._with(replica, [turned.get(rank, rank) for rank in self._ranks_of_groups(replica)])

    def _renumbered(self, replica: Replica, replicas: int) -> Replica | None:
        number = int(self._rng.choice(self.problem.numbers_for(replicas)))
        stages = tuple(replace(stage, in_flight=None) for stage in replica.stages)
        return replace(replica, micro_batches=number, stages=stages)

    def _in_flight(self, replica: Replica, replicas: int) -> Replica | None:
        """All micro-batches, or as many as 1F1B has."""
        number = None if replica.stages[0].in_flight else replica.micro_batches
        return replace(replica, stages=tuple(replace(stage, in_flight=number) for stage in replica.stages))

    def _regrouped(self, placement: Placement) -> Placement | None:
        """The ranks of one or two replicas in one or two others, each cut into consecutive stages."""
        count = min(int(self._rng.integers(1, 3)), len(placement.replicas))
        chosen = {int(index) for index in self._rng.permutation(len(placement.replicas))[:count]}
        kept = [replica for index, replica in enumerate(placement.replicas) if index not in chosen]
        ranks = [rank for index in chosen for stage in placement.replicas[index].stages for rank in stage.ranks]
        unused = sorted(set(self.problem.ranks) - set(placement.ranks))
        ranks = [int(rank) for rank in self._rng.permutation(ranks + unused)]
        parts = [ranks]
        if len(ranks) > 1 and self._rng.random() < 0.5:
            middle = int(self._rng.integers(1, len(ranks)))
            parts = [ranks[:middle], ranks[middle:]]
        replicas, batch = len(kept) + len(parts), self.problem.evaluator.training.batch_size
        number = int(self._rng.choice(self.problem.numbers_for(replicas)))
        numbers = [*(replica.micro_batches for replica in kept), *[number] * len(parts)]
        if max(map(len, parts)) > len(self.problem.groups) or not self.problem.divides(numbers):
            return None
        samples = [-(-batch * len(part) // (number * len(self.problem.ranks))) for part in parts]
        new = [
            contiguous_replica(self.problem, part, number, size, replicas)
            for part, size in zip(parts, samples, strict=True)
        ]
        return Placement((*kept, *new))

    def _ranks_for(self, replica: Replica, replicas: int) -> list[int]:
        """Those that a replica may use: of the given ones its own, of a lone one all."""
        own = [rank for stage in replica.stages for rank in stage.ranks]
        if self.problem.replicas is None:
            return list(self.problem.ranks) if replicas == 1 else own
        return next(list(ranks) for ranks in self.problem.replicas if own[0] in ranks)

    def _ranks_of_groups(self, replica: Replica) -> list[int]:
        of = replica.stage_of
        return [replica.stages[of[bound]].ranks[0] for bound in self.problem.groups.bounds[:-1]]

    def _with(self, replica: Replica, ranks: Sequence[int]) -> Replica:
        in_flight = replica.stages[0].in_flight
        return self.problem.replica(ranks, replica.micro_batches, in_flight)
