"""List scheduling: groups in order of their upward rank, each to the device that would be done with it earliest.

As HEFT (Topcuoglu et al. 2002), but for a pipeline: a device works off all micro-batches of what it has, from when the
first one comes, and a link carries all of them. And what is left must fit the devices that others do not need yet: work
seldom comes back to one that does, since stages must not wait for each other. Devices that are full are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from hetsync.plan.placement import Placement
from hetsync.plan.search.contiguous import first_shares
from hetsync.plan.search.group_figures import group_figures, group_saved_bytes
from hetsync.plan.search.search import Problem, Scored, Search
from hetsync.plan.slices import BACKWARD, FORWARD, WEIGHTS

SHORTEST_SECONDS = 1e-12  # of the model on a device without a time


class ListSchedule(Search):
    """One placement for each number of micro-batches."""

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self._left = list(problem.numbers_for(len(problem.given_replicas)))

    def propose(self) -> Sequence[Placement]:
        numbers, self._left = self._left, []
        return [list_placement(self.problem, self.problem.given_replicas, number) for number in numbers]


def list_placement(problem: Problem, replicas: Sequence[Sequence[int]], micro_batches: int) -> Placement:
    """A list schedule in each replica."""
    found = []
    for ranks, share in zip(replicas, first_shares(problem.evaluator, replicas), strict=True):
        schedule = _Schedule(problem, ranks, micro_batches, -(-share // micro_batches), len(replicas))
        found.append(problem.replica(schedule.ranks_of_groups(), micro_batches))
    return Placement(tuple(found))


class _Schedule:
    """Seconds are of one micro-batch, forward and backward."""

    def __init__(self, problem: Problem, ranks: Sequence[int], micro_batches: int, samples: int, replicas: int) -> None:
        self._evaluator, self._groups, self._ranks = problem.evaluator, problem.groups, ranks
        self._micro_batches, self._samples = micro_batches, samples
        figures = group_figures(problem.evaluator, problem.groups)
        work = figures[:, FORWARD] + figures[:, BACKWARD]
        whole = {rank: problem.evaluator.times[rank].seconds(samples) for rank in ranks}
        self._seconds = {rank: (work * whole[rank]).tolist() for rank in ranks}
        self._speeds = {rank: 1 / max(seconds, SHORTEST_SECONDS) for rank, seconds in whole.items()}
        self._work: list[float] = work.tolist()  # parts of the model
        in_flight = min(micro_batches, len(ranks))
        saved = group_saved_bytes(problem.evaluator, problem.groups, in_flight) * samples
        held = problem.evaluator.held_bytes(figures[:, WEIGHTS], replicas) + saved
        self._held: list[float] = held.tolist()
        self._before: dict[int, list[tuple[int, float]]] = defaultdict(list)  # by group: needed ones, bytes
        for (source, target), size in problem.groups.edges.items():
            self._before[target].append((source, size * samples))
        # What has been decided.
        self._of: dict[int, int] = {}
        self._ready: dict[int, float] = {}  # by group: when its first micro-batch is done
        self._left = float(work.sum())
        self._begin = dict.fromkeys(ranks, 0.0)  # by rank
        self._load = dict.fromkeys(ranks, 0.0)
        self._room = {rank: problem.evaluator.limit_bytes[rank] + 1.0 for rank in ranks}  # evaluators count whole bytes
        self._carried: dict[tuple[int, int], float] = defaultdict(float)  # by pair of ranks
        self._behind: dict[int, set[int]] = defaultdict(set)  # ranks that need something of a rank

    def ranks_of_groups(self) -> list[int]:
        for group in self._order():
            self._put(group)
        return [self._of[group] for group in range(len(self._groups))]

    def _order(self) -> list[int]:
        """By the seconds, on average over devices and links, to the end of the model: groups after those they need."""
        pairs = [(a, b) for a in self._ranks for b in self._ranks if a != b]
        byte_seconds = float(np.mean([self._evaluator.link(*pair)[1] for pair in pairs])) if pairs else 0.0
        left = np.mean([self._seconds[rank] for rank in self._ranks], axis=0).tolist()
        own = list(left)
        for target in reversed(range(len(self._groups))):
            for source, size in self._before[target]:
                left[source] = max(left[source], own[source] + 2 * size * byte_seconds + left[target])
        return sorted(range(len(self._groups)), key=lambda group: (-left[group], group))

    def _put(self, group: int) -> None:
        allowed = [rank for rank in self._ranks if not self._would_circle(group, rank)]
        fitting = [rank for rank in allowed if self._held[group] < self._room[rank]]
        if fitting:
            rank = min(fitting, key=lambda rank: self._end(group, rank))
        else:
            rank = max(allowed, key=lambda rank: self._room[rank])
        begin, carried = self._arrival(group, rank)
        self._of[group] = rank
        self._left -= self._work[group]
        self._begin[rank] = begin
        self._load[rank] += self._seconds[rank][group]
        self._ready[group] = begin + self._load[rank]
        self._room[rank] -= self._held[group]
        for other, seconds in carried.items():
            self._carried[other, rank] += seconds
            self._behind[other].add(rank)

    def _end(self, group: int, rank: int) -> float:
        """When the rank and its links would be done with all micro-batches."""
        begin, carried = self._arrival(group, rank)
        each = [self._load[rank] + self._seconds[rank][group]]
        each += [self._carried[other, rank] + seconds for other, seconds in carried.items()]
        return begin + self._micro_batches * max(*each, self._balanced(rank, carried))

    def _balanced(self, rank: int, needed: Collection[int]) -> float:
        """Seconds of all that is left on this rank and those that others will then not need, with what they have."""
        open_ = [one for one in self._ranks if one == rank or (one not in needed and not self._behind[one])]
        speed = sum(self._speeds[one] for one in open_)
        return (self._left + sum(self._load[one] * self._speeds[one] for one in open_)) / speed

    def _arrival(self, group: int, rank: int) -> tuple[float, dict[int, float]]:
        """When the rank could begin with it, and seconds on links, by the rank that sends."""
        begin = self._begin[rank]
        carried: dict[int, float] = defaultdict(float)
        for source, size in self._before[group]:
            if (other := self._of[source]) != rank:
                latency, byte_seconds = self._evaluator.link(other, rank)
                begin = max(begin, self._ready[source] + 2 * (latency + size * byte_seconds))
                carried[other] += size * byte_seconds
        return begin, carried

    def _would_circle(self, group: int, rank: int) -> bool:
        """Whether a rank that has what the group needs already needs something of this rank."""
        needed = {self._of[source] for source, _ in self._before[group]} - {rank}
        seen, open_ = {rank}, [rank]
        while open_:
            for behind in self._behind[open_.pop()] - seen:
                seen.add(behind)
                open_.append(behind)
        return bool(needed & seen)
