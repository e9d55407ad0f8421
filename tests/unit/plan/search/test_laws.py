"""Laws that every search, and what is best, must keep."""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from block_graphs import cost, graph
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.cli.planning import _recorded
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, Replica, Stage, as_plan_file, place
from hetsync.plan.plan_file import ModelIdentity
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.objective import Weights
from hetsync.plan.search.partitions import best_partitions
from hetsync.plan.search.registry import BASELINES, PARTS, SEARCHES, make_search
from hetsync.plan.search.search import Problem, Scored

DIAMONDS = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)]


def problem(costs, seconds, edges=None, link=None, batch=64, memory_gib=1.0, delay=4, **given_):
    devices = tuple(DeviceGroup(f"d{index}", memory_gib=memory_gib) for index in range(len(seconds)))
    evaluator = Evaluator(
        graph([f"b{index}" for index in range(len(costs))], edges),
        costs,
        Cluster("x", "s", devices, link or Link()),
        [StepTime(0.0, one) for one in seconds],
        Training(batch, SyncConfig(delay_bound=delay)),
    )
    return Problem(evaluator, given_.pop("micro_batches", (1, 4)), **given_)


def run(name, asked, *words, **named):
    driver = Driver(asked, *words, **named)
    driver.run(name)
    return driver


def diamonds(**given_):
    costs = [cost(1 + index % 3, 2.0, output=10 * index) for index in range(7)]
    return problem(costs, (1.0, 2.0, 4.0), DIAMONDS, Link(0.01, 1e4), **given_)


@st.composite
def problems(draw):
    """Chains and others, with memory and without, of replicas that are given or not."""
    count, speeds = draw(st.integers(2, 7)), draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=3))
    figures = st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 999), st.integers(0, 99))
    costs = [cost(*([one] * 2), output=size, weight=weight, update=update) for one, size, weight, update in draw(
        st.lists(figures, min_size=count, max_size=count)
    )]  # fmt: skip
    skips = [(i, i + 2) for i in range(count - 2) if draw(st.booleans())]
    edges = None if not skips else [*((i, i + 1) for i in range(count - 1)), *skips]
    fitting = draw(st.sampled_from([1.0, 20_000 / 2**30]))
    whole = (tuple(range(len(speeds))),) if len(speeds) <= count else None
    more = {"replicas": draw(st.sampled_from([None, whole])), "every_rank": draw(st.booleans())}
    return problem(costs, speeds, edges, Link(0.01, draw(st.sampled_from([1e2, 1e5]))), 32, fitting, **more)


weighings = st.sampled_from([Weights(), Weights(1 / 3, 1 / 3, 1 / 3), Weights(0, 1, 1), Weights(0, 1, 0)])


def tried(name, asked, *words):
    """A driver that has run it, or refused to."""
    driver = Driver(asked, *words)
    with suppress(UserError):
        driver.run(name)
    return driver


