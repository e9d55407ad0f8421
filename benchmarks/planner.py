"""Searches for plans against each other: the same models, clusters and evaluations, several seeds.

    python -m benchmarks.planner --output results [--quick] [--seeds 10] [--evaluations 1000] [--arms NAME ...]

Blocks are measured once, on random samples, and kept under `--output`: every search of a model sees the same costs, and
so does a run that begins there again. Objectives and evaluations are then the same on any machine; seconds are not.
Searches that draw nothing run once. `to 5 %` is the evaluation at which a search was within 5 % of the best objective
that any of them reached; where some of its runs never were, it says how many were.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from benchmarks.common.report import Record, command, grouped, machine, source, spread
from hetsync.balance.profile import StepTime
from hetsync.config.parser import recipe_of
from hetsync.data import Data
from hetsync.data.sets.multi30k import multi30k
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, PairLink
from hetsync.errors import UserError
from hetsync.files import write_atomically
from hetsync.plan.evaluate import Evaluator
from hetsync.plan.recipe import plannable_model
from hetsync.plan.search.driver import Budget, Driver
from hetsync.plan.search.objective import Weights, figures_of
from hetsync.plan.search.registry import BEST, SEARCHES
from hetsync.plan.search.search import Problem, micro_batch_numbers
from hetsync.simulate.recipe import build

DRAW_NOTHING = {"contiguous", "data", "exact", "list", "mincut", "single"}
WEIGHTS = {"time": Weights(), "thirds": Weights(1 / 3, 1 / 3, 1 / 3)}
NEAR = 1.05
BATCH = 128
ETHERNET = Link(5e-5, 1.25e9)  # of 10 Gbit/s


class Workload(NamedTuple):
    model: str
    options: dict[str, Any]
    data: str
    data_options: dict[str, Any]


def random_images(size: int = 32) -> Data:
    """Of three channels and ten classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2 * BATCH, 3, size, size, generator=generator)
    labels = torch.randint(10, (2 * BATCH,), generator=generator)
    both = TensorDataset(images, labels)
    return Data(both, both, model_options={"classes": 10})


def random_text(words: int = 2000) -> Data:
    """Pairs of sentences of 4 to 24 words."""
    generator = torch.Generator().manual_seed(0)

    def sentence() -> str:
        length = int(torch.randint(4, 25, (), generator=generator))
        return " ".join(f"w{word}" for word in torch.randint(words, (length,), generator=generator).tolist())

    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test_2016_flickr"):
            for language in ("en", "de"):
                lines = [sentence() for _ in range(2 * BATCH)]
                (Path(folder) / f"{split}.lc.norm.tok.{language}").write_text("\n".join(lines) + "\n")
        return multi30k(folder, vocabulary=words)


CIFAR_CELLS = {"cells": 2, "filters": 16, "auxiliary": False, "drop_path": 0.0}
IMAGES = "benchmarks.planner:random_images"
WORKLOADS = {
    "inception_v3": Workload("inception_v3", {"width": 0.25, "image_size": 75}, IMAGES, {"size": 75}),
    "nmt": Workload("nmt", {"layers": 2, "hidden": 128}, "benchmarks.planner:random_text", {}),
    "nasnet": Workload("nasnet_a_cifar", CIFAR_CELLS, IMAGES, {}),
    "pnasnet": Workload("pnasnet5_cifar", CIFAR_CELLS, IMAGES, {}),
    "deeptte": Workload("deeptte", {"hidden_size": 64}, "synthetic_city", {"trips": 400, "drivers": 10}),
    "digits": Workload("digits_cnn", {}, "digits", {}),
}
FULL_SIZE = ("inception_v3", "nmt", "nasnet", "pnasnet", "deeptte")
CLUSTERS = {
    "v100-p100-k80": Cluster(
        "v100-p100-k80",
        "devices of the profile of this name; 10 Gbit/s",
        (
            DeviceGroup("V100", 2, 7.10, memory_gib=16),
            DeviceGroup("P100", 2, 4.23, memory_gib=16),
            DeviceGroup("K80", 4, 1.00, memory_gib=12),
        ),
        ETHERNET,
    ),
    "t4-v100-a100": Cluster(
        "t4-v100-a100",
        "devices of the profile of this name; 10 Gbit/s",
        (
            DeviceGroup("T4", 4, 1.00, memory_gib=16),
            DeviceGroup("V100", 2, 2.45, memory_gib=32),
            DeviceGroup("A100", 2, 3.13, memory_gib=40),
        ),
        ETHERNET,
    ),
    "two-hosts": Cluster(
        "two-hosts",
        "made up: NVLink-like within, 1 Gbit/s between",
        (
            DeviceGroup("V100", 2, 2.45, memory_gib=32, host="one"),
            DeviceGroup("T4", 2, 1.00, memory_gib=16, host="two"),
        ),
        Link(1e-5, 1e10),
        links=(PairLink(("one", "two"), 1e-3, 1.25e8),),
    ),
}


SLOWEST = 20.0  # samples a second of the slowest device
FIXED_SECONDS = 2e-3  # of each micro-batch on any device, so that many small ones are not free


