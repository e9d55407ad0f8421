"""The best chain: equal to trying all of them; and laws of a best."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from block_graphs import cost, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.chains import best_chain, classes_of, machines_of
from hetsync.plan.search.contiguous import contiguous_replica
from hetsync.plan.search.driver import Driver
from hetsync.plan.search.exact import Exact
from hetsync.plan.search.registry import make_search
from hetsync.plan.search.search import Problem

MICRO_BATCHES, SAMPLES = 3, 6


@st.composite
def problems(draw):
    """Up to six blocks on up to three devices in two groups; memory for some of the chains, or for all."""
    blocks = draw(st.integers(1, 6))
    small, bytes_ = st.integers(1, 9), st.integers(0, 40)
    costs = [cost(draw(small), draw(small), 0.0, draw(bytes_), draw(bytes_), draw(bytes_)) for _ in range(blocks)]
    of_loss = draw(st.integers(0, costs[-1].saved_bytes))  # there for one micro-batch at a time
    costs[-1] = replace(costs[-1], loss_bytes=of_loss)
    # What a block receives it may save, and longer samples make others of a batch longer.
    costs = [replace(each, received_bytes=draw(bytes_)) for each in costs]
    costs = [replace(each, padding=draw(st.sampled_from([0.0, 0.5])), padded_samples=4) for each in costs]
    groups = [(draw(st.integers(1, 2)), draw(st.integers(1, 5))), (1, draw(st.integers(1, 5)))]
    memory = draw(st.sampled_from([None, 1200, 600, 300]))
    devices = tuple(
        DeviceGroup(name, count, memory_gib=memory and memory / 2**30)
        for name, (count, _) in zip("ab", groups, strict=True)
    )
    link = Link(draw(st.integers(0, 2)) / 2, draw(st.sampled_from([None, 100.0, 10.0])))
    slow = PairLink(("a", "b"), 1.0, draw(st.sampled_from([5.0, 50.0])))
    times = [StepTime(0.0, seconds) for count, seconds in groups for _ in range(count)]
    return problem(costs, Cluster("x", "s", devices, link, links=(slow,)), times)


def problem(costs, cluster, times, micro_batches=MICRO_BATCHES, samples=SAMPLES):
    model = graph([f"b{index}" for index in range(len(costs))])
    evaluator = Evaluator(model, costs, cluster, times, Training(samples, SyncConfig(), 1))
    return Problem(evaluator, (micro_batches,), (tuple(range(len(times))),))


def losing(place):
    """Three blocks, of which one saves much for its loss, on two devices that hold one micro-batch of that and no
    more. The first two take as long as the last."""
    costs = [cost(seconds, 0, 0.0, 1, 10, 1) for seconds in (1, 4, 5)]
    costs[place] = replace(costs[place], saved_bytes=100, loss_bytes=90)
    devices = (DeviceGroup("a", 2, memory_gib=320 / 2**30),)
    return problem(costs, Cluster("x", "s", devices), [StepTime(0.0, 1.0)] * 2)


def test_what_the_loss_saves_counts_for_one_micro_batch_at_a_time():
    """GPipe has three in flight on the last stage, too: its 2 · (3 · 100 − 2 · 90) bytes fit, and 2 · 300 would not."""
    asked = losing(2)
    machines = machines_of(asked, (0, 1), MICRO_BATCHES, 2, 1, gpipe=True)
    chain = best_chain(asked, machines, MICRO_BATCHES, 2, 1)
    assert chain is not None
    assert [stage.blocks for stage in chain.stages] == [(0, 1), (2,)]


def test_a_cut_by_speed_counts_it_so_too():
    """Two are in flight on the first stage: 2 · (2 · 110 − 90) bytes."""
    replica = contiguous_replica(losing(0), (0, 1), MICRO_BATCHES, 2, 1)
    assert [stage.blocks for stage in replica.stages] == [(0, 1), (2,)]


def test_memory_counts_what_a_stage_receives():
    """The last two blocks together need less than the last one alone, which saves what it receives."""
    costs = [cost(1, 0, 0.0, 100, 20, 0), cost(1, 0, 0.0, 100, 45, 0), cost(2, 0, 0.0, 0, 60, 0, received=100)]
    devices = (DeviceGroup("a", 2, memory_gib=300 / 2**30),)  # of which 270 bytes may be used
    asked = problem(costs, Cluster("x", "s", devices), [StepTime(0.0, 1.0)] * 2, micro_batches=2, samples=4)
    for search in (Exact(asked), make_search("contiguous", asked)):
        found = [asked.evaluator.evaluate(placement) for placement in proposals(search)]
        assert min(each.step_seconds for each in found if each.feasible) < 4


@given(problems(), st.integers(1, 3), st.integers(1, 6))
def test_a_run_of_groups_needs_what_the_evaluator_says(asked, in_flight, samples):
    bytes_ = asked.run_saved_bytes(in_flight, samples)
    evaluator, blocks = asked.evaluator, len(asked.evaluator.graph.blocks)
    for begin, end in combinations(range(blocks + 1), 2):
        cut = [part for part in (range(begin), range(begin, end), range(end, blocks)) if part]
        if len(cut) > len(evaluator.times):
            continue
        stages = tuple(Stage((rank,), tuple(part), in_flight) for rank, part in enumerate(cut))
        placement = Placement((Replica(stages, samples * in_flight, in_flight),))
        rank = cut.index(range(begin, end))
        held = evaluator.held_bytes(float(evaluator.figures[begin:end, 3].sum()), 1)
        assert evaluator.evaluate(placement).memory_bytes[rank] == pytest.approx(held + bytes_[begin, end], abs=1.1)


def run(name, asked):
    driver = Driver(asked)
    driver.run(name)
    return driver.found()


def all_chains(asked):
    blocks, (ranks,), (number,) = len(asked.evaluator.graph.blocks), asked.replicas, asked.micro_batches
    for count in range(1, min(len(ranks), blocks) + 1):
        for cut in combinations(range(1, blocks), count - 1):
            for chosen in permutations(ranks, count):
                bounds = zip(chosen, pairwise([0, *cut, blocks]), strict=True)
                stages = tuple(Stage((rank,), tuple(range(*pair)), number) for rank, pair in bounds)
                yield Placement((Replica(stages, None, number),))


def best_gpipe(search):
    """Of the proposals that keep all micro-batches in flight, as `all_chains` do."""
    number = search.problem.micro_batches[0]
    costs = [search.problem.evaluator.evaluate(placement) for placement in proposals(search)]
    kept = [
        found.step_seconds
        for placement, found in zip(proposals(type(search)(search.problem)), costs, strict=True)
        if found.feasible and all(stage.in_flight == number for stage in placement.replicas[0].stages)
    ]
    return min(kept, default=None)


def proposals(search):
    found = []
    while proposed := search.propose():
        found += proposed
    return found


@given(problems())
@settings(max_examples=120)
def test_it_finds_what_trying_all_chains_finds(asked):
    costs = [asked.evaluator.evaluate(placement) for placement in all_chains(asked)]
    expected = min((found.step_seconds for found in costs if found.feasible), default=None)
    assert best_gpipe(Exact(asked)) == pytest.approx(expected)


def test_a_need_of_a_part_of_a_byte_more_fits_as_it_does_for_the_evaluator():
    """3 · 29 + 2 · (38 + 38 · 2 · √½) = 270.48 bytes of 270."""
    costs = [replace(cost(1, 1, 0.0, 0, 38, 29), loss_bytes=0, padding=0.5, padded_samples=4)]
    devices = Cluster("x", "s", (DeviceGroup("a", 1, memory_gib=300 / 2**30),))
    asked = problem(costs, devices, [StepTime(0.0, 1.0)])
    (placement,) = all_chains(asked)
    assert asked.evaluator.evaluate(placement).feasible
    ((fits,),) = machines_of(asked, (0,), MICRO_BATCHES, 2, 1, gpipe=True).fits
    assert fits[0][1]


@given(problems(), st.integers(1, 5))
@settings(max_examples=60)
def test_one_more_device_never_makes_it_worse(asked, seconds):
    evaluator = asked.evaluator
    more = replace(evaluator.cluster, devices=(*evaluator.cluster.devices, DeviceGroup("c")))
    costs = [cost(*figures) for figures in figures_of(evaluator)]
    less = problem(costs, replace(more, devices=(*evaluator.cluster.devices, DeviceGroup("d"))), evaluator.times)
    # The same samples a rank, on average: else blocks have other parts.
    larger = problem(costs, more, (*evaluator.times, StepTime(0.0, seconds)))
    before, after = best_gpipe(Exact(less)), best_gpipe(Exact(larger))
    assert after is not None if before is not None else True
    assert before is None or after <= before * (1 + 1e-9)


def figures_of(evaluator):
    """Without fixed seconds: parts do not depend on the number of samples."""
    return [
        (float(forward), float(backward), 0.0, int(output), int(saved), int(weight))
        for (forward, backward, saved, weight), output in zip(evaluator.figures, evaluator.output_bytes, strict=True)
    ]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(6, 12))
@settings(max_examples=30)
def test_a_second_device_without_speed_stays_unused(blocks, digits):
    devices = Cluster("x", "s", (DeviceGroup("a", 2),), Link())
    costs = [cost(forward, output=output) for forward, output in blocks]
    alone, joined = (problem(costs, devices, [StepTime(0, one) for one in times]) for times in ([1], [1, 10**digits]))
    found = run("exact", joined)
    assert found.placement.ranks == [0]
    assert found.costs.step_seconds == pytest.approx(run("exact", alone).costs.step_seconds)


def test_a_block_that_no_device_holds_is_told():
    devices = Cluster("x", "s", (DeviceGroup("a", 2, memory_gib=1e-6),), Link())
    with pytest.raises(UserError, match="no device holds block b0"):
        run("exact", problem([cost(weight=10**6)] * 3, devices, [StepTime(0, 1)] * 2))


def test_too_many_classes():
    devices = Cluster("x", "s", tuple(DeviceGroup(f"d{i}") for i in range(11)), Link())
    with pytest.raises(UserError, match="at most 10 classes of equal devices, and a replica has 11"):
        make_search("exact", problem([cost()] * 20, devices, [StepTime(0, 1 + i) for i in range(11)]))


def test_equal_devices_are_of_a_class():
    devices = Cluster("x", "s", (DeviceGroup("a", 3), DeviceGroup("b", host="one"), DeviceGroup("b", host="two")))
    asked = problem([cost()], devices, [StepTime(0, 1), StepTime(0, 1), StepTime(0, 2), StepTime(0, 1), StepTime(0, 1)])
    assert classes_of(asked.evaluator, range(5)) == [[0, 1], [2], [3], [4]]
