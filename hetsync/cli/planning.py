"""What `hetsync plan` does: from a recipe and a cluster profile to a plan file, or from a plan file to text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from hetsync.config.schema import Config
from hetsync.console import plain_console
from hetsync.data import check_batch_size
from hetsync.emulation.cluster import Cluster, load_cluster
from hetsync.emulation.device import affordable_rate, emulated_times, tells_rates
from hetsync.errors import INTERRUPTED, UserError, announce, complain, did_you_mean
from hetsync.plan.evaluate import Evaluator, check_link
from hetsync.plan.explain import predicted, told_costs, told_reasons, told_search, told_stages, told_timeline
from hetsync.plan.graph import BlockCost
from hetsync.plan.placement import as_plan_file, place
from hetsync.plan.plan_file import PlanFile, SearchRecord, TriedSearch, mistakes_in, read_plan, write_plan
from hetsync.plan.recipe import PlannableModel, blocks_of, check_cut_settings, plannable_model
from hetsync.plan.search.driver import Arm, Budget, Driver, Found
from hetsync.plan.search.objective import Weights, check_weights, figures_of
from hetsync.plan.search.placement_policy import PlacementPolicy
from hetsync.plan.search.policy_file import load_policy
from hetsync.plan.search.registry import cuts, takes_policy
from hetsync.plan.search.search import LEAST_SAMPLES, MOST_GROUPS, Problem, micro_batch_numbers
from hetsync.simulate.recipe import build
from hetsync.stop_signal import Interrupts, handled

MOST_MICRO_BATCHES_GIVEN = 1024
MOST_EVALUATIONS = 1000  # where the user names no number


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for; None leaves it to us."""

    ranks: int | None
    replicas: tuple[tuple[int, ...], ...] | None
    micro_batches: int | None
    search: str
    evaluations: int
    seconds: float | None
    weights: tuple[float, ...] | None
    seed: int
    groups: int | None
    policy: Path | None


class Terms(NamedTuple):
    """What a request asks of a search, read and found to be possible."""

    weights: Weights
    policy: PlacementPolicy | None


def plan(config: Config, request: Request, output: Path | None) -> int:
    """Search, say what was found, and write it; interrupted, the best so far. The exit status."""
    terms, runs = terms_of(request), output is not None  # before anything that takes long
    if runs:
        request = for_jobs(config, request)
    cluster = planned_cluster(config)
    ranks = request.ranks or cluster.size
    check_request(request, cluster.size, ranks, config.data.batch_size)
    interrupts = Interrupts(raises=True)
    with handled(interrupts.hear):
        model, evaluator, _ = prepared(config, cluster, ranks)
        driver, interrupted = search(request, terms, model, evaluator, runs)
        interrupts.raises = False
        return tell(config, request, driver, model, output, interrupted or interrupts.heard)


def terms_of(request: Request) -> Terms:
    """UserError for an unknown search, weights that weigh nothing, a policy that cannot be begun with."""
    learns, policy = takes_policy(request.search), None
    if request.policy is not None:
        if not learns:
            raise UserError(
                f"--policy is {request.policy}, but --search {request.search} learns from nothing or not at all: leave"
                " it out, or choose trinity, trinity-nothing, ppo-time or best"
            )
        policy = load_policy(request.policy)
    return Terms(Weights() if request.weights is None else check_weights(request.weights), policy)


def for_jobs(config: Config, request: Request) -> Request:
    """The request for plans that a job of these settings runs: some know only whole models that take their share at
    once. UserError where others are asked for."""
    try:
        check_cut_settings(config)
    except UserError as mistake:
        return _of_whole_models(request, str(mistake))
    return request


def _of_whole_models(request: Request, why: str) -> Request:
    """The request for plans that are like a job without one. UserError, which says why, where others are asked for."""
    if request.search != "data" or request.micro_batches not in (None, 1):
        raise UserError(f"{why}, or plan with --search data and --micro-batches 1")
    return replace(request, micro_batches=1)


