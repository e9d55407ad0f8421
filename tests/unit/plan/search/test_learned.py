"""Searches that learn: deterministic by seed, within masks, and good where it is easy to be."""

from __future__ import annotations

import random
from graphlib import CycleError

import numpy as np
import pytest
import torch
from block_graphs import cost, graph

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plan.schedule import stage_order
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.features import Features
from hetsync.plan.search.masks import Masks
from hetsync.plan.search.placement_policy import untrained
from hetsync.plan.search.policy_file import SHIPPED, Specification, load_policy, save_policy
from hetsync.plan.search.pretraining import pretrain
from hetsync.plan.search.registry import CHEAP, Part, make_search
from hetsync.plan.search.reinforce import Placer
from hetsync.plan.search.search import Problem, Scored
from hetsync.plan.search.trinity import Trinity, _Plan

LEARNED = ["hierarchical", "hierarchical-multi", "ppo-time", "tapp", "trinity", "trinity-nothing"]
GIB = 2**30


def problem(blocks=8, times=(1.0, 1.0), edges=None, memory_bytes=None, weight=400, numbers=(1, 4), **options):
    groups = tuple(
        DeviceGroup(f"d{rank}", memory_gib=None if memory_bytes is None else memory_bytes[rank] / GIB)
        for rank in range(len(times))
    )
    names = [f"b{index}" for index in range(blocks)]
    evaluator = Evaluator(
        graph(names, edges),
        [cost(weight=weight)] * blocks,
        Cluster("x", "s", groups, Link(0.0, 1e9)),
        [StepTime(0.0, seconds) for seconds in times],
        Training(32),
    )
    return Problem(evaluator, numbers, **options)


def searched(name, asked, evaluations=200, seed=0):
    driver = Driver(asked, budget=Budget(evaluations), seed=seed)
    driver.run(name)
    return driver


def proposals(name, asked, lots, seed):
    driver = Driver(asked)
    search = make_search(name, asked, seed)
    found = []
    for _ in range(lots):
        proposed = search.propose()
        found.append(list(proposed))
        search.hear([driver._score(_Arm(), placement) for placement in proposed])
    return found


class _Arm:
    method, best, evaluations = "any", None, 0