@contextmanager
def evaluated():
    """Every placement that the evaluator is called with, whoever calls."""
    calls, evaluate = [], Evaluator.evaluate

    def counted(self, placement):
        calls.append(placement)
        return evaluate(self, placement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", counted)
        yield calls


@given(st.sampled_from([*SEARCHES, "best"]), problems(), weighings, st.integers(1, 90))
@example("list", problem([cost(weight=1000)] * 6, (1.0, 1.0), memory_gib=20_000 / 2**30), Weights(), 1)
@settings(max_examples=30)
def test_the_budget_is_kept_to_the_evaluation(name, asked, weights, most):
    with evaluated() as calls:
        driver = tried(name, asked, weights, Budget(most))
    assert len(calls) == driver.evaluations <= most
    of_reference = driver.evaluations - sum(arm.evaluations for arm in driver.arms)
    assert of_reference == 1 or (of_reference == 2 and driver.reference == "list")  # data was tried, and does not fit


def test_random_spends_the_whole_budget():
    assert run("random", diamonds(), budget=Budget(60)).evaluations == 60


@given(problems(), weighings, st.integers(1, 150), st.integers(0, 3))
@settings(max_examples=8)
def test_best_is_no_worse_than_what_it_holds(asked, weights, most, seed):
    """Than its own parts, on any budget; than each of the first ones alone, on one that holds them all."""
    words = asked, weights, Budget(most), seed
    best = tried("best", *words)
    alone = [tried(name, *words) for name in BASELINES]
    if sum(one.evaluations for one in alone) > most:
        alone = []
    for one in [arm.best for arm in best.arms] + [driver.best for driver in alone]:
        assert one is None or asked.order(best.best) <= asked.order(one)


@pytest.mark.parametrize("name", [*SEARCHES, "best"])
def test_no_seconds_are_no_search(name):
    assert run(name, diamonds(), budget=Budget(10**6, 0.0)).arms == []


@pytest.mark.each_value(5)
@pytest.mark.parametrize("name", [*SEARCHES, "best"])
def test_a_seed_decides_everything(name):
    found = [run(name, diamonds(), budget=Budget(80), seed=3).found() for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.each_value
@pytest.mark.parametrize("weights", [Weights(), Weights(1, 1, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_best_is_no_worse_than_any_search(weights, seed):
    best = run("best", diamonds(), weights, Budget(400), seed)
    methods = [part.method for part in PARTS["best"]]
    assert [arm.method for arm in best.arms] == methods[: len(best.arms)]
    for name in set(methods) - {"trinity"}:  # which in `best` begins elsewhere than alone
        assert best.found().objective <= run(name, diamonds(), weights, Budget(400), seed).found().objective * (
            1 + 1e-9
        )
    assert best.found().objective == min(arm.best.objective for arm in best.arms)
    assert best.found().objective >= best.bound


@pytest.mark.parametrize("name", ["contiguous", "exact", "list", "local", "mincut", "best"])
def test_plans_of_every_rank_are_a_jobs(name):
    """What the runtime checks of a plan before it trains."""
    asked = replace(diamonds(), every_rank=name in ("exact", "local", "best"))
    found = run(name, asked, budget=Budget(200)).found()
    model = ModelIdentity("m", "0" * 64)
    plan = as_plan_file(found.placement, asked.evaluator.graph, 64, model)
    assert place(plan, asked.evaluator.graph) == found.placement
    asked.evaluator.check_hosts(found.placement)
    asked.evaluator.check_memory(found.costs)
    if asked.every_rank:
        plan.check_job(3, 64, "m", "0" * 64)


def test_a_lone_replica_of_every_rank_is_found_by_exact():
    """A device of almost no speed, that has to have blocks all the same."""
    asked = problem([cost()] * 4, (1.0, 1e6), replicas=((0, 1),), every_rank=True)
    assert sorted(run("exact", asked).found().placement.ranks) == [0, 1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=2, max_size=6), st.integers(1, 4))
@settings(max_examples=4)
def test_on_equal_devices_with_fast_links_nothing_beats_data(blocks, ranks):
    costs = [cost(forward, weight=weight) for forward, weight in blocks]
    asked = problem(costs, [1.0] * ranks, batch=ranks * 16)
    best, data = (run(name, asked, budget=Budget(150)) for name in ("best", "data"))
    assert best.found().objective == pytest.approx(data.found().objective)
    assert best.found().objective == pytest.approx(best.bound)


# Powers of two: other factors may break ties otherwise.
@pytest.mark.thorough
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.sampled_from([1, 2, 4]), st.integers(0, 40))
@settings(max_examples=6)
def test_times_that_are_all_longer_change_the_seconds_only(blocks, factor, carried):
    """Of links as well."""
    costs = [cost(one, output=carried) for one in blocks]
    seconds = (1.0, 2.0, 2.0)
    found = [
        run("best", problem(costs, [one * by for one in seconds], link=Link(0.5 * by, 100 / by)), budget=Budget(120))
        for by in (1, factor)
    ]
    less, more = (driver.found() for driver in found)
    assert more.objective == pytest.approx(less.objective)
    assert more.costs.step_seconds == pytest.approx(factor * less.costs.step_seconds)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.permutations([1.0, 1.0, 3.0, 3.0]))
@settings(max_examples=12)
def test_the_order_of_devices_changes_nothing(blocks, seconds):
    """They are of other names, so of other classes, though equal."""
    costs = [cost(one, output=40) for one in blocks]
    ordered, other = (problem(costs, one, link=Link(0.1, 100.0)) for one in ([1.0, 1.0, 3.0, 3.0], seconds))
    assert run("exact", other).found().objective == pytest.approx(run("exact", ordered).found().objective)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), min_size=2, max_size=6), st.sampled_from([1, 2, 8]))
