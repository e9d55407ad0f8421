"""The best plans of consecutive stages: in the given replicas, or in those that are best, too.

For each number of micro-batches the best chain of every replica (`chains.py`), with GPipe's memory and with 1F1B's; and
where replicas are not given, the best partitions of the ranks (`partitions.py`). Small graphs that are no chains are
placed by constraint programming besides, where its solver is installed (`cp_sat.py`). The evaluator then says which is
best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hetsync.errors import UserError
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.chains import Machines, best_chain, classes_of, machines_of
from hetsync.plan.search.contiguous import contiguous_placement, first_shares
from hetsync.plan.search.cp_sat import Pipeline, best_ranks, can_search
from hetsync.plan.search.partitions import best_partitions
from hetsync.plan.search.search import Problem, Scored, Search

MOST_CLASSES = 10


class Exact(Search):
    """Each chain is proposed with all micro-batches in flight, and with those of 1F1B."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        for ranks in problem.given_replicas:
            if (found := len(classes_of(problem.evaluator, ranks))) > MOST_CLASSES:
                raise UserError(
                    f"exact is for at most {MOST_CLASSES} classes of equal devices, and a replica has {found}: use "
                    "--search local, or smaller --replicas"
                )
        self._least_seconds = math.inf  # of a chain that is proposed, with all of its micro-batches in flight
        self._proposals = self._all()

    def propose(self) -> Sequence[Placement]:
        return next(self._proposals, [])

    def _all(self) -> Iterator[Sequence[Placement]]:
        nothing = True
        for proposed in self._lots():
            nothing = False
            yield proposed
        problem, replicas = self.problem, self.problem.given_replicas
        if nothing and max(map(len, replicas)) <= len(problem.groups):  # so that the user hears how much is missing
            yield [contiguous_placement(problem, replicas, problem.numbers_for(len(replicas))[-1])]

    def _lots(self) -> Iterator[Sequence[Placement]]:
        problem, replicas = self.problem, self.problem.given_replicas
        shares = first_shares(problem.evaluator, replicas)
        # A pipeline is mostly fastest with many micro-batches: chains with fewer must then be faster still.
        for number in reversed(problem.numbers_for(len(replicas))):
            found: list[Placement] = []
            for chains in self._best_chains(number, shares):
                found += both_in_flight(Placement(tuple(Replica(stages, None, number) for stages in chains)))
            if found:
                yield list(dict.fromkeys(found))
        if len(replicas) == 1 and can_search(problem):
            yield from self._off_the_chain()
        if problem.replicas is None:
            for partition in best_partitions(problem):
                yield both_in_flight(partition)

    def _off_the_chain(self) -> Iterator[Sequence[Placement]]:
        """From the best chain over numbers of micro-batches, in as many."""
        problem, (ranks,) = self.problem, self.problem.given_replicas
        best: tuple[float, int, tuple[Stage, ...]] | None = None
        for number in problem.numbers_for(1):
            samples = -(-problem.evaluator.training.batch_size // number)
            machines = machines_of(problem, ranks, number, samples, 1, gpipe=False)
            chain = best_chain(problem, machines, number, samples, 1, best[0] if best else math.inf)
            if chain is not None:
                best = chain.seconds, number, chain.stages
        if best is not None:
            _, number, stages = best
            of = Replica(stages, None, number).stage_of
            hint = [stages[of[bound]].ranks[0] for bound in problem.groups.bounds[:-1]]
            samples = -(-problem.evaluator.training.batch_size // number)
            placed = best_ranks(Pipeline(problem, ranks, number, samples), hint)
            if placed is not None:
                yield both_in_flight(Placement((problem.replica(placed, number),)))

    def _best_chains(self, number: int, shares: Sequence[int]) -> Iterator[list[tuple[Stage, ...]]]:
        """One for each replica: with GPipe's memory, and with 1F1B's where that allows other chains."""
        problem, replicas = self.problem, self.problem.given_replicas
        pairs = [(ranks, -(-share // number)) for ranks, share in zip(replicas, shares, strict=True)]
        before: list[Machines] = []
        for gpipe in (True, False):
            machines = [machines_of(problem, ranks, number, samples, len(replicas), gpipe) for ranks, samples in pairs]
            if machines == before:
                return
            before = machines
            less_than = self._least_seconds if len(replicas) == 1 else math.inf
            chains = [
                best_chain(problem, one, number, samples, len(replicas), less_than)
                for one, (_, samples) in zip(machines, pairs, strict=True)
            ]
            found = [chain for chain in chains if chain is not None]
            if len(found) == len(chains):
                if gpipe:
                    self._least_seconds = min(self._least_seconds, max(chain.seconds for chain in found))
                yield [chain.stages for chain in found]


def both_in_flight(placement: Placement) -> list[Placement]:
    """With all micro-batches in flight, and with those of 1F1B."""
    with_all = Placement(
        tuple(
            Replica(tuple(Stage(one.ranks, one.blocks, micro_batches) for one in stages), share, micro_batches)
            for stages, share, micro_batches in (
                (replica.stages, replica.share, replica.micro_batches) for replica in placement.replicas
            )
        )
    )
    return [with_all, placement]
