"""Searches on graphs that are no chains: stages never wait for each other, and what branches is used."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from block_graphs import cost, graph
from hypothesis import given
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement
from hetsync.plan.schedule import stage_order
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.groups import Groups
from hetsync.plan.search.list_schedule import list_placement
from hetsync.plan.search.local import Local
from hetsync.plan.search.mincut import balanced_cut
from hetsync.plan.search.search import Problem, Scored, acyclic

BRANCHES = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]  # 1-2 and 3-4 need nothing of each other


def problem(costs, edges, ranks=2, micro_batches=(1,), link=None, memory_gib=None, **given_):
    cluster = Cluster("x", "s", (DeviceGroup("a", ranks, memory_gib=memory_gib),), link or Link())
    model = graph([f"b{index}" for index in range(len(costs))], edges)
    evaluator = Evaluator(model, costs, cluster, [StepTime(0.0, 1.0)] * ranks, Training(32))
    return Problem(evaluator, micro_batches, **given_)


@st.composite
def assignments(draw):
    count = draw(st.integers(1, 9))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    groups = Groups(tuple(range(count + 1)), dict.fromkeys(edges, 1.0), (1.0,) * count)
    return groups, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))


@given(assignments())
def test_stages_never_wait_for_each_other(asked):
    groups, ranks = asked
    found = acyclic(groups, ranks)
    used = sorted(set(found))
    edges = {(used.index(found[a]), used.index(found[b])) for a, b in groups.edges if found[a] != found[b]}
    stage_order(len(used), edges)  # raises where there is a circle
    assert set(found) <= set(ranks)
    assert acyclic(groups, found) == found


def test_an_assignment_without_a_circle_stays_as_it_is():
    groups = Groups((0, 1, 2, 3), {(0, 2): 1.0}, (1.0,) * 3)
    assert acyclic(groups, [1, 0, 1]) == [1, 0, 1]


def test_list_runs_branches_side_by_side():
    asked = problem([cost(1.0, 1.0, output=0)] * 6, BRANCHES, 4)
    replica = list_placement(asked, ((0, 1, 2, 3),), 1).replicas[0]
    of = replica.stage_of
    assert of[1] == of[2] != of[3] == of[4]


def test_list_fills_a_device_before_work_moves_on():
    """Three equal thirds of a chain, for many micro-batches."""
    asked = problem([cost(1.0, 1.0, output=0)] * 9, None, 3, (16,))
    replica = list_placement(asked, ((0, 1, 2),), 16).replicas[0]
    assert [stage.blocks for stage in replica.stages] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


def test_list_heeds_memory():
    """Each device holds three of the six."""
    asked = problem([cost(weight=2**26, saved=0, output=10**9)] * 6, None, memory_gib=1, link=Link(0.0, 1.0))
    assert asked.evaluator.evaluate(list_placement(asked, ((0, 1),), 1)).feasible


@given(assignments(), st.floats(0.1, 0.9))
def test_a_cut_leaves_nothing_before_it_that_needs_what_is_behind(asked, part):
    groups, _ = asked
    before = balanced_cut(groups, range(len(groups)), [1.0] * len(groups), part)
    assert not any(source not in before and target in before for source, target in groups.edges)


def test_a_cut_is_where_few_bytes_are():
    sizes = [9.0, 9.0, 1.0, 9.0, 9.0]
    groups = Groups(tuple(range(7)), {(a, b): size for (a, b), size in zip(pairwise(range(6)), sizes, strict=True)}, ())
    assert balanced_cut(groups, range(6), [1.0] * 6, 0.5) == {0, 1, 2}
    assert balanced_cut(groups, range(6), [1.0] * 6, 1 / 6) == {0}


def test_mincut_is_the_least_cut_of_equal_halves():
    """Two cliques that one edge joins."""
    edges = [(a, b) for a, b in nx.complete_graph(4).edges] + [(a + 4, b + 4) for a, b in nx.complete_graph(4).edges]
    asked = problem([cost(1.0, 1.0)] * 8, sorted([*edges, (3, 4)]), micro_batches=(4,))
    driver = Driver(asked)
    driver.run("mincut")
    (replica,) = driver.found().placement.replicas
    assert [stage.blocks for stage in replica.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("seed", range(3))
def test_local_improves_what_it_begins_with(seed):
    """All on one rank, where halves of micro-batches on two would take 5 of 8 times as long."""
    asked = problem([cost(1.0, 1.0, output=0)] * 6, None, micro_batches=(4,), replicas=((0, 1),))
    begin = asked.evaluator.evaluate(alone := placement_on(asked, [0] * 6))
    search = Local(asked, seed, Scored(alone, begin, begin.step_seconds))
    best = begin.step_seconds
    while proposed := search.propose():
        costs = [asked.evaluator.evaluate(one) for one in proposed]
        search.hear([Scored(*pair, pair[1].step_seconds) for pair in zip(proposed, costs, strict=True)])
        best = min(best, *(one.step_seconds for one in costs))
    assert best == pytest.approx(begin.step_seconds * 5 / 8)


def placement_on(asked, ranks):
    return Placement((asked.replica(ranks, asked.micro_batches[0]),))


def test_local_keeps_given_replicas():
    asked = problem([cost(1.0, 1.0)] * 6, None, 4, (1, 2), replicas=((0, 3), (1, 2)))
    driver = Driver(asked, budget=Budget(300))
    driver.run("local")
    replicas = driver.found().placement.replicas
    assert [{rank for stage in replica.stages for rank in stage.ranks} <= ranks for replica, ranks in zip(
        replicas, ({0, 3}, {1, 2}), strict=True
    )] == [True, True]  # fmt: skip
