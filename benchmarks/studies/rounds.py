"""What fewer and staler rounds cost a job: time to a target and final quality by D, q, K and grace; real gradients.

    python -m benchmarks.studies.rounds --output results [--processes 2]

Real gradients on the simulator's clock (`hetsync.simulate.replicas`), where rounds take no device's time: so what an
arm loses here, it loses by merging later, and that is what fewer rounds must save (`hetsync/sync/rounds_rule.py`).
Ratios are to the first arm of the same workload, cluster and seed. Results are kept in the output folder and not
repeated.

A second table has no gradients: efficiency on the first of these clusters where a round's sum, or its work on every
device, takes parts of a slice; there the rule for K is at work. A third has both: gradients behind a link whose sums
take several slices, at a low and at a high learning rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.common.kept import results_of
from benchmarks.common.local_job import RECIPES
from benchmarks.common.report import grouped, source, spread, until_target
from hetsync.config.parser import read_recipe
from hetsync.config.schema import Config, DataConfig, EmulationConfig, RunConfig, SyncConfig
from hetsync.emulation.cluster import Link, load_cluster
from hetsync.errors import UserError
from hetsync.files import write_atomically
from hetsync.simulate.recipe import build, scenario_of
from hetsync.simulate.replicas import ReplicaLearner
from hetsync.simulate.simulation import Simulation

CLUSTERS = ("v100-p100-k80", "heavy-jitter")
Arm = tuple[int, float, int | Literal["auto"], int]  # D, q, K, grace
ARMS: tuple[Arm, ...] = (
    (4, 0.25, 1, 0),
    (4, 0.25, 1, 1),
    (4, 0.5, 1, 0),
    (4, 0.5, 1, 1),
    (4, 0.75, 1, 0),
    (8, 0.25, 1, 0),
    (16, 0.25, 1, 0),
    (16, 0.5, 1, 0),
    (16, 0.75, 1, 0),
    (16, 0.5, 2, 0),
)
KEYS = ("delay_bound", "quorum", "accumulation", "grace")
LINKS = (3.0, 6.0, 12.0)  # slices that a round's sum takes
LINKED_ARMS: tuple[Arm, ...] = (
    (4, 0.25, 1, 0),
    (4, 0.5, 1, 0),
    (4, 0.25, "auto", 0),
    (8, 0.5, 1, 0),
    (16, 0.5, 1, 0),
    (16, 0.5, "auto", 0),
)


@dataclass(frozen=True)
class Workload:
    """A recipe, and what the study changes in it. `target` is of `metric`, which falls."""

    recipe: str
    schedule: str
    learning_rate: float
    batch: int
    samples: int
    samples_per_second: float
    metric: str
    target: float
    seeds: tuple[int, ...]


WORKLOADS = {
    "digits, constant": Workload("digits", "constant", 0.125, 160, 14_400, 800.0, "loss", 0.15, (3, 4, 5, 6, 7)),
    "digits, cosine": Workload("digits", "cosine", 0.25, 160, 14_400, 800.0, "loss", 0.15, (3, 4, 5, 6, 7)),
    "digits, low rate": Workload("digits", "constant", 0.05, 160, 28_800, 800.0, "loss", 0.15, (3, 4, 5)),
    "DeepTTE": Workload("deeptte_synthetic_city", "cosine", 0.0042, 128, 8_960, 640.0, "mape", 17.0, (0, 1, 2)),
}


@dataclass(frozen=True)
class Cell:
    workload: str
    cluster: str
    delay_bound: int
    quorum: float
    accumulation: int | Literal["auto"]
    grace: int
    seed: int
    link: float = 0.0


def cells() -> Iterator[Cell]:
    for name, workload in WORKLOADS.items():
        for seed in workload.seeds:
            if name != "digits, low rate":
                yield from (Cell(name, cluster, *arm, seed) for cluster in CLUSTERS for arm in ARMS)
            if name in ("digits, constant", "digits, low rate"):
                yield from (Cell(name, CLUSTERS[0], *arm, seed, link) for link in LINKS for arm in LINKED_ARMS)


def found_of(cell: Any, keys: Sequence[str]) -> dict[str, Any]:
    """One job: its cell, of which these are keys of `sync`, its evaluations and rounds."""
    told = asdict(cell)
    return {**told, **job(cell.workload, cell.cluster, cell.seed, cell.link, **{key: told[key] for key in keys})}


def job(name: str, cluster_name: str, seed: int, link: float, **sync: Any) -> dict[str, Any]:
    """Of the workload of this name, with other keys of `sync`; `link`: slices that a sum of all weights takes."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    read = read_recipe(RECIPES / f"{workload.recipe}.yaml")
    every = workload.samples // (20 if workload.recipe == "digits" else 10)
    config = replace(
        read,
        run=replace(read.run, seed=seed, samples=workload.samples, evaluate_every=every),
        data=replace(read.data, batch_size=workload.batch),
        optimizer=replace(read.optimizer, learning_rate=workload.learning_rate),
        schedule=replace(read.schedule, name=workload.schedule),
        sync=replace(read.sync, wire="float32", **sync),
        emulation=EmulationConfig(cluster_name, workload.samples_per_second),
    )
    built, model = build(config)
    cluster = load_cluster(cluster_name)
    if link:
        cluster = replace(cluster, link=Link(compute_fraction=link))
    scenario = scenario_of(config, cluster, None, built, model)
    learner = ReplicaLearner(config, built, model, len(scenario.ranks), scenario.total_samples)
    points: list[dict[str, float]] = []

    def on_evaluation(applied: int, seconds: float, metrics: dict[str, float]) -> None:
        points.append({"samples": applied, "seconds": seconds, **metrics})

    simulation = Simulation(scenario, learner, on_evaluation=on_evaluation)
    ended = None
    try:
        simulation.advance()
    except UserError as error:  # it diverges
        ended = str(error)
    return {"points": points, "rounds": simulation.machine.version, "ended": ended}


