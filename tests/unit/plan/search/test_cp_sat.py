"""Constraint programming: on small graphs that are no chains it is as good as trying everything."""

from __future__ import annotations

from itertools import product

import pytest
from block_graphs import cost, graph

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.search.cp_sat import Pipeline, best_ranks, can_search
from hetsync.plan.search.driver import Driver
from hetsync.plan.search.exact import Exact
from hetsync.plan.search.search import Problem, acyclic

pytest.importorskip("ortools")

BRANCHES = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]


def problem(costs, seconds, edges=BRANCHES, memory_gib=None, **given):
    devices = tuple(DeviceGroup(f"d{rank}", memory_gib=memory_gib) for rank in range(len(seconds)))
    names = [f"b{index}" for index in range(len(costs))]
    times = [StepTime(0.0, one) for one in seconds]
    cluster = Cluster("x", "s", devices, Link(0.0, 1e4))
    return Problem(Evaluator(graph(names, edges), costs, cluster, times, Training(32)), (8,), **given)


def seconds_of(asked, ranks):
    """With all micro-batches in flight, as GPipe has them."""
    from hetsync.plan.placement import Placement

    return asked.evaluator.evaluate(Placement((asked.replica(ranks, 8, 8),))).step_seconds


@pytest.mark.parametrize("forward", [(1, 3, 3, 3, 1), (1, 1, 5, 2, 2), (4, 1, 1, 1, 4)])
def test_it_finds_what_trying_everything_finds(forward):
    asked = problem([cost(float(one), 2.0 * one, output=10) for one in forward], (1.0, 2.0, 2.0))
    found = best_ranks(Pipeline(asked, range(3), 8, 4), [0] * 5)
    tried = (ranks for ranks in product(range(3), repeat=5) if acyclic(asked.groups, ranks) == list(ranks))
    assert seconds_of(asked, found) <= min(seconds_of(asked, ranks) for ranks in tried) * 1.02  # in its units


def test_memory_and_ranks_are_heeded():
    costs = [cost(weight=10**6) for _ in range(5)]
    asked = problem(costs, (1.0, 2.0, 2.0), memory_gib=3 * 4e6 / 0.9 / 2**30, every_rank=True)
    found = best_ranks(Pipeline(asked, range(3), 8, 4), [0, 0, 1, 2, 2])
    assert set(found) == {0, 1, 2}
    assert max(found.count(rank) for rank in range(3)) <= 2
    assert best_ranks(Pipeline(problem(costs, (1.0,), memory_gib=1e-3), range(1), 8, 4), [0] * 5) is None


def test_exact_proposes_branches_side_by_side():
    """Which no chain of consecutive stages has."""
    asked = problem([cost(1.0), cost(8.0), cost(8.0), cost(8.0), cost(1.0)], (1.0, 1.0, 1.0), replicas=((0, 1, 2),))
    assert can_search(asked)
    driver = Driver(asked)
    driver.run("exact")
    off = [one for one in Exact(asked)._off_the_chain()]
    assert driver.best.placement in off[0]


def test_chains_are_left_to_dynamic_programming():
    assert not can_search(problem([cost()] * 3, (1.0, 1.0), edges=None))