def check_request(request: Request, devices: int, ranks: int, batch_size: int) -> None:
    """UserError where it does not fit so many devices, ranks and samples."""
    _check_size(request, devices, batch_size)
    if request.replicas is not None:
        _check_replicas(request.replicas, ranks)
    _groups(request, ranks)


def search(
    request: Request,
    terms: Terms,
    model: PlannableModel,
    evaluator: Evaluator,
    runs: bool,
    deadline: float | None = None,
) -> tuple[Driver, bool]:
    """And whether it was interrupted, with a plan that fits; without one KeyboardInterrupt goes on. `runs`: only plans
    count that a job can run. `deadline`: by the monotonic clock, for those who wait."""
    _tell_uncut(model)
    if runs and model.refused is not None:
        request = _of_whole_models(request, model.refused)
    if runs and cuts(request.search):
        _check_loss(model)
    ranks, replicas = len(evaluator.times), len(request.replicas or (0,))
    numbers = micro_batch_numbers(request.micro_batches, evaluator.training.batch_size, replicas)
    least = LEAST_SAMPLES if request.micro_batches is None else 1
    groups = _groups(request, ranks)
    problem = Problem(evaluator, numbers, request.replicas, groups, every_rank=runs, least_samples=least)
    budget = Budget(request.evaluations, request.seconds, deadline)
    with plain_console(stderr=True).status("search") as line:
        driver = Driver(
            problem, terms.weights, budget, request.seed, lambda it: line.update(_told_so_far(it)), terms.policy
        )
        try:
            driver.run(request.search)
        except KeyboardInterrupt:
            if not driver.leaders:
                raise
            return driver, True
    return driver, False


def tell(
    config: Config,
    request: Request,
    driver: Driver,
    model: PlannableModel,
    output: Path | None,
    interrupted: bool,
    measured: int | None = None,
) -> int:
    """Say what was found, and write it; the exit status. `measured`: the place among the best of the plan that was the
    best where they were run."""
    found, ranks = driver.found(measured or 0), len(driver.problem.ranks)
    file = plan_file_of(config, driver, model, found)
    assert file.predicted is not None
    if output is not None:  # before anything that may fail, such as a pipe that nobody reads
        write_plan(file, output)
    blocks = len(model.cut.graph.blocks)
    print(f"{request.search}: the best of {driver.evaluations} plans for {blocks} blocks on {ranks} ranks")
    print(*told_stages(file), *told_costs(file.predicted), sep="\n")
    _tell_tried(driver)
    if measured is None:  # of what was measured nobody knows data's
        print(_break_even(driver, found))
    if output is not None:
        print(f"wrote {output}")
    if interrupted:
        complain(f"interrupted after {driver.evaluations} evaluations: this is the best so far")
        return INTERRUPTED
    return 0


def plan_file_of(config: Config, driver: Driver, model: PlannableModel, found: Found) -> PlanFile:
    record = _recorded(driver, found)
    costs = predicted(found.costs)
    return as_plan_file(found.placement, model.cut.graph, config.data.batch_size, model.identity, costs, record)


def _told_so_far(driver: Driver) -> str:
    gap = "" if driver.gap is None else f", gap {driver.gap:.1%}"
    best = driver.fitting
    found = "nothing fits yet" if best is None else f"best objective {best.objective:.4g}{gap}"
    return f"{driver.arms[-1].method}: {driver.evaluations} evaluations, {found}"


def _recorded(driver: Driver, found: Found) -> SearchRecord:
    """What the plan file says of the search, to five digits."""

    def short(value: float) -> float:
        return float(f"{value:.5g}")

    tried = tuple(
        TriedSearch(
            arm.method,
            arm.evaluations,
            short(arm.seconds),
            None if arm.fitting is None or _unused(driver, arm) else short(arm.fitting.objective),
        )
        for arm in driver.arms
    )
    return SearchRecord(
        method=found.method,
        evaluations=driver.evaluations,
        seconds=short(driver.seconds),
        seed=driver.seed,
        weights=tuple(short(weight) for weight in driver.objective.weights),
        objective=short(found.objective),
        bound=short(driver.bound),
        gap=None if (gap := driver.gap_of(found.objective)) is None else short(gap),
        tried=tried,
    )


