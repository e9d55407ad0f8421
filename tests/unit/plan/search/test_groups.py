"""Groups: no circle, no block lost, and bytes once a target."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from block_graphs import cost, graph
from hypothesis import given
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement
from hetsync.plan.search.cp_sat import Pipeline, _heed_memory
from hetsync.plan.search.groups import contract
from hetsync.plan.search.list_schedule import _Schedule
from hetsync.plan.search.search import Problem


def evaluator(costs, edges=None):
    model = graph([f"b{index}" for index in range(len(costs))], edges)
    return Evaluator(model, costs, Cluster("x", "s", (DeviceGroup("a"),)), [StepTime(0.0, 1.0)], Training(8))


@st.composite
def models(draw):
    count = draw(st.integers(1, 12))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    figures = st.integers(0, 9)
    costs = [cost(1 + draw(figures), draw(figures), output=draw(figures), weight=draw(figures)) for _ in range(count)]
    return evaluator(costs, sorted(edges))


@given(models(), st.integers(1, 12))
def test_groups_are_runs_that_lead_onwards(model, most):
    groups = contract(model, most)
    assert len(groups) == min(most, len(model.graph.blocks))
    assert [block for group in range(len(groups)) for block in groups.blocks(group)] == [*range(groups.bounds[-1])]
    assert all(source < target for source, target in groups.edges)


@given(models())
def test_without_contraction_edges_are_the_models(model):
    groups = contract(model, len(model.graph.blocks))
    expected = {(edge.source, edge.target) for edge in model.graph.edges if edge.source >= 0}
    assert set(groups.edges) == expected
    assert all(groups.edges[source, target] == model.output_bytes[source] for source, target in expected)


def test_an_output_counts_once_for_each_group_that_needs_it():
    heavy, light = {"forward": 9.0, "saved": 900, "weight": 900}, {"saved": 9, "weight": 9}
    costs = [cost(output=7, **heavy), cost(output=5, **light), cost(output=3, **light), cost(**heavy)]
    groups = contract(evaluator(costs, [(0, 1), (0, 2), (1, 3), (2, 3)]), 3)
    assert groups.bounds == (0, 1, 3, 4)
    assert groups.edges == {(0, 1): 7, (1, 2): 8}
    assert groups.output_bytes == (7, 8, 0)


def test_small_neighbours_become_one_before_large_ones():
    assert contract(evaluator([cost(9.0), cost(0.1), cost(0.1), cost(9.0)]), 3).bounds == (0, 1, 3, 4)


def test_groups_need_what_their_stages_do_of_which_the_loss_is_saved_once():
    costs = [cost(saved=10, weight=100), replace(cost(saved=30, weight=100), loss_bytes=20)]
    devices = (DeviceGroup("a", 2, memory_gib=1),)
    scored = Evaluator(graph("ab"), costs, Cluster("x", "s", devices), [StepTime(0.0, 1.0)] * 2, Training(8))
    asked = Problem(scored, (4,))
    in_flight = 2
    memory = scored.evaluate(Placement((asked.replica([0, 1], 4, in_flight),))).memory_bytes
    assert memory == {0: 400 + 2 * 2 * 10, 1: 400 + 2 * (2 * 10 + 20)}
    assert _Schedule(asked, (0, 1), 4, 2, 1)._held == [*memory.values()]
    scored.limit_bytes = [*memory.values()]
    told = []
    one_each = {(group, rank): int(group == rank) for group in range(2) for rank in range(2)}
    _heed_memory(SimpleNamespace(add=told.append), Pipeline(asked, range(2), 4, 2), one_each)
    assert told == [True, True]