# Efficiency where rounds are dear.

float32 = partial(SyncConfig, wire="float32")
SETTINGS = {
    "D = 4, q = 0.25, K = 1": float32(4, 0.25, 1, 0),
    "D = 4, q = 0.5, K = 1": float32(4, 0.5, 1, 0),
    "D = 4, q = 0.5, K = 1, grace 1": float32(4, 0.5, 1, 1),
    "D = 4, K = 1, the rest by rule": float32(4),
    "D = 16, q = 0.5, K = 1": float32(16, 0.5, 1, 0),
    "D = 16, q = 0.5, K = auto": float32(16, 0.5, "auto", 0),
    "the same, bfloat16": float32(16, 0.5, "auto", 0, wire="bfloat16"),
}
COSTS = {  # of a round, in slices: (its sum, its work on each device)
    "free": (0.0, 0.0),
    "work of 0.05": (0.0, 0.05),
    "work of 0.25": (0.0, 0.25),
    "work of 0.5": (0.0, 0.5),
    "link of 0.5": (0.5, 0.0),
    "link of 3": (3.0, 0.0),
    "link of 12": (12.0, 0.0),
    "link of 40": (40.0, 0.0),
}
BATCHES = 400


def dear_rounds() -> Iterator[str]:
    """Rows: efficiency, rounds a batch, and what the rule has found."""
    batch, rate = 160, 800.0
    config = Config(run=RunConfig(samples=BATCHES * batch), data=DataConfig(batch_size=batch))
    built, model = build(config)
    for title, (link, work) in COSTS.items():
        cluster = load_cluster(CLUSTERS[0])
        if link:
            cluster = replace(cluster, link=Link(compute_fraction=link))
        for name, sync in SETTINGS.items():
            asked = replace(config, sync=sync, emulation=EmulationConfig(CLUSTERS[0], rate))
            scenario = scenario_of(asked, cluster, None, built, model)
            runtime = replace(scenario.runtime, round_seconds=work * batch / rate)
            simulation = Simulation(replace(scenario, runtime=runtime))
            simulation.advance()
            efficiency = BATCHES * batch / simulation.now / simulation.solo_samples_per_second
            rounds = simulation.machine.version / BATCHES
            found = "; ".join(
                f"round {c.round}: q = {c.quorum:g}, K = {c.accumulation}, grace {c.grace}"
                for c in simulation.rounds_changes
            )
            yield f"| {title} | {name} | {efficiency:.3f} | {rounds:.2f} | {found or '–'} |"


