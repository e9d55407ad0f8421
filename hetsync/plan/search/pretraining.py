"""Learning to improve plans beforehand: Trinity's agent on one random graph and cluster after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.graph import BATCH, Block, BlockCost, BlockGraph, Edge
from hetsync.plan.search.placement_policy import untrained
from hetsync.plan.search.policy_file import Specification, save_policy
from hetsync.plan.search.ppo import Ppo
from hetsync.plan.search.search import Problem, Scored
from hetsync.plan.search.trinity import STEPS, Trinity

UPDATES = 4  # on one problem
POINTS = 40  # of the curve, at most
KINDS = ("Conv2d", "Linear", "LSTM", "BatchNorm2d", "function")
BATCH_SIZE = 64


def pretrain(output: Path, steps: int, seed: int, command: str, say: Callable[[str], None]) -> Specification:
    """So many updates; equal arguments give equal weights. UserError where the file cannot be written."""
    random = np.random.default_rng(seed)
    learner = Ppo(untrained(seed), random)
    curve, falls = [], []
    for begin in range(0, steps, UPDATES):
        falls.append(_play(random_problem(random), learner, min(UPDATES, steps - begin), int(random.integers(2**31))))
        done = min(begin + UPDATES, steps)
        if done == steps or done // UPDATES % max(1, -(-steps // (UPDATES * POINTS))) == 0:
            curve.append((done, round(float(np.mean(falls)), 4)))
            say(f"{done:,} updates: objective lower by a factor of {math.exp(np.mean(falls)):.3f}")
            falls = []
    specification = Specification(learner.policy.width, command, seed, steps, tuple(curve))
    save_policy(output, learner.policy, specification)
    return specification


def _play(problem: Problem, learner: Ppo, updates: int, seed: int) -> float:
    """By how much the logarithm of the objective fell."""
    search = Trinity(problem, seed)
    search.learner = learner
    evaluator, costs = problem.evaluator, []
    alone = min(time.seconds(BATCH_SIZE) for time in evaluator.times)
    lots = 0
    while lots <= updates * STEPS and (proposed := search.propose()):
        found = [evaluator.evaluate(placement) for placement in proposed]
        scored = [Scored(*pair, pair[1].step_seconds / alone) for pair in zip(proposed, found, strict=True)]
        costs += [search.cost(one) for one in scored]
        search.hear(scored)
        lots += 1
    return math.log(costs[0] / min(costs))


def random_problem(random: np.random.Generator) -> Problem:
    """8 to 64 blocks in a chain with ways around, on two to eight devices whose speeds differ up to ten times."""
    count, ranks = int(random.integers(8, 65)), int(random.integers(2, 9))
    seconds = random.lognormal(-7, 1, count)
    sizes = random.lognormal((9, 10, 11), 1.2, (count, 3))
    costs = [
        BlockCost(float(one), 2 * float(one), 0.0, 0.0, *(int(size) for size in row))
        for one, row in zip(seconds, sizes, strict=True)
    ]
    speeds = np.exp(random.uniform(0, math.log(10), ranks))
    bandwidth = float(sizes[:, 0].mean() / seconds.mean() * np.exp(random.uniform(-1, 4)))
    devices = tuple(DeviceGroup(f"d{rank}") for rank in range(ranks))
    times = [StepTime(0.0, 3 * float(seconds.sum()) / float(speed)) for speed in speeds]
    cluster = Cluster("random", "drawn", devices, Link(1e-5, bandwidth))
    evaluator = Evaluator(_random_graph(count, random), costs, cluster, times, Training(BATCH_SIZE))
    return Problem(evaluator, (1, 4, 16), (tuple(range(ranks)),))


def _random_graph(count: int, random: np.random.Generator) -> BlockGraph:
    blocks = tuple(Block(f"b{index}", str(random.choice(KINDS)), (f"b{index}.w",), 4) for index in range(count))
    pairs = {(index - 1, index) for index in range(1, count)}
    around = random.uniform(0, 0.5)
    for index in range(2, count):
        if random.random() < around:
            pairs.add((int(random.integers(max(0, index - 8), index - 1)), index))
    return BlockGraph(blocks, (Edge(BATCH, 0), *(Edge(*pair) for pair in sorted(pairs))))
