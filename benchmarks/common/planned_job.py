"""Jobs by a plan on emulated clusters: what a step took beside what was predicted, and the losses."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


def run_planned(plan: Mapping[str, Any], cluster: Cluster, recipe: Sequence[object], steps: int) -> PlannedRun:
    """One job of so many steps; one that fails ends the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "plan.yaml").write_text(yaml.safe_dump(plan))
        save_cluster(cluster, place / "cluster.yaml")
        given = ["--plan", place / "plan.yaml", "--emulate", place / "cluster.yaml", "--run.dir", place / "run"]
        length = ["--run.samples", steps * plan["batch_size"], "--run.checkpoint_every", "null"]
        words = [*recipe, *given, *length, "--sync.delay_bound", 0]
        summary = summary_of(launched(cluster.size, words), place / "run", JOB_SECONDS)
        lines = (place / "run" / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    pieces = [line for line in map(json.loads, lines) if line["kind"] == "piece"]
    warm = [sum(line[f"{name}_seconds"] for name in ("compute", "data", "wait")) for line in pieces][WARM_UP:]
    warn_of_overruns(summary["overrun_fraction"], " ".join(map(str, recipe)))
    middle = statistics.median(warm)
    low, _, high = statistics.quantiles(warm, n=4)
    predicted = summary["plan"]["predicted_step_seconds"]
    return PlannedRun(predicted, middle, (high - low) / middle, [line["loss"] for line in pieces], summary)


@contextmanager
def costs_kept_in(folder: Path) -> Iterator[None]:
    """Inside, jobs find the costs of blocks that others have measured there."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder.resolve())
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)
