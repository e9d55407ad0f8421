"""What `hetsync plan` does under a launcher: plans for the ranks that are there, and tries the best ones on them."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from hetsync import data
from hetsync.cli.planning import (
    Prepared,
    Request,
    Terms,
    check_request,
    for_jobs,
    plan_file_of,
    planned_cluster,
    prepared,
    search,
    tell,
    terms_of,
)
from hetsync.config.schema import Config
from hetsync.console import plain_console
from hetsync.errors import UserError, announce
from hetsync.files import check_writable
from hetsync.plan.assignment import given_plan
from hetsync.plan.evaluate import Evaluator
from hetsync.plan.plan_file import PlanFile, write_plan
from hetsync.plan.recipe import PlannableModel, plannable_model
from hetsync.plan.search.driver import Driver
from hetsync.plan.search.objective import figures_of
from hetsync.plane.base import Plane, decided_by_first
from hetsync.profiling.report import profile_cluster
from hetsync.stop_signal import Interrupts, handled
from hetsync.train.rehearsal import rehearse
from hetsync.train.workplace import Workplace, take_place

MEASURED_STEPS = 10  # of each plan, after one that warms up
PROFILE_SECONDS = 2.0  # at most, for how fast ranks are: each plan's job finds it out anew


class _Searched(NamedTuple):
    """`rate`: samples/s that the cluster was taken to have, as `Prepared` has it."""

    driver: Driver
    model: PlannableModel
    interrupted: bool
    rate: float | None


def plan_on_ranks(plane: Plane, config: Config, request: Request, output: Path | None, measure: bool) -> int:
    """Collective: rank 0 searches; with `measure` all run the best plans, and the fastest is taken. The exit status.

    Who asks it to end asks rank 0, for whose word the others wait.
    """
    interrupts = Interrupts(raises=plane.leads)
    with handled(interrupts.hear):
        found, plans = _found(plane, config, request, output, measure, interrupts)
        if found and plans and output is not None:
            print(f"wrote {output}, the best by prediction; now the {len(plans)} best are run")
        if config.emulation.profile is not None:  # plans are run at the speed that they were found for
            rate = plane.broadcast_object(found.rate if found else None)
            config = replace(config, emulation=replace(config.emulation, samples_per_second=rate))
        interrupts.raises = plane.leads  # what was found is written, and the rest can only be broken off
        rehearsed = _rehearsed(plane, config, plans) if plans else []
        interrupts.raises = False
        if found is None:
            return 0
        place = _chosen(found.driver, rehearsed) if plans else None
        interrupted = found.interrupted or interrupts.heard
        return tell(config, request, found.driver, found.model, output, interrupted, place)


def _found(
    plane: Plane, config: Config, request: Request, output: Path | None, measure: bool, interrupts: Interrupts
) -> tuple[_Searched | None, list[PlanFile]]:
    """Collective: what rank 0 has searched, there, and the plans that are to be run. The best is written at once:
    whatever fails later, searching took long."""
    terms: list[Terms] = []  # rank 0's, as is what is found
    found: list[_Searched] = []
    runs, deadline = output is not None or measure, time.monotonic() + config.run.timeout_seconds

    def checked() -> Request:
        if output is not None:
            check_writable(output)
        terms.append(terms_of(request))
        return _checked(plane.size, config, request, measure, runs)

    request = decided_by_first(plane, checked)
    here = _ranks_here(plane, config) if config.emulation.profile is None else None

    def searched() -> list[PlanFile]:
        """What is to be run; nothing once it was interrupted."""
        model, evaluator, rate = here or _emulated(plane.size if measure else request.ranks, config)
        driver, interrupted = search(request, terms[0], model, evaluator, runs, deadline)
        interrupts.raises = False
        found.append(_Searched(driver, model, interrupted, rate))
        best = plan_file_of(config, driver, model, driver.found())  # says why, where nothing fits
        if output is not None:
            write_plan(best, output)
        places = range(len(driver.leaders) if measure and not interrupted else 0)
        return [plan_file_of(config, driver, model, driver.found(place)) for place in places]

    plans = decided_by_first(plane, searched)
    return (found[0] if found else None), plans


def _checked(ranks: int, config: Config, request: Request, measure: bool, runs: bool) -> Request:
    profile = config.emulation.profile
    if runs:
        request = for_jobs(config, request)
    devices = ranks if profile is None else planned_cluster(config).size
    here = profile is None or measure
    if here and request.ranks not in (None, ranks):
        raise UserError(f"--ranks is {request.ranks}, but the job has {ranks}: leave it out, or start as many")
    if ranks > devices:
        raise UserError(f"the job has {ranks} ranks, but the cluster {devices} devices: start at most {devices}")
    longest = config.run.timeout_seconds
    if request.seconds is not None and request.seconds >= longest:
        raise UserError(
            f"--seconds is {request.seconds:g}, but other ranks wait for rank 0 no longer than run.timeout_seconds,"
            f" {longest:g}: give fewer, or raise that"
        )
    check_request(request, devices, ranks if here else request.ranks or devices, config.data.batch_size)
    return replace(request, seconds=longest / 2) if request.seconds is None else request


def _emulated(ranks: int | None, config: Config) -> Prepared:
    cluster = planned_cluster(config)
    return prepared(config, cluster, ranks or cluster.size)


def _ranks_here(plane: Plane, config: Config) -> Prepared:
    """Collective: the job's own ranks and links, as `hetsync profile` measures them."""
    if plane.rank == 0:
        announce(f"measuring {plane.size} ranks and what connects them")
    found = profile_cluster(plane, config)
    built = data.build(config.data.name, config.data.options)
    model = plannable_model(config, built, found.model, plane.size, plane)
    evaluator = Evaluator(model.cut.graph, model.costs, found.cluster, found.times, model.training)
    return Prepared(model, evaluator, None)


# Running the best.


def _rehearsed(plane: Plane, config: Config, plans: list[PlanFile]) -> list[float]:
    """Collective: of each plan the seconds of a step."""
    seconds = min(config.run.profile_seconds, PROFILE_SECONDS)
    config = replace(config, run=replace(config.run, profile_seconds=seconds))
    with tempfile.TemporaryDirectory() as folder:
        at = take_place(config, plane, Path(folder), None)
        return [_rehearse(at, plan) for plan in plans]


def _rehearse(at: Workplace, plan: PlanFile) -> float:
    assert at.folder is not None
    path = at.folder / "plan.yaml"
    if at.plane.rank == 0:
        write_plan(plan, path)
    given = given_plan(path, at.plane)
    seconds: float = at.plane.broadcast_object(rehearse(given, at, MEASURED_STEPS))
    return seconds


def _chosen(driver: Driver, rehearsed: list[float]) -> int:
    """The place of the plan with the least objective by measured time; says what was measured."""
    table = Table("place", "search", "s a step", "measured", "objective by that", box=None, pad_edge=False)
    by_place: dict[int, float] = {}
    for place, (seconds, (method, one)) in enumerate(zip(rehearsed, driver.leaders, strict=True)):
        figures = figures_of(one.costs, driver.problem.evaluator)
        per_sample = seconds / driver.problem.evaluator.training.batch_size
        by_place[place] = driver.objective.weighted(figures._replace(seconds_per_sample=per_sample))
        shown = [f"{figure:.4g}" for figure in (one.costs.step_seconds, seconds, by_place[place])]
        table.add_row(str(place + 1), method, *shown)
    plain_console(soft_wrap=True).print(table)
    return min(by_place, key=lambda place: by_place[place])
