"""The objective: what it weighs, what it is relative to, and that nothing is below its bound."""

from __future__ import annotations

import pytest
from block_graphs import cost, graph

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.search.driver import Driver
from hetsync.plan.search.objective import Weights, check_weights, figures_of, least_seconds_per_sample, objective
from hetsync.plan.search.plain import whole
from hetsync.plan.search.search import Problem

THIRDS = Weights(1 / 3, 1 / 3, 1 / 3)


def evaluator(ranks=2, memory_gib=1.0, seconds=1.0):
    devices = Cluster("x", "s", (DeviceGroup("a", ranks, memory_gib=memory_gib),), Link(0.0, 1e9))
    costs = [cost(forward, weight=1000) for forward in (1.0, 2.0, 3.0)]
    return Evaluator(graph(["a", "b", "c"]), costs, devices, [StepTime(0.0, seconds)] * ranks, Training(8))


def test_the_reference_has_one_whatever_the_weights():
    model = evaluator()
    costs = model.evaluate(whole(model, range(2), 1))
    for weights in (Weights(), THIRDS, Weights(0.2, 0.8)):
        assert objective(weights, costs, model).of(costs) == pytest.approx(1)


def test_the_three_are_weighed_apart():
    model = evaluator()
    reference, other = (model.evaluate(whole(model, range(ranks), 1)) for ranks in (2, 1))
    parts = [objective(Weights(*one), reference, model).of(other) for one in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert parts[0] == pytest.approx(2)
    assert parts[1] == 0  # a lone rank sends nothing
    assert parts[2] < 1  # nor has it the buffers of delayed mode
    assert objective(Weights(1, 2, 3), reference, model).of(other) == pytest.approx(parts[0] + 3 * parts[2])


def test_scaling_all_times_scales_seconds_only():
    costs = [model.evaluate(whole(model, range(2), 1)) for model in (evaluator(), evaluator(seconds=3.0))]
    slow, fast = figures_of(costs[1], evaluator()), figures_of(costs[0], evaluator())
    assert slow.seconds_per_sample == pytest.approx(3 * fast.seconds_per_sample)
    assert slow[1:] == pytest.approx(fast[1:])


def test_where_data_does_not_fit_the_reference_is_a_list_schedule():
    model = evaluator(memory_gib=25_000 / 2**30)  # of 3 blocks of 4 × 1,000 bytes, or 8 × 1,000 in delayed mode
    driver = Driver(Problem(model, (1,)))
    assert driver.evaluations == 2
    driver.run("list")
    assert driver.found().objective == pytest.approx(1)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ((0, 0, 0), "--weights is 0,0,0, by which all plans are alike: make one of them more than 0"),
        ((1, -1, 0), "--weights is 1,-1,0: give finite numbers that are not negative"),
        ((1, float("nan"), 0), "--weights is 1,nan,0: give finite numbers"),
        ((1, 0), "--weights is 1,0: give three, of time, bytes and memory"),
    ],
)
def test_weights_that_weigh_nothing(weights, sentence):
    with pytest.raises(UserError, match=sentence):
        check_weights(weights)


def test_memory_without_a_limit_cannot_be_weighed():
    with pytest.raises(
        UserError, match=r"--weights gives memory 0\.333333, but no device of cluster profile x has mem"
    ):
        Driver(Problem(evaluator(memory_gib=None), (1,)), THIRDS)


def test_the_bound_is_what_one_rank_needs_with_its_update():
    devices = Cluster("x", "s", (DeviceGroup("a"),), Link())
    one = Evaluator(graph("ab"), [cost(1, 2, update=8)] * 2, devices, [StepTime(0.0, 1.0)], Training(8))
    assert one.update_seconds == pytest.approx((2.0,))  # of a step of 8 s: 16 of 64 s on the profiled device
    alone = one.evaluate(Placement((Replica((Stage((0,), (0, 1)),)),)))
    assert least_seconds_per_sample(one, 1, 1) == pytest.approx(alone.step_seconds / 8)