@settings(max_examples=40)
def test_more_memory_and_bandwidth_never_make_exact_worse(blocks, times):
    """Under GPipe's schedule, for which it is exact: where that is slow, 1F1B may make more of another chain."""
    costs = [cost(forward, output=size, weight=size) for forward, size in blocks]
    chain = {"replicas": ((0, 1, 2),), "micro_batches": (4,)}
    found = []
    for memory, bandwidth in ((1, 100.0), (1, 100.0 * times), (times, 100.0)):
        memory_gib = memory * 6000 * 4 / 2**30
        asked = problem(costs, (1.0, 2.0, 3.0), link=Link(0.1, bandwidth), memory_gib=memory_gib, **chain)
        search = make_search("exact", asked)
        proposed = [one for lot in iter(search.propose, []) for one in lot]
        costs_of = [asked.evaluator.evaluate(one) for one in proposed if one.replicas[0].stages[0].in_flight == 4]
        found.append(min((one.step_seconds for one in costs_of if one.feasible), default=math.inf))
    assert all(one <= found[0] * (1 + 1e-9) for one in found)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
@settings(max_examples=6)
def test_exact_finds_the_best_partition_into_replicas(blocks):
    """Of all that trying every partition, order and cut finds; memory holds the whole model nowhere, links are free."""
    weight = 2**20
    costs = [cost(one, output=0, saved=0, weight=weight) for one in blocks]
    memory_gib = (8 * weight * max(1, len(blocks) - 1) + 100) / 0.9 / 2**30
    asked = problem(costs, (1.0, 1.0, 3.0, 3.0), batch=960, memory_gib=memory_gib, delay=None, micro_batches=(4,))
    tried = [asked.evaluator.evaluate(placement) for placement in all_plans(len(blocks), 4, 4)]
    least = min(costs.step_seconds for costs in tried if costs.feasible)
    assert run("exact", asked).found().costs.step_seconds <= least * 1.01  # shares are whole samples


def all_plans(blocks, ranks, number):
    """Up to two replicas of one or two ranks each: more cannot be where each needs two."""
    chains = {
        chosen: [
            Replica(tuple(Stage((r,), tuple(range(*b))) for r, b in zip(chosen, bounds, strict=True)), None, number)
            for cut in combinations(range(1, blocks), len(chosen) - 1)
            for bounds in [list(pairwise([0, *cut, blocks]))]
        ]
        for count in range(1, ranks + 1)
        for chosen in permutations(range(ranks), count)
    }
    yield from (Placement((replica,)) for found in chains.values() for replica in found)
    for one, other in product(chains, repeat=2):
        if one < other and not set(one) & set(other):
            yield from (Placement(pair) for pair in product(chains[one], chains[other]))


def test_many_possible_replicas_are_left_to_other_searches():
    """Seven devices that all differ have 128 subsets."""
    few, many = (problem([cost()] * 3, [1.0 + rank for rank in range(ranks)], micro_batches=(1,)) for ranks in (3, 8))
    assert len([*best_partitions(few)]) == 2
    assert [*best_partitions(many)] == []


def small_shares(placement, costs):
    return [
        (share, replica.micro_batches)
        for replica, share in zip(placement.replicas, costs.shares, strict=True)
        if replica.micro_batches > 1 and share < 2 * replica.micro_batches
    ]


@pytest.mark.parametrize("name", ["exact", "local", "best"])
def test_micro_batches_that_nobody_asked_for_are_of_two_samples_at_least(name):
    """Four equal devices, of which no one holds the model: pipelines, which many micro-batches make fast."""
    costs = [cost(1.0, 2.0, output=10, saved=10, weight=1000) for _ in range(6)]
    asked = problem(costs, (1.0,) * 4, batch=32, memory_gib=24_000 / 2**30, micro_batches=(1, 2, 4, 8, 16))
    driver = run(name, replace(asked, least_samples=2), budget=Budget(300))
    best = driver.fitting
    assert best is not None
    assert small_shares(best.placement, best.costs) == []
    free = problem(costs, (1.0, 1.0, 1.0, 7.0), batch=32, micro_batches=(1, 2, 4, 8, 16))
    best = run(name, replace(free, least_samples=2), budget=Budget(300)).fitting
    assert best is not None
    assert small_shares(best.placement, best.costs) == []


