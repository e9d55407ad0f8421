"""Jobs by a plan on emulated clusters: what a step took beside what was predicted, and the losses."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.common.local_job import launched, summary_of, warn_of_overruns
from hetsync.emulation.cluster import Cluster, save_cluster

JOB_SECONDS = 900  # bound on one job
WARM_UP = 2  # slices


class PlannedRun(NamedTuple):
    """Seconds are of a step. `spread`: what half of the steps lie within, as a part of the median."""

    predicted: float
    measured: float
    spread: float
    losses: list[float]  # a step's
    summary: dict[str, Any]

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1

    @property
    def figures(self) -> dict[str, Any]:
        kept = {key: self.summary[key] for key in ("plan", "per_rank", "overrun_fraction", "real_compute_cores")}
        return {"predicted": self.predicted, "measured": self.measured, "spread": self.spread, **kept}


class Finished(NamedTuple):
    """A job by a plan. `pieces`: lines of each rank's telemetry."""

    summary: dict[str, Any]
    pieces: list[list[dict[str, Any]]]

    @property
    def step_seconds(self) -> list[float]:
        """In step, of those after the warm-up."""
        names = [f"{name}_seconds" for name in ("compute", "data", "wait")]
        return [sum(line[name] for name in names) for line in self.pieces[0]][WARM_UP:]

    @property
    def losses(self) -> list[float]:
        """In step, the mean over the samples of each: where a replica is one rank, its lines have its own part's."""
        return [
            sum(line["loss"] * line["samples"] for line in step) / sum(line["samples"] for line in step)
            for step in zip(*self.pieces, strict=True)
        ]


def finished(
    plan: Mapping[str, Any],
    recipe: Sequence[object],
    steps: int,
    command: Callable[[Sequence[object]], Sequence[object]],
    delay_bound: int = 0,
) -> Finished:
    """One job of so many steps, by the `command` of its words; one that fails ends the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "plan.yaml").write_text(yaml.safe_dump(plan))
        given = ["--plan", place / "plan.yaml", "--run.dir", place / "run", "--sync.delay_bound", delay_bound]
        length = ["--run.samples", steps * plan["batch_size"], "--run.checkpoint_every", "null"]
        summary = summary_of(command([*recipe, *given, *length]), place / "run", JOB_SECONDS)
        files = sorted((place / "run" / "telemetry").glob("rank-*.jsonl"))
        ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return Finished(summary, [[line for line in lines if line["kind"] == "piece"] for lines in ranks])


@contextmanager
def emulated(cluster: Cluster) -> Iterator[list[object]]:
    """The words of a job on this cluster."""
    with tempfile.TemporaryDirectory() as folder:
        save_cluster(cluster, Path(folder) / "cluster.yaml")
        yield ["--emulate", Path(folder) / "cluster.yaml"]


def run_planned(plan: Mapping[str, Any], cluster: Cluster, recipe: Sequence[object], steps: int) -> PlannedRun:
    """One job of so many steps, in step, on emulated devices."""
    with emulated(cluster) as words:
        done = finished(plan, [*recipe, *words], steps, partial(launched, cluster.size))
    warn_of_overruns(done.summary["overrun_fraction"], " ".join(map(str, recipe)))
    warm = done.step_seconds
    middle = statistics.median(warm)
    low, _, high = statistics.quantiles(warm, n=4)
    predicted = done.summary["plan"]["predicted_step_seconds"]
    return PlannedRun(predicted, middle, (high - low) / middle, done.losses, done.summary)


@contextmanager
def costs_kept_in(folder: Path) -> Iterator[None]:
    """Inside, jobs find the costs of blocks that others have measured there."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder.resolve())
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)
