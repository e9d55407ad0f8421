"""The best placement of a small graph that is no chain, by constraint programming (CP-SAT of OR-Tools, an extra).

As for chains, what is made small is GPipe's time: the longest way of a micro-batch through stages and links, both ways,
and (M − 1) times the slowest of them, forward and backward apart. A stage computes all that it has before it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hetsync.plan.search.group_figures import group_figures, group_saved_bytes
from hetsync.plan.search.search import Problem
from hetsync.plan.slices import BACKWARD, FORWARD, WEIGHTS

MOST_GROUPS = 24
MOST_WORK = 8.0  # in the solver's own unit, about a second, by which it ends in the same place on any machine
UNITS = 100_000  # in which the fastest device's step is told: the solver knows whole numbers


def can_search(problem: Problem) -> bool:
    """Whether the graph is small and no chain, and the solver is installed."""
    groups = problem.groups
    chain = all(target == source + 1 for source, target in groups.edges)
    return not chain and len(groups) <= MOST_GROUPS and find_spec("ortools") is not None


@dataclass(frozen=True)
class Pipeline:
    """What is placed: the problem's groups on these ranks, in micro-batches of so many samples."""

    problem: Problem
    ranks: Sequence[int]
    micro_batches: int
    samples: int


def best_ranks(asked: Pipeline, hint: Sequence[int]) -> list[int] | None:
    """Of the groups; None where nothing fits. `hint`: a placement that is known, to begin with.

    Deterministic. It may end before the best is proven.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    on = _devices(model, asked, hint)
    _heed_memory(model, asked, on)
    _minimise_seconds(model, asked, on)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = MOST_WORK
    solver.parameters.catch_sigint_signal = False  # or Ctrl-C would not end the search, now and later
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    groups = range(len(asked.problem.groups))
    return [next(rank for rank in asked.ranks if solver.value(on[group, rank])) for group in groups]


def _devices(model: Any, asked: Pipeline, hint: Sequence[int]) -> dict[tuple[int, int], Any]:
    """Whether a group is on a rank."""
    groups = range(len(asked.problem.groups))
    on = {(group, rank): model.new_bool_var("") for group in groups for rank in asked.ranks}
    for group in groups:
        model.add_exactly_one(on[group, rank] for rank in asked.ranks)
        for rank in asked.ranks:
            model.add_hint(on[group, rank], int(hint[group] == rank))
    if asked.problem.every_rank:
        for rank in asked.ranks:
            model.add_at_least_one(on[group, rank] for group in groups)
    return on


def _heed_memory(model: Any, asked: Pipeline, on: Mapping[tuple[int, int], Any]) -> None:
    evaluator, groups = asked.problem.evaluator, asked.problem.groups
    in_flight = min(asked.micro_batches, len(asked.ranks))
    held = evaluator.held_bytes(group_figures(evaluator, groups)[:, WEIGHTS], 1)
    needed = held + group_saved_bytes(evaluator, groups, in_flight) * asked.samples
    most = int(needed.sum())
    for rank in asked.ranks:
        if (limit := evaluator.limit_bytes[rank]) < most:
            model.add(sum(on[group, rank] * int(size) for group, size in enumerate(needed)) <= limit)


def _minimise_seconds(model: Any, asked: Pipeline, on: Mapping[tuple[int, int], Any]) -> None:
    problem, ranks = asked.problem, asked.ranks
    evaluator, figures = problem.evaluator, group_figures(problem.evaluator, problem.groups)
    step = {rank: evaluator.times[rank].seconds(asked.samples) for rank in ranks}
    unit = min(step.values()) / UNITS or 1.0  # a device that is far slower is too slow by any figure
    longest = 100 * UNITS
    most = 4 * (len(problem.groups) + 1) * longest  # that loads and links add up to

    def told(seconds: float) -> int:
        return min(longest, round(seconds / unit))

    def load(rank: int, column: int) -> Any:
        return sum(on[group, rank] * told(part * step[rank]) for group, part in enumerate(figures[:, column]))

    forward, backward, end = (model.new_int_var(0, most, "") for _ in range(3))
    begin = {rank: model.new_int_var(0, most, "") for rank in ranks}
    done = {rank: begin[rank] + load(rank, FORWARD) + load(rank, BACKWARD) for rank in ranks}
    for rank in ranks:
        model.add(forward >= load(rank, FORWARD))
        model.add(backward >= load(rank, BACKWARD))
        model.add(end >= done[rank])
    for one in ranks:
        for other in (rank for rank in ranks if rank != one):
            latency, byte_seconds = evaluator.link(one, other)
            joined, carried = model.new_bool_var(""), []
            for (source, target), size in problem.groups.edges.items():
                across = model.new_bool_var("")
                model.add_bool_or(across, on[source, one].Not(), on[target, other].Not())
                model.add_implication(across, joined)
                carried.append(across * told(size * asked.samples * byte_seconds))
            model.add(forward >= sum(carried))
            model.add(backward >= sum(carried))
            # Later by something, or stages of no time could wait for each other.
            both_ways = 2 * sum(carried) + max(1, told(2 * latency))
            model.add(begin[other] >= done[one] + both_ways).only_enforce_if(joined)
    model.minimize(end + (asked.micro_batches - 1) * (forward + backward))
