"""What `hetsync plan` does: from a recipe and a cluster profile to a plan file, or from a plan file to text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from hetsync.config.schema import Config
from hetsync.emulation.cluster import Cluster, load_cluster
from hetsync.errors import UserError
from hetsync.plan.evaluate import Evaluator
from hetsync.plan.explain import predicted, told_costs, told_stages, told_timeline
from hetsync.plan.placement import as_plan_file, place
from hetsync.plan.plan_file import mistakes_in, read_plan, write_plan
from hetsync.plan.recipe import PlannableModel, plannable_model
from hetsync.plan.search.driver import Driver
from hetsync.plan.search.search import Problem, micro_batch_numbers
from hetsync.simulate.recipe import build, profiles

MOST_MICRO_BATCHES_GIVEN = 1024


@dataclass(frozen=True)
class Request:
    """What the user asks for; None leaves it to us."""

    ranks: int | None
    replicas: tuple[tuple[int, ...], ...] | None
    micro_batches: int | None
    search: str


def plan(config: Config, request: Request, output: Path | None) -> None:
    """Search, say what was found, and write it."""
    cluster = _cluster(config)
    ranks = request.ranks or cluster.size
    _check_size(request, cluster.size)
    if request.replicas is not None:
        _check_replicas(request.replicas, ranks)
    model, evaluator = _prepared(config, cluster, ranks)
    numbers = micro_batch_numbers(request.micro_batches, config.data.batch_size, len(request.replicas or (0,)))
    driver = Driver(Problem(evaluator, numbers, request.replicas))
    driver.run(request.search)
    found = driver.found()
    graph, costs = model.cut.graph, predicted(found.costs)
    file = as_plan_file(found.placement, graph, config.data.batch_size, model.identity, costs)
    number = sum(arm.evaluations for arm in driver.arms)
    tried = f"{number} plans" if number > 1 else "1 plan"
    print(f"{request.search}: the best of {tried} for {len(graph.blocks)} blocks on {ranks} ranks")
    print(*told_stages(file), *told_costs(costs), sep="\n")
    if output is not None:
        _check_runs(found.placement.ranks, ranks, request.search)
        write_plan(file, output)
        print(f"wrote {output}")


def explain(config: Config, path: Path) -> None:
    """Stages and what was predicted; with a cluster to emulate, also what is predicted now, and the timeline."""
    file = read_plan(path)
    print(*told_stages(file), sep="\n")
    if config.emulation.profile is None:
        print(*(told_costs(file.predicted) if file.predicted else ()), sep="\n")
        print("for a timeline, give the recipe, and the cluster by --emulate")
        return
    with mistakes_in(path):
        ranks = max(file.ranks) + 1
        model, evaluator = _prepared(config, _cluster(config), ranks)
        file.check_job(ranks, config.data.batch_size, config.model.name, model.identity.weights_sha256 or "")
        placement = place(file, model.cut.graph)
        evaluator.check_hosts(placement)
        costs = evaluator.evaluate(placement)
        evaluator.check_memory(costs)
    print(*told_costs(predicted(costs)), *told_timeline(evaluator, placement), sep="\n")


def _prepared(config: Config, cluster: Cluster, ranks: int) -> tuple[PlannableModel, Evaluator]:
    torch.set_num_threads(1)  # as emulated ranks
    times = [profile.time for profile in profiles(config, cluster, ranks)]
    built, model = build(config)
    plannable = plannable_model(config, built, model, ranks)
    return plannable, Evaluator(plannable.cut.graph, plannable.costs, cluster, times, plannable.training)


def _cluster(config: Config) -> Cluster:
    if config.emulation.profile is None:
        raise UserError("plan needs a cluster: name its profile by --emulate")
    return load_cluster(config.emulation.profile)


def _check_size(request: Request, devices: int) -> None:
    if request.ranks is not None and request.ranks > devices:
        raise UserError(f"--ranks is {request.ranks}, but the cluster has {devices} devices: give at most {devices}")
    if request.micro_batches is not None and request.micro_batches > MOST_MICRO_BATCHES_GIVEN:
        most = MOST_MICRO_BATCHES_GIVEN
        raise UserError(f"--micro-batches is {request.micro_batches}: give at most {most}, as more hide no more")


def _check_replicas(replicas: tuple[tuple[int, ...], ...], ranks: int) -> None:
    for rank, count in Counter(rank for one in replicas for rank in one).items():
        if count > 1:
            raise UserError(f"--replicas has rank {rank} {count} times: leave it in one place")
        if not 0 <= rank < ranks:
            raise UserError(f"--replicas has rank {rank}, but there are {ranks}: give 0 to {ranks - 1}, or --ranks")
    named = {rank for one in replicas for rank in one}
    if missing := sorted(set(range(ranks)) - named):
        raise UserError(f"--replicas lacks rank {missing[0]} of {ranks}: add it, or give --ranks {len(named)}")


def _check_runs(placed: list[int], ranks: int, search: str) -> None:
    if unused := sorted(set(range(ranks)) - set(placed)):
        raise UserError(
            f"--output is there, but the plan of {search} leaves rank {unused[0]} without blocks, and a job runs all of"
            " its ranks: give fewer --ranks, or leave --output out"
        )
