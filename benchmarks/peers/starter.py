"""Starts a cell's job under mpirun, in a folder of its own, and reads what it left."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common.processes import environment, failure_of, mpirun
from benchmarks.common.quotas import permitted, quotas
from benchmarks.peers.cells import HETSYNC, SLOW_RANK, Cell, Workload, phases, profile, recipe
from benchmarks.peers.recovery import recovery
from benchmarks.peers.report import from_hetsync
from benchmarks.peers.runner import CPU_GROUPS
from benchmarks.peers.timeline import from_telemetry
from hetsync import data, models
from hetsync.emulation.cluster import save_cluster
from hetsync.profiling.device import memory_cap
from hetsync.profiling.measure import loss_on

RUNNER = ("-m", "benchmarks.peers.runner")
OPTIONAL = ("torchft", "horovod")
START_SECONDS = 120  # for a job to start and end, beside its training


class Starter:
    def __init__(self, data_folder: Path | None, interpreters: Mapping[str, str | None]) -> None:
        """`interpreters` of environments that have torchft or Horovod, and HetSync, by the package's name."""
        self._data = None if data_folder is None else data_folder.resolve()
        self._interpreters = {
            package: given or (sys.executable if importlib.util.find_spec(package) else None)
            for package, given in interpreters.items()
        }

    def missing(self, cell: Cell) -> str | None:
        """Why a job cannot be had here, in one sentence."""
        package = package_of(cell.peer)
        if package and self._interpreters[package] is None:
            return f"skipped: {package} is not installed (--{package}-python names an interpreter that has it)"
        if cell.workload.folder is not None and not (self._data and (self._data / cell.workload.folder).is_dir()):
            return f"skipped: --data names no folder with {cell.workload.folder} in it"
        if cell.scenario.cluster is None and not permitted():
            return "skipped: CPU quotas by cgroup (version 1) are not permitted here"
        return None

    def run(self, cell: Cell) -> dict[str, Any]:
        """{"result": figures, "timeline": intervals of each rank} or {"missing": sentence}."""
        if (reason := self.missing(cell)) is not None:
            return {"missing": reason}
        with tempfile.TemporaryDirectory() as scratch, throttled(cell) as groups:
            folder = Path(scratch)
            written, run = folder / "recipe.yaml", folder / "run"
            run.mkdir()
            written.write_text(yaml.safe_dump(recipe(cell, run, self._cluster_file(cell, folder), self._data)))
            command = [*mpirun(cell.ranks), self._python(cell), *RUNNER, cell.peer, written, run]
            told = {} if groups is None else {CPU_GROUPS: str(groups)}
            failure = failure_of(command, environment() | told, seconds_allowed(cell))
            return {"missing": failure} if failure else with_recovery(cell, results(cell, run))

    def _python(self, cell: Cell) -> str:
        return self._interpreters.get(package_of(cell.peer)) or sys.executable

    def _cluster_file(self, cell: Cell, folder: Path) -> Path | None:
        if cell.scenario.cluster is None:
            return None
        limit = None
        if cell.scenario.memory_limited:
            speeds = cell.scenario.speeds()
            half_share = round(cell.workload.batch * max(speeds) / sum(speeds) / 2)
            limit = memory_for(cell.workload, half_share, self._data)
        save_cluster(profile(cell, limit), folder / "cluster.yaml")
        return folder / "cluster.yaml"


def package_of(peer: str) -> str:
    """What a peer needs beyond PyTorch and HetSync; empty for most."""
    return next((package for package in OPTIONAL if peer.startswith(package)), "")


def results(cell: Cell, run: Path) -> dict[str, Any]:
    if cell.peer not in HETSYNC:
        return {"result": read(run / "result.json"), "timeline": read(run / "timeline.json")}
    summary = read(run / "summary.json")
    files = sorted((run / "telemetry").glob("rank-*.jsonl"))
    everyones = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    timelines = [from_telemetry(lines, summary["delay_bound"] == 0) for lines in everyones]
    peaks = [read(run / f"usage-{rank}.json")["peak_bytes"] for rank in range(cell.ranks)]
    return {"result": from_hetsync(summary, everyones[0], timelines, peaks), "timeline": timelines}


def with_recovery(cell: Cell, outcome: dict[str, Any]) -> dict[str, Any]:
    if cell.scenario.slows and cell.peer != "alone":
        new_rates = phases(cell.scenario, cell.rate)[-1]
        outcome["result"]["recovery"] = recovery(outcome["timeline"], SLOW_RANK, new_rates)
    return outcome


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def memory_for(workload: Workload, samples: int, data_folder: Path | None) -> int:
    """Bytes of a device whose memory holds slices of this many samples: HetSync's cap is linear in them."""
    made = workload.read_recipe()
    options = dict(made["data"].get("options", {}))
    if workload.folder is not None and data_folder is not None:
        options["path"] = str(data_folder / workload.folder)
    source = data.build(made["data"]["name"], options)
    model = models.build_for(source, made["model"]["name"], made["model"].get("options", {}))
    cpu = torch.device("cpu")
    limits = (1 << 32, 1 << 52)
    caps = [memory_cap(model, loss_on(model, source, cpu), cpu, 1, limit_bytes=limit) or 0 for limit in limits]
    per_sample = (limits[1] - limits[0]) / (caps[1] - caps[0])
    return round(limits[0] - (caps[0] - samples) * per_sample)


# Processes.


def seconds_allowed(cell: Cell) -> float:
    return START_SECONDS + 12 * cell.samples / cell.rate


@contextmanager
def throttled(cell: Cell) -> Iterator[Path | None]:
    """The cgroups of its ranks, where devices are really throttled."""
    if cell.scenario.cluster is not None:
        yield None
        return
    percents = cell.scenario.cpu_percent
    if cell.peer == "alone":
        percents = [percents[cell.fastest]]
    with quotas(percents) as groups:
        yield groups