def problem_of(name: str, cluster: Cluster, profile_seconds: float) -> Problem:
    """On all devices of the cluster."""
    workload = WORKLOADS[name]
    config = recipe_of(
        {
            "run": {"profile_seconds": profile_seconds},
            "model": {"name": workload.model, "options": workload.options},
            "data": {"name": workload.data, "batch_size": BATCH, "options": workload.data_options},
        }
    )
    torch.set_num_threads(1)
    built, model = build(config)
    plannable = plannable_model(config, built, model, cluster.size)
    slowest = min(group.speed for group in cluster.devices)
    speeds = [cluster.device_of(rank).speed / slowest for rank in range(cluster.size)]
    times = [StepTime(FIXED_SECONDS, 1 / (SLOWEST * speed)) for speed in speeds]
    evaluator = Evaluator(plannable.cut.graph, plannable.costs, cluster, times, plannable.training)
    return Problem(evaluator, micro_batch_numbers(None, BATCH, 1))


def searched(problem: Problem, arm: str, weights: str, seed: int, evaluations: int) -> dict[str, Any]:
    """A record of one search. `course`: the best objective, whenever it became better, by evaluations."""
    course: list[tuple[int, float]] = []

    def watch(driver: Driver) -> None:
        best = driver.fitting
        if best is not None and (not course or best.objective < course[-1][1]):
            course.append((driver.evaluations, best.objective))

    told = {"arm": arm, "weights": weights, "seed": seed}
    try:
        driver = Driver(problem, WEIGHTS[weights], Budget(evaluations), seed, watch)
        driver.run(arm)
        found = driver.found()
    except UserError as mistake:
        return {**told, "missing": str(mistake)}
    figures = figures_of(found.costs, problem.evaluator)
    return {
        **told,
        "objective": found.objective,
        "bound": driver.bound,
        **figures._asdict(),
        "method": found.method,
        "replicas": len(found.placement.replicas),
        "evaluations": driver.evaluations,
        "seconds": driver.seconds,
        "course": course,
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in options.models:
        for cluster in options.clusters:
            problem = problem_of(model, CLUSTERS[cluster], options.profile_seconds)
            told = {"model": model, "cluster": cluster, "blocks": len(problem.evaluator.graph.blocks)}
            for weights in WEIGHTS:
                for seed in range(options.seeds):
                    for arm in options.arms:
                        if seed == 0 or arm not in DRAW_NOTHING:
                            yield {**told, **searched(problem, arm, weights, seed, options.evaluations)}


# Tables.


def evaluations_near(record: Record, best: float) -> int | None:
    """After how many a search was within 5 % of the best."""
    return next((number for number, objective in record["course"] if objective <= NEAR * best), None)


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table a model and cluster."""
    lines: list[str] = []
    for (model, cluster, weights), cell in grouped(records, "model", "cluster", "weights").items():
        done = [record for record in cell if "missing" not in record]
        best = min(record["objective"] for record in done)
        lines += [f"### {model}, {cluster}, weights {weights}", ""]
        lines += [f"{cell[0]['blocks']} blocks; the bound is {done[0]['bound']:.4g}.", ""]
        lines += ["| search | objective | ms a sample | kB a sample | memory | evaluations | to 5 % |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for (arm,), runs in grouped(done, "arm").items():
            figures = [
                spread([one["objective"] for one in runs], ".4g"),
                spread([1e3 * one["seconds_per_sample"] for one in runs], ".4g"),
                spread([one["bytes_per_sample"] / 1e3 for one in runs], ".4g"),
                spread([100 * one["memory_fraction"] for one in runs], ".3g") + " %",
                spread([one["evaluations"] for one in runs], ".0f"),
                spread([evaluations_near(one, best) for one in runs], ".0f"),
            ]
            lines.append(f"| {arm} | {' | '.join(figures)} |")
        lines += [f"| {one['arm']} | {one['missing']} |" + " |" * 5 for one in cell if "missing" in one] + [""]
    return "\n".join(lines)


def verdict(records: Sequence[dict[str, Any]]) -> list[str]:
    """Whether `best` was ever worse than a search."""
    lines, cells, worse = [], 0, 0
    for key, cell in grouped([one for one in records if "missing" not in one], "model", "cluster", "weights").items():
        least = min(one["objective"] for one in cell)
        ours = [one["objective"] for one in cell if one["arm"] == BEST]
        if ours:
            cells += 1
            if statistics.median(ours) > least * (1 + 1e-9):
                worse += 1
                arm = min(cell, key=lambda one: one["objective"])["arm"]
                lines.append(f"- {', '.join(key)}: best {statistics.median(ours):.4g}, {arm} {least:.4g}")
    return [f"In {worse} of {cells} cells the median of best is above the least of any search and seed.", "", *lines]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--quick", action="store_true", help="one small model and cluster, 100 evaluations, two seeds")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(FULL_SIZE))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    known = [*SEARCHES, BEST]
    parser.add_argument("--arms", nargs="+", choices=known, metavar="ARM", default=known, help=", ".join(known))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--profile-seconds", type=float, default=10.0, help="for a model's blocks, about")
    options = parser.parse_args(words)
    if options.quick:
        options.models, options.clusters = ["digits"], ["two-hosts"]
        options.seeds, options.evaluations, options.profile_seconds = 2, 100, 0.05
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    os.environ["XDG_CACHE_HOME"] = str((options.output / "costs").resolve())
    records = []
    for record in run(options):
        records.append(record)
        told = record.get("missing") or f"{record['objective']:.4g} in {record['evaluations']}"
        print(f"{record['model']} {record['cluster']} {record['weights']} {record['arm']} {record['seed']}: {told}")
    kept = {"command": command("planner"), "machine": machine(), "searches": records}
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output / "planner.json", json.dumps(kept, indent=1) + "\n")
    text = "\n\n".join([source("planner"), "\n".join(verdict(records)), markdown(records)]) + "\n"
    write_atomically(options.output / "planner.md", text)


if __name__ == "__main__":
    main()