def _tell_tried(driver: Driver) -> None:
    """A table of the searches that were run, each with its best plan."""
    table = Table(
        *("search", "objective", "s a step", "bytes a sample", "memory", "evaluations", "s"), box=None, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for arm in driver.arms:
        row = ["–"] * 4
        if (best := arm.fitting) is not None:
            figures = figures_of(best.costs, driver.problem.evaluator)
            row = [f"{best.objective:.4g}", f"{best.costs.step_seconds:.4g}"]
            row += [f"{figures.bytes_per_sample:,.0f}", f"{figures.memory_fraction:.1%}"]
        table.add_row(arm.method, *row, str(arm.evaluations), f"{arm.seconds:.1f}")
    console = plain_console(soft_wrap=True)
    console.print(table)
    for arm in driver.arms:
        if arm.refused is not None:
            print(f"{arm.method}: {arm.refused}")
        if unused := _unused(driver, arm):
            print(f"{arm.method}: does not count, as it leaves {unused} of the ranks, of which a job runs all, unused")


def _unused(driver: Driver, arm: Arm) -> int:
    """Ranks that must have blocks, and have none in the best of a search's plans."""
    return 0 if arm.fitting is None else driver.problem.unused_ranks(arm.fitting.placement)


def _break_even(driver: Driver, found: Found) -> str:
    """The steps after which the search has paid for itself, against data parallelism by speed."""
    if driver.reference != "data":
        some = len(driver.problem.ranks) > driver.problem.evaluator.training.batch_size
        return f"break-even at once: data parallelism {'has no sample for every rank' if some else 'does not fit'}"
    gain = driver.reference_costs.step_seconds - found.costs.step_seconds
    if gain <= 1e-9 * driver.reference_costs.step_seconds:
        return "break-even never: data parallelism is as fast"
    steps = math.ceil(driver.seconds / gain)
    return f"break-even after {steps:,} steps: each is {gain:.4g} s shorter than data's with one micro-batch"


def explain(config: Config, path: Path) -> None:
    """Stages and what was predicted; with a cluster to emulate, also what is predicted now, and the timeline."""
    file = read_plan(path)
    print(*told_stages(file), *(told_search(file.search) if file.search else ()), sep="\n")
    if config.emulation.profile is None:
        print(*(told_costs(file.predicted) if file.predicted else ()), sep="\n")
        print("for a timeline, give the recipe, and the cluster by --emulate")
        return
    ranks = max(file.ranks) + 1
    model, evaluator, _ = prepared(config, planned_cluster(config), ranks)
    with mistakes_in(path):
        file.check_job(ranks, config.data.batch_size, config.model.name, model.identity.weights_sha256 or "")
        placement = place(file, model.cut.graph)
        evaluator.check_hosts(placement)
        costs = evaluator.evaluate(placement)
        evaluator.check_memory(costs)
    print(*told_costs(predicted(costs)), *told_timeline(evaluator, placement), sep="\n")
    print(*told_reasons(evaluator, placement), sep="\n")


def list_blocks(config: Config, pattern: str) -> None:
    """Those whose names are like it, with what they hold."""
    blocks = blocks_of(*build(config))
    found = [block for block in blocks if fnmatchcase(block.name, pattern)]
    if not found:
        near = did_you_mean(pattern, (block.name for block in blocks))
        raise UserError(f"--list is {pattern}, but no block of {config.model.name} is called like that{near}")
    table = Table("block", "kind", "weights, bytes", box=None, pad_edge=False)
    table.columns[-1].justify = "right"
    for block in found:
        table.add_row(block.name, block.kind, f"{block.weight_bytes:,}")
    plain_console(soft_wrap=True).print(table)


class Prepared(NamedTuple):
    """What searches need. `rate`: samples/s of the emulated cluster, as told or assumed; None where its profile has the
    model's, and of real ranks."""

    model: PlannableModel
    evaluator: Evaluator
    rate: float | None


def prepared(config: Config, cluster: Cluster, ranks: int) -> Prepared:
    torch.set_num_threads(1)  # as emulated ranks
    if cluster.events:
        announce(f"the events of {cluster.name} are not planned for: devices count as they are without")
    built, model = build(config)
    check_batch_size(built, config.data.batch_size)
    plannable = plannable_model(config, built, model, ranks)
    rate = config.emulation.samples_per_second
    if rate is None and not tells_rates(cluster, ranks, config.model.name):
        rate = _assumed_rate(plannable.costs, ranks, config.data.batch_size)
        print(
            f"nothing says how fast the cluster is: {rate:g} samples/s are assumed, which this machine can imitate; a"
            f" job measures anew what it can, unless it gets --emulation.samples_per_second {rate:g}, too"
        )
    times = emulated_times(cluster, ranks, config.model.name, rate, math.inf)
    evaluator = Evaluator(plannable.cut.graph, plannable.costs, cluster, times, plannable.training)
    return Prepared(plannable, evaluator, rate)


def _assumed_rate(costs: Sequence[BlockCost], ranks: int, batch_size: int) -> float:
    """As a job does it that emulates the cluster, but by what was measured of blocks."""
    sample = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    step = sum(cost.fixed_forward_seconds + cost.fixed_backward_seconds + cost.update_seconds for cost in costs)
    return float(f"{affordable_rate(sample + ranks * step / batch_size, batch_size):.3g}")


def planned_cluster(config: Config) -> Cluster:
    """That is emulated. UserError where there is none, or where nobody can plan for it."""
    if config.emulation.profile is None:
        raise UserError(
            "plan needs a cluster: name its profile by --emulate, or start hetsync plan under mpirun, a rank for each"
            " device"
        )
    cluster = load_cluster(config.emulation.profile)
    check_link(cluster)
    return cluster


def _tell_uncut(model: PlannableModel) -> None:
    name = model.identity.name
    if model.cut.traced is None:
        announce(f"{name} is one block, which no plan can cut: {'; '.join(model.cut.opaque.values())}")


def _check_loss(model: PlannableModel) -> None:
    if model.weight_in_loss is not None and model.cut.traced is not None:
        raise UserError(
            f"the loss computes with {model.weight_in_loss} itself, which another rank may hold in plans that cut the"
            " model: let the model's forward return what the loss needs, or plan with --search data"
        )


def _groups(request: Request, ranks: int) -> int:
    """Never fewer than a replica's ranks, each of which may need one. UserError where the request says so."""
    least = max(map(len, request.replicas)) if request.replicas else ranks
    if request.groups is None:
        return max(MOST_GROUPS, least)
    if request.groups < least:
        raise UserError(
            f"--groups is {request.groups}, but a replica may have {least} ranks, and each needs one: give at least"
            f" {least}"
        )
    return request.groups


def _check_size(request: Request, devices: int, batch_size: int) -> None:
    if request.ranks is not None and request.ranks > devices:
        raise UserError(f"--ranks is {request.ranks}, but the cluster has {devices} devices: give at most {devices}")
    if request.micro_batches is not None and request.micro_batches > MOST_MICRO_BATCHES_GIVEN:
        most = MOST_MICRO_BATCHES_GIVEN
        raise UserError(f"--micro-batches is {request.micro_batches}: give at most {most}, as more hide no more")
    replicas = len(request.replicas or (0,))
    if (request.micro_batches or 1) * replicas > batch_size:
        raise UserError(
            f"--micro-batches is {request.micro_batches or 1}, but a batch of {batch_size} has no sample for each, of"
            f" {replicas} replicas: give fewer, or a larger data.batch_size"
        )


def _check_replicas(replicas: tuple[tuple[int, ...], ...], ranks: int) -> None:
    for rank, count in Counter(rank for one in replicas for rank in one).items():
        if count > 1:
            raise UserError(f"--replicas has rank {rank} {count} times: leave it in one place")
        if not 0 <= rank < ranks:
            raise UserError(f"--replicas has rank {rank}, but there are {ranks}: give 0 to {ranks - 1}, or --ranks")
    named = {rank for one in replicas for rank in one}
    if missing := sorted(set(range(ranks)) - named):
        raise UserError(f"--replicas lacks rank {missing[0]} of {ranks}: add it, or give --ranks {len(named)}")