@pytest.mark.parametrize("name", ["list", "single", "mincut", "best"])
def test_where_every_rank_must_have_blocks_no_leader_leaves_one_without(name):
    asked = problem([cost(1.0, 2.0, output=1000)] * 6, (1.0, 1.0), None, Link(1.0, 1e2), 40, every_rank=True)
    driver = run(name, asked, budget=Budget(60))
    assert all(asked.unused_ranks(leader.scored.placement) == 0 for leader in driver.leaders)
    if not driver.leaders:
        with pytest.raises(UserError, match=r"leaves rank \d without blocks"):
            driver.found()


def test_local_never_asks_for_more_micro_batches_than_there_are_samples():
    asked = problem([cost()] * 6, (1.0,) * 5, batch=32, micro_batches=(1, 2, 4, 8, 16))
    whole = tuple(range(6))
    replicas = [Replica((Stage((0,), (0, 1, 2)), Stage((1,), (3, 4, 5))), None, 16)]
    replicas += [Replica((Stage((rank,), whole),), None, number) for rank, number in ((2, 8), (3, 4), (4, 4))]
    start = scored(asked, Placement(tuple(replicas)))
    for seed in range(6):
        search = make_search("local", asked, seed, start)
        for _ in range(60):
            search.hear([scored(asked, placement) for placement in search.propose()])


def scored(asked, placement):
    costs = asked.evaluator.evaluate(placement)
    return Scored(placement, costs, costs.step_seconds)


def test_a_plan_file_has_the_gap_of_its_own_plan():
    driver = run("local", problem([cost()] * 6, (1.0, 1.5), None, Link(0.01, 1e4)), budget=Budget(120))
    for number in range(len(driver.leaders)):
        record = _recorded(driver, driver.found(number))
        assert record.objective == pytest.approx(record.bound * (1 + record.gap), rel=1e-3)


@given(problems(), st.sampled_from([0, 4]), st.sampled_from([1, 4]), st.integers(0, 3))
@settings(max_examples=12)
def test_no_plan_of_a_search_is_below_the_bound(asked, delay, accumulation, seed):
    evaluator = asked.evaluator
    training = replace(evaluator.training, sync=SyncConfig(delay_bound=delay, accumulation=accumulation))
    costs, times = evaluator.block_costs, evaluator.step_times
    asked = replace(asked, evaluator=Evaluator(evaluator.graph, costs, evaluator.cluster, times, training))
    driver = tried("best", asked, Weights(), Budget(60), seed)
    for arm in driver.arms:
        assert arm.best is None or arm.best.objective >= driver.bound * (1 - 1e-9)


def test_a_search_ends_when_those_who_wait_would_give_up(monkeypatch):
    """However little of a processor it gets."""
    monkeypatch.setattr("hetsync.plan.search.driver.time.process_time", lambda: 0.0)
    moments = iter(range(10**6))
    monkeypatch.setattr("hetsync.plan.search.driver.time.monotonic", lambda: float(next(moments)))
    driver = run("random", diamonds(), budget=Budget(10**6, 60.0, 5.0))
    assert 0 < driver.evaluations < 200


def test_leaders_have_no_small_micro_batches_where_others_have_none():
    asked = replace(problem([cost()] * 6, (1.0, 1.0, 9.0), batch=32, micro_batches=(1, 2, 4, 8, 16)), least_samples=2)
    driver = run("data", asked)
    best = run("best", asked, budget=Budget(200))
    for found in (driver, best):
        assert found.leaders
        assert {asked.small_replicas(leader.scored) for leader in found.leaders} == {0}


def test_plans_of_small_micro_batches_come_after_all_others_that_fit():
    asked = problem([cost()] * 4, (1.0,) * 4, batch=32, micro_batches=(8, 16), least_samples=2)

    def pipelines(number):
        pairs = [Replica((Stage((rank,), (0, 1)), Stage((rank + 1,), (2, 3))), None, number) for rank in (0, 2)]
        return scored(asked, Placement(tuple(pairs)))

    large, small = pipelines(8), pipelines(16)
    assert small.objective < large.objective
    assert asked.order(large) < asked.order(small)
