"""Balanced cuts of least bytes: the ranks are halved again and again, and the groups with them, by speed.

A cut is found by flows (Yang and Wong 1994): the least cut between both ends of the model; while it leaves too little
work on one side, that side takes one group more, and the next least cut is found. Edges cannot be cut against their
direction, so that no stages wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from hetsync.plan.placement import Placement
from hetsync.plan.search.group_figures import group_figures
from hetsync.plan.search.groups import Groups
from hetsync.plan.search.search import Problem, Scored, Search
from hetsync.plan.slices import BACKWARD, FORWARD

TOLERANCE = 0.05  # of the work, by which a side may miss what its ranks' speeds ask for


class MinCut(Search):
    """One placement of the groups, for each number of micro-batches."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self._left = list(problem.numbers_for(len(problem.given_replicas)))

    def propose(self) -> Sequence[Placement]:
        numbers, self._left = self._left, []
        if not numbers:
            return []
        parts = [_ranks_of_groups(self.problem, ranks) for ranks in self.problem.given_replicas]
        return [Placement(tuple(self.problem.replica(ranks, number) for ranks in parts)) for number in numbers]


def _ranks_of_groups(problem: Problem, ranks: Sequence[int]) -> list[int]:
    figures = group_figures(problem.evaluator, problem.groups)
    work = (figures[:, FORWARD] + figures[:, BACKWARD]).tolist()
    speeds = {rank: 1 / problem.evaluator.times[rank].seconds(1) for rank in ranks}
    found = [ranks[0]] * len(problem.groups)
    halves = [(list(range(len(problem.groups))), list(ranks))]
    while halves:
        groups, own = halves.pop()
        if len(own) == 1 or not groups:
            for group in groups:
                found[group] = own[0]
            continue
        first, second = own[: len(own) // 2], own[len(own) // 2 :]
        part = sum(speeds[rank] for rank in first) / sum(speeds[rank] for rank in own)
        before = balanced_cut(problem.groups, groups, work, part)
        halves += [
            ([group for group in groups if group in before], first),
            ([group for group in groups if group not in before], second),
        ]
    return found


def balanced_cut(groups: Groups, chosen: Sequence[int], work: Sequence[float], part: float) -> set[int]:
    """Those of the chosen groups, ascending, that come before a cut: about this part of their work."""
    whole = sum(work[group] for group in chosen) or 1.0

    def missing(before: Iterable[int]) -> float:
        return part - sum(work[group] for group in before) / whole

    if len(chosen) == 1:
        return set(chosen) if part >= 0.5 else set()
    first, last = {chosen[0]}, {chosen[-1]}  # the former have all that they need, the latter all that needs them
    best: set[int] | None = None
    while True:
        before = _least_cut(groups, chosen, first, last)
        if best is None or abs(missing(before)) < abs(missing(best)):
            best = before
        few = missing(before) > 0
        free = set(chosen) - before - last if few else before - first
        if abs(missing(before)) <= TOLERANCE or not free:
            return best
        if few:
            first = before | {min(free)}
        else:
            last = set(chosen) - before | {max(free)}


def _least_cut(groups: Groups, chosen: Sequence[int], first: set[int], last: set[int]) -> set[int]:
    inside = set(chosen)
    network = nx.DiGraph()
    network.add_nodes_from(chosen)
    for (source, target), size in groups.edges.items():
        if source in inside and target in inside:
            network.add_edge(source, target, capacity=size)
            network.add_edge(target, source)  # no capacity is an infinite one
    network.add_edges_from([("begin", group) for group in first] + [(group, "end") for group in last])
    _, (before, _) = nx.minimum_cut(network, "begin", "end")
    return set(before) - {"begin"}