# Figures.


def seconds_to_target(result: Mapping[str, Any]) -> float | None:
    workload = WORKLOADS[result["workload"]]
    return until_target(result["points"], workload.metric, workload.target, falling=True)


def ratio(result: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    ours, theirs = seconds_to_target(result), seconds_to_target(base)
    return ours / theirs if ours is not None and theirs is not None else None


def by_arm(
    results: Sequence[Mapping[str, Any]], keys: Sequence[str], base: tuple[Any, ...]
) -> dict[tuple[Any, ...], tuple[list[Mapping[str, Any]], list[float | None]]]:
    """Of each arm its jobs, and their times to the target by those of `base` with the same seed."""
    arms = grouped(results, *keys)
    first = {one["seed"]: one for one in arms.get(base, ())}
    return {
        arm: (mine, [ratio(one, first[one["seed"]]) for one in mine if one["seed"] in first])
        for arm, mine in arms.items()
    }


def behind_links(results: Iterable[Mapping[str, Any]]) -> str:
    lines = [
        "| workload | link, slices | D, q, K, grace | time to target, of the first | seconds in all | at the end |"
    ]
    lines += ["| --- " * 6 + "|"]
    for (name, link), jobs in grouped(results, "workload", "link").items():
        workload = WORKLOADS[name]
        for arm, (mine, ratios) in by_arm(jobs, KEYS, LINKED_ARMS[0]).items():
            whole = [one["points"][-1] for one in mine if one["ended"] is None]
            diverged = f", {len(mine) - len(whole)} of {len(mine)} end in nan" if len(whole) < len(mine) else ""
            ends = spread([point[workload.metric] for point in whole], ".3f")
            seconds = spread([point["seconds"] for point in whole], ".0f")
            settings, reached = ", ".join(map(str, arm)), spread(ratios, ".2f")
            lines.append(f"| {name} | {link:g} | {settings} | {reached} | {seconds} | {ends}{diverged} |")
    return "\n".join(lines) + "\n"


def markdown(results: Iterable[Mapping[str, Any]]) -> str:
    lines = ["| workload | cluster | D, q, K, grace | rounds a batch | time to target, of the first | at the end |"]
    lines += ["| --- " * 6 + "|"]
    for (name, cluster), jobs in grouped(results, "workload", "cluster").items():
        workload = WORKLOADS[name]
        for arm, (mine, ratios) in by_arm(jobs, KEYS, ARMS[0]).items():
            rounds = statistics.mean(one["rounds"] * workload.batch / workload.samples for one in mine)
            ends = [one["points"][-1][workload.metric] for one in mine]
            figures = f"{rounds:.2f} | {spread(ratios, '.2f')} | {workload.metric} {spread(ends, '.3f')}"
            lines.append(f"| {name} | {cluster} | {', '.join(map(str, arm))} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="jobs at once")
    options = parser.parse_args()
    results = results_of(options.output, "rounds", cells(), partial(found_of, keys=KEYS), options.processes)
    dear = ["| a round | settings | efficiency | rounds a batch | the rule |", "| --- " * 5 + "|", *dear_rounds()]
    free = markdown(one for one in results if not one["link"])
    linked = behind_links(one for one in results if one["link"])
    text = "\n".join([source("studies.rounds"), "", free, *dear, "", linked])
    write_atomically(options.output / "rounds.md", text)
    print(text)


if __name__ == "__main__":
    main()
