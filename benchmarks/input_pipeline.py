"""Samples/s of the input pipeline alone, against what the fastest device of studies/convergence.py takes.

    python -m benchmarks.input_pipeline --data DIR [--repetitions 5]

The pipeline is the trainer's own: seeded order, one loader thread, whole batches, on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import yaml

from benchmarks.common.local_job import RECIPES
from benchmarks.studies.convergence import CLUSTER, RANKS, WORKLOADS, Workload
from hetsync.data import build
from hetsync.data.ledger import split
from hetsync.data.loader import Loader, Source
from hetsync.emulation.cluster import load_cluster
from hetsync.sync.messages import Task

BATCH = 64
SAMPLES = 6_400


def loader_rate(loader: Loader, first: int) -> float:
    """Samples/s over one task of many slices."""
    task = Task(first, split(((first, first + SAMPLES),), SAMPLES, SAMPLES // BATCH), 0, first, 0)
    began = time.perf_counter()
    loader.prefetch(task)
    for _ in loader.slices(task):
        pass
    return SAMPLES / (time.perf_counter() - began)


def fastest_rate(workload: Workload) -> float:
    """Samples/s of the fastest emulated device."""
    cluster = load_cluster(CLUSTER)
    speeds = [cluster.device_of(rank).speed for rank in range(RANKS)]
    return workload.rate * max(speeds) / sum(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets' folders")
    parser.add_argument("--repetitions", type=int, default=5, help="the first is not counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| recipe | samples/s of one loader thread: median (range) | fastest emulated device | factor |")
    print("| --- | --- | --- | --- |")
    for workload in WORKLOADS:
        recipe = yaml.safe_load((RECIPES / f"{workload.recipe}.yaml").read_text())["data"]
        path = {} if workload.folder is None else {"path": str(options.data / workload.folder)}
        data = build(recipe["name"], {**recipe.get("options", {}), **path})
        loader = Loader(Source(data.train, data.collate, data.costs), 0, torch.device("cpu"))
        rates = [loader_rate(loader, SAMPLES * turn) for turn in range(options.repetitions + 1)][1:]
        loader.close()
        middle, needed = statistics.median(rates), fastest_rate(workload)
        spread = f"{middle:,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"
        print(f"| {workload.recipe} | {spread} | {needed:,.0f} | {middle / needed:,.0f} |")


if __name__ == "__main__":
    main()
