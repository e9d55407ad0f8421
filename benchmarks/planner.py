"""Searches for plans against each other: the same models, clusters and evaluations, several seeds.

    python -m benchmarks.planner --output results [--quick] [--full] [--processes 2] [--seeds 10] [--evaluations 1000]

In two forms: `one replica` places the model once, on all devices, as the papers do; in `free` searches may also make
replicas, and only those run that do. Blocks are measured once, on random samples, and kept under `--output`: every
search of a model sees the same costs. So objectives and evaluations are the same on any machine and under any load;
seconds are not.

What was searched is kept in searches.jsonl, seed by seed: a run that is ended and begun again goes on there, and one
that was cut short has all models and clusters for fewer seeds. Searches that draw nothing run once. Searches whose
proposals do not depend on weights run once for all weights.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.kept import require_same
from benchmarks.common.planning import CLUSTERS, WORKLOADS, problems
from benchmarks.common.report import command, machine, source
from benchmarks.planner_tables import markdown, verdicts
from hetsync.errors import UserError
from hetsync.files import write_atomically
from hetsync.plan.evaluate import Costs
from hetsync.plan.placement import Placement
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.objective import Weights, figures_of, objective
from hetsync.plan.search.policy_file import SHIPPED, load_policy
from hetsync.plan.search.registry import BEST, SEARCHES
from hetsync.plan.search.reinforce import PolicyGradient
from hetsync.plan.search.search import Problem

WEIGHTS = {"time": Weights(), "thirds": Weights(1 / 3, 1 / 3, 1 / 3)}
PRETRAINED = {  # searches that begin with the policy that ships
    "trinity-pretrained": "trinity",
    "trinity-nothing-pretrained": "trinity-nothing",
}
FORMS = {
    "one replica": (*(name for name in SEARCHES if name != "data"), *PRETRAINED, BEST),
    "free": ("data", "exact", "local", BEST),
}
DRAW_NOTHING = {"contiguous", "data", "exact", "list", "mincut", "single"}
WEIGH_NOTHING = DRAW_NOTHING | {"random", "hierarchical", "tapp"}
MODELS = ("inception_v3", "nmt", "nasnet", "pnasnet", "deeptte", "chain")
FULL_WIDTH = 512  # of the placer, as in the paper


class Cell(NamedTuple):
    """What is searched in one go, by these searches."""

    form: str
    model: str
    cluster: str
    seed: int
    problem: Problem
    arms: tuple[str, ...]


class Recorder(Driver):
    """Keeps what each evaluation cost."""

    def __init__(self, *words: Any, **named: Any) -> None:
        self.heard: list[Costs] = []
        super().__init__(*words, **named)

    def _evaluate(self, placement: Placement) -> Costs:
        self.heard.append(super()._evaluate(placement))
        return self.heard[-1]


def searched(
    problem: Problem, arm: str, seed: int, evaluations: int, weighed: Sequence[str] = tuple(WEIGHTS)
) -> Iterator[dict[str, Any]]:
    """A record of each of the weights. `course`: the best objective, whenever it became better, by evaluations."""
    policy = load_policy(SHIPPED) if arm in PRETRAINED else None
    for weights in ["time"] if arm in WEIGH_NOTHING else weighed:
        driver = Recorder(problem, WEIGHTS[weights], Budget(evaluations), seed, policy=policy)
        try:
            driver.run(PRETRAINED.get(arm, arm))
        except UserError as mistake:
            yield from ({"weights": weights, "missing": str(mistake)} for weights in weighed)
            return
        seconds = driver.seconds
        yield from (_record(driver, one, seconds) for one in (weighed if arm in WEIGH_NOTHING else [weights]))


def _record(driver: Recorder, weights: str, seconds: float) -> dict[str, Any]:
    evaluator = driver.problem.evaluator
    weighed = objective(WEIGHTS[weights], driver.reference_costs, evaluator)
    course: list[tuple[int, float]] = []
    best: Costs | None = None
    for number, costs in enumerate(driver.heard[1:], 2):  # the first is the reference's
        if costs.feasible and (not course or weighed.of(costs) < course[-1][1]):
            course.append((number, weighed.of(costs)))
            best = costs
    told = {"weights": weights, "evaluations": driver.evaluations, "seconds": seconds}
    if best is None:
        return {**told, "missing": f"nothing fits, of {driver.evaluations} plans"}
    figures = figures_of(best, evaluator)._asdict()
    return {**told, "objective": course[-1][1], **figures, "replicas": len(best.shares), "course": course}


def search_cell(cell: Cell, evaluations: int, weighed: Sequence[str], width: int | None) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    if width is not None:
        PolicyGradient.width = width
    told = {"form": cell.form, "model": cell.model, "cluster": cell.cluster, "seed": cell.seed}
    told["blocks"] = len(cell.problem.evaluator.graph.blocks)
    return [
        {**told, "arm": arm, **record}
        for arm in cell.arms
        for record in searched(cell.problem, arm, cell.seed, evaluations, weighed)
    ]


def cells_of(options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[Cell]:
    """Those that are not done; seed after seed."""
    found = {
        form: problems(options.models, options.clusters, options.profile_seconds, form == "one replica")
        for form in options.forms
    }
    for seed in range(options.seeds):
        for form, by_name in found.items():
            for (model, cluster), problem in by_name.items():
                arms = tuple(
                    arm
                    for arm in FORMS[form]
                    if arm in options.arms
                    and (seed == 0 or arm not in DRAW_NOTHING)
                    and (form, model, cluster, seed, arm) not in done
                )
                if arms:
                    yield Cell(form, model, cluster, seed, problem, arms)


def run(options: argparse.Namespace, records: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Records of one cell after the other that is not among these."""
    done = {tuple(record[key] for key in ("form", "model", "cluster", "seed", "arm")) for record in records}
    cells = cells_of(options, done)
    width = FULL_WIDTH if options.full else None
    search = partial(search_cell, evaluations=options.evaluations, weighed=options.weights, width=width)
    if options.processes == 1:
        yield from map(search, cells)
        return
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        yield from pool.map(search, cells)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for records, JSON and Markdown")
    parser.add_argument("--quick", action="store_true", help="one small model and cluster, 100 evaluations, two seeds")
    parser.add_argument("--full", action="store_true", help=f"placers of {FULL_WIDTH}, as in the paper")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(MODELS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    known = [*SEARCHES, *PRETRAINED, BEST]
    parser.add_argument("--arms", nargs="+", choices=known, metavar="ARM", default=known, help=", ".join(known))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1, help="that search side by side, one thread each")
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for a model's blocks, about")
    options = parser.parse_args(words)
    if options.quick:
        options.models, options.clusters = ["digits"], ["two-hosts"]
        options.seeds, options.evaluations, options.profile_seconds = 2, 100, 0.05
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    options.output.mkdir(parents=True, exist_ok=True)
    names = ("weights", "full", "evaluations", "profile_seconds")
    require_same(options.output, {name: getattr(options, name) for name in names})
    os.environ["XDG_CACHE_HOME"] = str((options.output / "costs").resolve())
    kept = options.output / "searches.jsonl"
    records = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    try:
        for found in run(options, records):
            records += found
            with kept.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in found)
            print(
                f"seed {found[0]['seed']}, {found[0]['form']}: {found[0]['model']} on {found[0]['cluster']}", flush=True
            )
    finally:
        write(options.output, records)


def write(output: Path, records: Sequence[dict[str, Any]]) -> None:
    """JSON and Markdown of what has been searched so far; in the end, as verdicts take a second."""
    told = {"command": command("planner"), "machine": machine(), "searches": records}
    write_atomically(output / "planner.json", json.dumps(told) + "\n")
    parts = [source("planner"), "\n".join(verdicts(records)), markdown(records)]
    write_atomically(output / "planner.md", "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