@pytest.mark.parametrize("name", LEARNED)
def test_a_seed_gives_the_same_proposals_and_another_gives_others(name):
    first, again, other = (proposals(name, problem(), 4, seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", LEARNED)
def test_two_equal_devices_each_get_half_of_a_chain(name):
    found = searched(name, problem(numbers=(4,), replicas=((0, 1),)), 400).found()
    assert [len(stage.blocks) for stage in found.placement.replicas[0].stages] == [4, 4]


@pytest.mark.parametrize("name", LEARNED)
def test_nothing_is_proposed_for_ever(name):
    """One block on one device: one plan for each number of micro-batches, and for Trinity one with all in flight."""
    driver = searched(name, problem(1, (1.0,)))
    assert driver.arms[-1].evaluations <= 3


@pytest.mark.each_value(2)
@pytest.mark.parametrize("name", LEARNED)
def test_two_replicas_are_placed_on_their_own_ranks(name):
    asked = problem(6, (1.0, 1.0, 2.0), replicas=((0, 2), (1,)))
    first, second = searched(name, asked, 60).found().placement.replicas
    assert {rank for stage in first.stages for rank in stage.ranks} <= {0, 2}
    assert [stage.ranks for stage in second.stages] == [(1,)]


@pytest.mark.parametrize("name", ["ppo-time", "tapp", "trinity", "trinity-nothing"])
def test_every_rank_has_blocks_where_it_must(name):
    asked = problem(6, (1.0, 9.0, 50.0), every_rank=True, replicas=((0, 1, 2),))
    for lot in proposals(name, asked, 3, 0):
        assert all(len(placement.ranks) == 3 for placement in lot)


@pytest.mark.parametrize("name", ["ppo-time", "tapp", "trinity"])
def test_more_ranks_than_groups_are_refused_where_each_must_have_one(name):
    with pytest.raises(UserError, match="has 3 ranks, but the model has 2 groups of blocks"):
        make_search(name, problem(2, (1.0, 1.0, 1.0), every_rank=True, replicas=((0, 1, 2),)))


def test_what_does_not_fit_is_left_and_then_never_proposed():
    """The fastest device has room for a part: an untrained policy begins there, and moves away what it may not hold."""
    asked = problem(times=(1.0, 4.0), memory_bytes=(12_000, 10**6), replicas=((0, 1),))
    found = searched("trinity-nothing", asked).found()
    assert found.costs.feasible
    assert len(found.placement.ranks) == 2


@pytest.mark.thorough
def test_trinity_begins_with_the_plan_that_is_known_and_never_ends_worse():
    asked = problem(12, (1.0, 2.0, 3.0), numbers=(8,), replicas=((0, 1, 2),))
    driver = Driver(asked, budget=Budget(150))
    driver.run("exact")
    known = driver.fitting
    search = make_search("trinity", asked, 0, known)
    assert search._first()[0].tolist()[0] == [
        index for index, stage in enumerate(known.placement.replicas[0].stages) for _ in stage.blocks
    ]
    driver.run("trinity")
    assert driver.found().objective <= known.objective


@pytest.mark.parametrize("name", ["ppo-time", "trinity"])
def test_trinity_begins_with_the_best_of_the_plans_that_cost_little(name):
    asked = problem(12, (1.0, 2.0, 3.0), numbers=(1, 8), replicas=((0, 1, 2),))
    driver = searched(name, asked, 20)
    assert [arm.method for arm in driver.arms] == [*CHEAP, name]
    cheap = [searched(one, asked).found().objective for one in CHEAP if one != "data"]  # which has replicas of its own
    assert driver.found().objective <= min(cheap) < searched("trinity-nothing", asked, 20).found().objective


def test_trinity_begins_with_stages_where_whole_replicas_are_best():
    """Of which nothing is left to be placed."""
    driver = searched("trinity", problem(6, (1.0, 1.0), numbers=(2,)), 40)
    assert driver.found().method == "data"
    best = {arm.method: arm.best for arm in driver.arms}
    known = min((best[name] for name in CHEAP[1:]), key=driver.problem.order)
    assert driver._start(Part("trinity")) == min(known, best["trinity"], key=driver.problem.order)


def test_best_spends_parts_of_its_budget_and_begins_trinity_elsewhere(monkeypatch):
    """`local` may have a third of what the first five leave, and the first Trinity heeds neither it nor `exact`."""
    started = []

    def heard(name, asked, seed, start, policy):
        started.append((name, seed, start))
        return make_search(name, asked, seed, start, policy)

    monkeypatch.setattr("hetsync.plan.search.driver.make_search", heard)
    driver = searched("best", problem(24, (1.0, 2.0, 3.0), numbers=(1, 4, 8), replicas=((0, 1, 2),)), 200)
    evaluations = {index: arm.evaluations for index, arm in enumerate(driver.arms)}
    assert [arm.method for arm in driver.arms][5:8] == ["local", "trinity", "local"]
    left = 199 - sum(evaluations[index] for index in range(5))
    assert 0 < evaluations[5] <= -(-left // 3)
    assert evaluations[6] == -(-(left - evaluations[5]) // 2)
    cheap = [arm.best for arm in driver.arms if arm.method in CHEAP and arm.best is not None]
    stages = [best for best in cheap if Trinity.begins_from(best.placement)]
    assert started[6][2] == min(stages, key=driver.problem.order)
    known = [arm.best for arm in driver.arms[:7] if arm.best is not None]
    assert started[7][2] == min(known, key=driver.problem.order)
    assert [seed for name, seed, _ in started if name == "local"] == [0, 1]  # not the same neighbours again


def test_trinity_begins_with_replicas_of_many_micro_batches_too():
    asked = problem(times=(1.0,) * 4, numbers=(1, 2, 4, 8, 16))
    two = (Stage((0,), (0, 1, 2, 3)), Stage((1,), (4, 5, 6, 7)))
    whole = [Replica((Stage((rank,), tuple(range(8))),), None, 4) for rank in (2, 3)]
    placement = Placement((Replica(two, None, 16), *whole))
    costs = asked.evaluator.evaluate(placement)
    search = make_search("trinity", asked, 0, Scored(placement, costs, costs.step_seconds))
    assert search._placement(*search._first()) == placement
    for _ in range(8):
        found = [(each, asked.evaluator.evaluate(each)) for each in search.propose()]
        search.hear([Scored(*pair, pair[1].step_seconds) for pair in found])


def test_trinity_from_nothing_heeds_no_plan_that_is_known():
    asked = problem(12, (1.0, 2.0, 3.0), numbers=(8,), replicas=((0, 1, 2),))
    known = searched("exact", asked).fitting
    first = make_search("trinity-nothing", asked, 0, known).propose()
    assert first == make_search("single", asked).propose()


def test_groups_move_in_runs():
    """A group alone on another device costs two transfers: an untrained policy moves neighbours along."""
    asked = problem(24, (1.0, 1.0), replicas=((0, 1),), every_rank=True)
    search = make_search("trinity-nothing", asked)
    before = search._first()
    plan = _Plan(*before, 1.0)
    moved = np.concatenate(
        [search._decide([plan] * 50, backwards).devices.numpy() != before[0] for backwards in (False, True)]
    )
    together = (moved[:, 1:] & moved[:, :-1]).sum() / moved.sum()
    assert 0.02 < moved.mean() < 0.4
    assert together > 0.5


def test_best_begins_with_the_policy_that_comes_along(monkeypatch):
    begun = {}

    def remember(name, problem, seed, start, policy):
        begun[name] = policy
        return make_search(name, problem, seed, start, policy)

    monkeypatch.setattr("hetsync.plan.search.driver.make_search", remember)
    shipped = load_policy(SHIPPED).state_dict()
    searched("best", problem(3), 2000)
    assert all(torch.equal(shipped[name], tensor) for name, tensor in begun["trinity"].state_dict().items())
    searched("trinity", problem(3), 60)
    assert begun["trinity"] is None


@pytest.mark.parametrize("once", [False, True])
def test_a_placer_knows_how_likely_its_choices_are(once):
    """Of all plans for two groups on three devices together: certain."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        placer = Placer(3, 3, 8)
        torch.nn.init.normal_(placer.choice.weight)
    groups_NGF = torch.arange(6.0).view(1, 2, 3).expand(2000, -1, -1)
    devices, chances = placer.place(groups_NGF, torch.zeros(2000, 2, 3), np.random.default_rng(0), once)
    found = dict(zip(map(tuple, devices.tolist()), chances.sum(1).exp().tolist(), strict=True))
    assert len(found) == (6 if once else 9)
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)


def test_tapp_knows_how_likely_its_cuts_are():
    search = make_search("tapp", problem(4, (1.0, 1.0, 1.0), replicas=((0, 1, 2),)))
    search._untrained_RGS.zero_()  # or some were too rare to be drawn
    groups, chances = search._cut(torch.full((2000,), 3))
    found = dict(zip(map(tuple, groups.tolist()), chances.exp().tolist(), strict=True))
    assert len(found) == 7  # into one, two and three groups
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)


def test_tapp_begins_with_parts_that_suit_devices():
    search = make_search("tapp", problem(16, (1.0, 3.0), replicas=((0, 1),)))
    devices, _ = search.sample(search.present.repeat(100, 1))
    assert (devices == 0).float().mean() > 0.57  # three quarters would be even; without regard to speed, a half


def test_tapp_begins_with_the_largest_part_whatever_the_order_of_devices():
    """Early stages have the most micro-batches in flight."""
    search = make_search("tapp", problem(16, (3.0, 3.0, 1.0), replicas=((0, 1, 2),)))
    groups, _ = search._cut(torch.full((200,), 3))
    sizes = [(groups == group).sum() for group in range(3)]
    assert sizes[0] > 1.5 * max(sizes[1:])


def test_tapp_begins_with_many_micro_batches():
    lots = proposals("tapp", problem(16, (1.0, 1.0), numbers=(1, 2, 16), replicas=((0, 1),)), 1, 0)
    numbers = [placement.replicas[0].micro_batches for placement in lots[0]]
    assert numbers.count(16) > len(numbers) / 2


@pytest.mark.parametrize("times", [(1.0, 2.0, 2.0, 4.0), (4.0, 2.0, 2.0, 1.0)])
def test_tapp_comes_near_to_exact_on_a_chain(times):
    asked = problem(14, times, numbers=(1, 2, 4, 8, 16), replicas=((0, 1, 2, 3),))
    exact, found = (searched(name, asked, 300).found().objective for name in ("exact", "tapp"))
    assert found <= 1.05 * exact


def test_masks_are_those_of_trying():
    """By the order of stages and the bytes that are left, for random graphs, in random orders."""
    for seed in range(60):
        drawn = random.Random(seed)
        blocks, ranks = drawn.randrange(2, 9), drawn.randrange(1, 5)
        pairs = [(a, b) for a in range(blocks) for b in range(a + 1, blocks) if drawn.random() < 0.4]
        asked = problem(blocks, (1.0,) * ranks, pairs, memory_bytes=[drawn.choice((8_000, 10**6))] * ranks)
        features = Features(asked, [[(rank,) for rank in range(ranks)]])
        devices = np.zeros((3, blocks), dtype=np.int64)
        masks = Masks(features, devices, np.zeros(3, dtype=np.int64), all_used=False)
        for group in [*range(blocks), *(drawn.randrange(blocks) for _ in range(20))]:
            allowed = masks.allowed(group)
            for row, device in np.ndindex(3, ranks):
                changed = devices[row].copy()
                changed[group] = device
                stays = device == devices[row, group]
                assert allowed[row, device] == (stays or _may(changed, group, pairs, features))
            chosen = np.array([drawn.choice(np.flatnonzero(row).tolist()) for row in allowed])
            masks.put(group, chosen)
            devices[:, group] = chosen


def _may(devices, group, pairs, features):
    on = devices == devices[group]
    if features.need_bytes[on].sum() > features.limit_bytes[0, devices[group]]:
        return False
    edges = {(devices[a], devices[b]) for a, b in pairs if devices[a] != devices[b]}
    try:
        stage_order(features.count, edges)
    except CycleError:
        return False
    return True


def test_a_policy_is_learned_written_and_begun_with(tmp_path):
    said = []
    for name in ("one", "two"):
        pretrain(tmp_path / name, 5, 7, "the command", said.append)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert said[-1].startswith("5 updates: ")
    policy = load_policy(tmp_path / "one")
    trained = make_search("trinity", problem(), 0, None, policy).learner.policy.state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in policy.state_dict().items())
    assert trained["choice.weight"].abs().sum() > 0  # 0 in an untrained one


def test_policies_that_see_other_things_are_refused(tmp_path):
    policy, path = untrained(0), tmp_path / "policy"
    with pytest.raises(UserError, match="does not exist: make one by hetsync plan --pretrain"):
        load_policy(path)
    save_policy(path, policy, Specification(policy.width, "c", 0, 1, (), features_version=99))
    with pytest.raises(UserError, match="sees version 99 of the features of plans, this HetSync version 1"):
        load_policy(path)
    save_policy(path, policy, Specification(policy.width + 1, "c", 0, 1, ()))
    with pytest.raises(UserError, match="holds other layers than its width of 65 says"):
        load_policy(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="is no policy for plans"):
        load_policy(path)


def test_a_policy_is_shipped():
    policy = load_policy(SHIPPED).state_dict()
    assert policy["choice.weight"].abs().sum() > 0  # 0 in an untrained one
    assert sum(tensor.nbytes for tensor in policy.values()) < 500_000


def test_groups_that_need_no_memory_stay_on_devices_that_there_are():
    """Of replicas of different sizes the smaller has none in the places of the larger's last."""
    asked = problem(blocks=6, times=(1.0, 1.0, 1.0), memory_bytes=(GIB, GIB, GIB), replicas=((0, 1), (2,)))
    features = Features(asked, [((0,), (1,)), ((2,),)])
    features.need_bytes = np.zeros_like(features.need_bytes)  # of what neither holds weights nor saves anything
    masks = Masks(features, np.zeros((2, 6), dtype=int), np.array([0, 1]), False)
    assert masks.allowed(0).tolist() == [[True, True], [True, False]]
