"""How long searching for plans takes, and how much memory.

    python -m benchmarks.planner_speed

`exact` on a chain of 100 blocks and eight devices of three kinds; evaluations a second of placements of 200 groups; all
of `hetsync plan --search best` for NASNet, from tracing to the plan; the greatest memory of the process meanwhile.
Seconds are the process's own, of one thread, so that other programs on the machine count little.
"""

from __future__ import annotations

import resource
import tempfile
import time
from unittest import mock

import numpy as np
import torch

from benchmarks.common.planning import CLUSTERS, plannable, problem_on
from benchmarks.common.report import source
from hetsync.balance.profile import StepTime
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.graph import BATCH, Block, BlockCost, BlockGraph, Edge
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.random_search import Random
from hetsync.plan.search.search import LEAST_SAMPLES, Problem, micro_batch_numbers

SAMPLES = 128


def chain(blocks: int, seed: int = 0) -> Evaluator:
    """Of unequal blocks, on two fast, two middling and four slow devices."""
    random = np.random.default_rng(seed)
    seconds, sizes = random.lognormal(-7, 1, blocks), random.lognormal((9, 10, 11), 1.2, (blocks, 3)).astype(int)
    costs = [
        BlockCost(float(one), 2 * float(one), 0.0, 0.0, *map(int, row)) for one, row in zip(seconds, sizes, strict=True)
    ]
    edges = [Edge(BATCH, 0), *(Edge(block - 1, block) for block in range(1, blocks))]
    named = tuple(Block(f"b{index}", "Linear", (f"b{index}.w",), 4) for index in range(blocks))
    graph = BlockGraph(named, tuple(edges))
    cluster = CLUSTERS["v100-p100-k80"]
    times = [StepTime(2e-3, 0.05 / cluster.device_of(rank).speed) for rank in range(cluster.size)]
    return Evaluator(graph, costs, cluster, times, Training(SAMPLES))


def exact_seconds(one_replica: bool) -> float:
    """Of all that `exact` proposes, on a chain of 100 blocks that are not contracted."""
    evaluator = chain(100)
    replicas = (tuple(range(len(evaluator.times))),) if one_replica else None
    problem = Problem(
        evaluator, micro_batch_numbers(None, SAMPLES, 1), replicas, most_groups=100, least_samples=LEAST_SAMPLES
    )
    driver = Driver(problem, budget=Budget(10**6))
    began = time.process_time()
    driver.run("exact")
    return time.process_time() - began


def evaluations_per_second(micro_batches: int, count: int = 400) -> float:
    """Of one thread, random placements of 200 groups on the eight devices."""
    problem = Problem(chain(200), (micro_batches,), most_groups=200)
    search, placements = Random(problem), []
    while len(placements) < count:
        placements += search.propose()
    began = time.process_time()
    for placement in placements:
        problem.evaluator.evaluate(placement)
    return len(placements) / (time.process_time() - began)


def best_seconds() -> tuple[float, Driver]:
    """Of tracing, measuring blocks and 1,000 evaluations, with nothing in the cache."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict("os.environ", {"XDG_CACHE_HOME": cache}):
        began = time.process_time()
        model = plannable("nasnet", 8, 10.0)
        driver = Driver(problem_on(CLUSTERS["v100-p100-k80"], model, one_replica=False))
        driver.run("best")
        return time.process_time() - began, driver


def main() -> None:
    torch.set_num_threads(1)
    print(source("planner_speed"))
    for one_replica in (True, False):
        what = "one replica" if one_replica else "with partitions into replicas"
        print(f"exact, 100 blocks, 8 devices of 3 kinds, {what}: {exact_seconds(one_replica):.2f} s")
    for number in (1, 4, 16, 64):
        print(f"evaluations, 200 groups, {number} micro-batches: {evaluations_per_second(number):,.0f} a second")
    seconds, driver = best_seconds()
    print(f"best for NASNet, tracing and measuring included: {seconds:.1f} s")
    for arm in driver.arms:
        print(f"  {arm.method}: {arm.evaluations} evaluations, {arm.seconds:.1f} s")
    print(f"memory of the process, at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB")


if __name__ == "__main__":
    main()
