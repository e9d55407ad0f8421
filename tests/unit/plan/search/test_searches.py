"""Searches: what they propose is sound and as good as they say; budgets are kept; what fits nowhere is told."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from block_graphs import cost, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, Replica, Stage, as_plan_file, place
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.plain import whole
from hetsync.plan.search.registry import SEARCHES, make_search, parts_of
from hetsync.plan.search.search import Problem, Search, micro_batch_numbers


def problem(costs, times, replicas=None, micro_batches=(1, 4), batch=32, memory_gib=None, link=None):
    names = [f"b{index}" for index in range(len(costs))]
    devices = tuple(DeviceGroup(f"d{rank}", memory_gib=memory_gib) for rank in range(len(times)))
    evaluator = Evaluator(graph(names), costs, Cluster("x", "s", devices, link), times, Training(batch))
    return Problem(evaluator, micro_batches, replicas)


def run(name, asked, **options):
    driver = Driver(asked, **options)
    driver.run(name)
    return driver


def speeds(*relative):
    return [StepTime(0.0, 1 / speed) for speed in relative]


def blocks_of(placement):
    return [[list(stage.blocks) for stage in replica.stages] for replica in placement.replicas]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)), min_size=3, max_size=7),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_contiguous_finds_the_cut_whose_slowest_stage_or_link_is_fastest(figures, relative):
    costs = [cost(forward, backward, output=size) for forward, backward, size in figures]
    asked = problem(costs, speeds(*relative), micro_batches=(8,), batch=16, link=Link(0.0, 40.0))
    (found,) = make_search("contiguous", asked).propose()
    assert slowest(asked, found.replicas[0]) == pytest.approx(
        min(
            slowest(asked, chain([0, *cut, len(costs)]))
            for cut in combinations(range(1, len(costs)), len(relative) - 1)
        )
    )


def chain(bounds):
    return Replica(tuple(Stage((rank,), tuple(range(*pair))) for rank, pair in enumerate(pairwise(bounds))))


def slowest(asked, replica):
    """Of micro-batches of two samples."""
    evaluator = asked.evaluator
    figures = evaluator.figures
    stages = [
        2 * evaluator.times[stage.ranks[0]].seconds_per_sample * figures[list(stage.blocks), :2].sum()
        for stage in replica.stages
    ]
    links = [2 * evaluator.output_bytes[stage.blocks[-1]] / 40 for stage in replica.stages[:-1]]
    return max(stages + links)


def test_contiguous_heeds_memory():
    """The first rank is ten times as fast, but holds three of the blocks."""
    costs = [cost(weight=2**26, saved=0)] * 6
    found = run("contiguous", problem(costs, speeds(10, 1), memory_gib=1)).found()
    assert found.costs.feasible
    assert blocks_of(found.placement) == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.each_value
@pytest.mark.parametrize("replicas", [None, ((0, 2), (1, 3))])
@pytest.mark.parametrize("name", SEARCHES)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=4, max_size=6))
@settings(max_examples=3)
def test_what_is_found_passes_the_check_of_a_job(name, replicas, blocks):
    costs = [cost(forward, output=output) for forward, output in blocks]
    asked = problem(costs, speeds(4, 2, 1, 1), None if name in ("data", "single") else replicas)
    found = run(name, asked, budget=Budget(60)).found()
    plan = as_plan_file(found.placement, asked.evaluator.graph, 32)
    assert place(plan, asked.evaluator.graph) == found.placement
    assert sum(replica.share for replica in found.placement.replicas) == 32
    assert found.costs == asked.evaluator.evaluate(found.placement)


@pytest.mark.parametrize("name", ["data", "single"])
def test_searches_with_replicas_of_their_own_refuse_others(name):
    with pytest.raises(UserError, match=f"--replicas is 0,2;1, but the plan of --search {name} has"):
        run(name, problem([cost()] * 3, speeds(1, 3, 4), ((0, 2), (1,))))


def test_ranks_of_a_replica_are_its_stages_in_order():
    found = run("contiguous", problem([cost()] * 6, speeds(4, 2, 1, 1), ((2, 0), (1, 3)))).found()
    assert [[stage.ranks for stage in replica.stages] for replica in found.placement.replicas] == [
        [(2,), (0,)],
        [(1,), (3,)],
    ]


def test_data_and_single():
    asked = problem([cost()] * 3, speeds(1, 3, 4))
    assert [replica.share for replica in run("data", asked).found().placement.replicas] == [4, 12, 16]
    single = run("single", asked).found()
    assert single.placement.ranks == [2]
    assert single.costs.step_seconds == pytest.approx(32 / 4)


def test_data_takes_as_many_micro_batches_as_memory_needs():
    """Though a slow rank then has more than its speed says: it needs a sample of each."""
    asked = problem([cost(1, 1, saved=2**30)], speeds(8, 1), micro_batches=(1, 4, 16), batch=36, memory_gib=2.5)
    found = run("data", asked).found()
    assert {replica.micro_batches for replica in found.placement.replicas} == {16}


def test_data_takes_no_more_micro_batches_than_leave_shares_to_speed():
    """With a long update a larger share for the slow rank has fewer updates a sample: that is no matter of these."""
    asked = problem([cost(1, 1, update=10)], speeds(4, 4, 1, 1), micro_batches=(1, 4, 8), batch=80)
    found = run("data", asked).found().placement
    assert [one.share for one in found.replicas] == [35, 35, 5, 5]
    forced = asked.evaluator.evaluate(whole(asked.evaluator, range(4), 8))
    assert forced.step_seconds < asked.evaluator.evaluate(found).step_seconds
    assert {one.micro_batches for one in found.replicas} == {1}


def test_single_is_a_plan_of_one_replica_that_is_given():
    """Which leaves its other ranks without blocks; it used to be refused wherever ranks were given."""
    asked = problem([cost()] * 3, speeds(1, 4, 2), ((2, 0, 1),))
    assert run("single", asked).found().placement.ranks == [1]
    driver = run("best", asked, budget=Budget(200))
    assert {arm.method: arm.refused is None for arm in driver.arms}["single"]
    assert not {arm.method: arm.refused is None for arm in driver.arms}["data"]


def test_what_fits_nowhere_says_how_much_is_missing():
    asked = problem([cost(weight=2**26, saved=0)] * 8, speeds(1, 1), memory_gib=1)
    short = 2 * (4 * 4 * 2**26 - int(0.9 * 2**30))
    with pytest.raises(UserError, match=f"fits nowhere: of 2 plans the nearest is {short:,} bytes short: rank 0 needs"):
        run("contiguous", asked).found()


def test_a_block_that_no_device_holds_is_named():
    asked = problem([cost(), cost(weight=2**28, saved=7)], speeds(1, 1), memory_gib=1)
    short = 4 * 2**28 + 7 - int(0.9 * 2**30)
    with pytest.raises(UserError, match=f"no device holds block b1: .*, {short:,} more than any device may use"):
        run("contiguous", asked)


def test_more_ranks_than_blocks():
    with pytest.raises(UserError, match="has 3 ranks, but the model has 2 blocks"):
        make_search("contiguous", problem([cost()] * 2, speeds(1, 1, 1)))


def test_there_is_no_such_search():
    with pytest.raises(UserError, match=r"no search contigous \(did you mean contiguous\?\): use best, contig"):
        parts_of("contigous")


def test_the_budget_is_kept_to_the_evaluation(monkeypatch):
    class Endless(Search):
        heard = 0

        def propose(self):
            return [Placement((Replica((Stage((0,), (0,)),)),))] * 7

        def hear(self, costs):
            self.heard += len(costs)

    search = Endless(problem([cost()], speeds(1)))
    monkeypatch.setattr("hetsync.plan.search.driver.make_search", lambda *given: search)
    driver = run("single", search.problem, budget=Budget(17))
    assert driver.evaluations == 17
    assert driver.arms[0].evaluations == search.heard == 16  # one was the reference's


@pytest.mark.parametrize(
    ("given_number", "batch", "replicas", "numbers"),
    [
        (3, 64, 2, (3,)),
        (None, 64, 2, (1, 2, 4, 8, 16)),
        (None, 7, 3, (1,)),
        (None, 10**6, 1, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_numbers_of_micro_batches(given_number, batch, replicas, numbers):
    assert micro_batch_numbers(given_number, batch, replicas) == numbers


def test_the_best_plans_are_kept_in_order():
    driver = run("local", problem([cost(output=10)] * 6, speeds(4, 2, 1, 1)))
    objectives = [one.scored.objective for one in driver.leaders]
    assert objectives == sorted(objectives)
    assert objectives[0] == driver.best.objective
    assert len({one.scored.placement for one in driver.leaders}) == len(driver.leaders) == 5
    assert driver.found(4).objective == objectives[4]
