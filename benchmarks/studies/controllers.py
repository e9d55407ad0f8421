"""Controllers of accumulation (K) and delay bound (D): all of them on the same jobs, in the simulator or for real.

    python -m benchmarks.studies.controllers --output results [--quick] [--seeds 5] [--processes 2]
    python -m benchmarks.studies.controllers --output results --real [--seeds 3]

In the simulator: every arm on every cluster and workload, the same seeds for all. A workload is a landscape that
`hetsync simulate --calibrate` fitted to a run of that recipe with real gradients; it is no more than that. The oracle
is the best of all settings that stay as they are, chosen afterwards for each target by the time to it over all seeds.
Times are virtual; a controller's own cost is measured apart, in milliseconds of CPU a decision: live, it runs in a
process of its own. With --real the same controllers run live (`hetsync-train --control.name ...`, emulated devices).

Results already in the output folder are not repeated: delete controllers.json to measure anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.local_job import RECIPES, launched, summary_of, warn_of_overruns, with_curves
from benchmarks.common.report import command, evaluations, machine, until_target
from hetsync.config.schema import Config, ControlConfig, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from hetsync.control.actions import Actions, Limits
from hetsync.control.baselines import Fixed
from hetsync.control.controller import Controller, Decision
from hetsync.control.learning.episodes import Episode, EpisodeResult, run_episode
from hetsync.control.learning.jobs import Job, with_settings
from hetsync.control.policy_network import untrained
from hetsync.control.registry import make_controller
from hetsync.emulation.cluster import Cluster, Link, load_cluster
from hetsync.simulate.quadratic import Landscape
from hetsync.simulate.script import Change
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

LIMITS = Limits(1, 8, 0, 16)
DEFAULT = Settings(4, 0.25, 1)  # where all controllers begin: the defaults of recipes
PAPERS = Settings(0, 0.25, 1)  # P2's fixed α = 1, synchronous


@dataclass(frozen=True)
class Workload:
    """`targets`: a loss that whoever learns well passes in the middle of the job, and one near its end, where the
    gradient's noise is what is left."""

    config: Config
    landscape: Landscape
    samples_per_second: float
    targets: tuple[float, float]
    batches: int = 640


def _recipe(batch: int, name: str, rate: float, momentum: float, schedule: Any) -> Config:
    return Config(
        data=DataConfig(batch_size=batch),
        optimizer=OptimizerConfig(name, rate, momentum),
        schedule=ScheduleConfig(schedule),
    )


# Landscapes from: hetsync simulate models/recipes/NAME.yaml --emulate quickstart --gradients --run.samples 16000
# (digits with --data.batch_size 160), then the same with --calibrate in place of --gradients.
WORKLOADS = {
    "digits-like": Workload(
        _recipe(160, "sgd", 0.05, 0.9, "constant"), Landscape(2.766, 0.0, 0.07962, 296.1, 0.758), 500.0, (0.12, 0.013)
    ),
    "DeepTTE-like": Workload(
        _recipe(64, "adamw", 0.003, 0.9, "cosine"), Landscape(0.3194, 0.0740, 8.373, 49.09), 250.0, (0.095, 0.0915)
    ),
}


@dataclass(frozen=True)
class Place:
    """A cluster. `script` is told the job's time limit; `unseen`: nothing like it was drawn in pre-training."""

    cluster: Cluster
    ranks: int
    script: Callable[[float], tuple[Change, ...]] | None = None
    unseen: bool = False


def half_way(limit: float) -> tuple[Change, ...]:
    """The two fastest of eight ranks become three times as slow for good."""
    return tuple(Change(limit / 2, rank, "slow_by", 3.0) for rank in (0, 1))


def places() -> dict[str, Place]:
    names = ("homogeneous", "v100-p100-k80", "alibaba-jitter", "heavy-jitter", "slow-link", "one-rank-in-trouble")
    shipped = {name: Place(load_cluster(name), 8) for name in names}
    crawling = replace(load_cluster("quickstart"), link=Link(compute_fraction=12.0))
    return {
        **shipped,
        "changes half-way": Place(load_cluster("heavy-jitter"), 8, half_way),
        "24 ranks (unseen)": Place(load_cluster("t4-v100-a100"), 24, unseen=True),
        "crawling link (unseen)": Place(crawling, 8, unseen=True),
    }


def job_of(workload: Workload, place: Place, seed: int, settings: Settings) -> Job:
    config = replace(workload.config, run=RunConfig(seed=seed))
    job = Job(
        config,
        place.cluster,
        place.ranks,
        workload.landscape,
        workload.samples_per_second,
        workload.batches,
        loss_noise=0.1,
    )
    job = replace(job, script=place.script(job.time_limit) if place.script else ())
    return with_settings(job, settings)


# Arms.


def named(name: Any, limits: Limits = LIMITS) -> Callable[[int, int], Controller]:
    bounds = {key: getattr(limits, key) for key in vars(limits) if key != "interval_seconds"}
    return lambda seed, batch: make_controller(ControlConfig(name, interval_seconds=1e-6, **bounds), seed, batch)


ARMS: dict[str, tuple[Settings, Callable[[int, int], Controller]]] = {
    "fixed K=1, D=0 (P2's)": (PAPERS, lambda seed, batch: Fixed()),
    "fixed K=1, D=4 (default)": (DEFAULT, lambda seed, batch: Fixed()),
    "schedule": (DEFAULT, named("schedule")),
    "random": (DEFAULT, named("random")),
    "untrained": (DEFAULT, lambda seed, batch: untrained(LIMITS, batch, seed)),
    "proportional": (DEFAULT, named("proportional")),
    "goodput": (DEFAULT, named("goodput")),
    "ppo": (DEFAULT, named("ppo")),
}
ORACLE = "oracle"


class Timed:
    """A controller, and what it costs."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.seconds: list[float] = []

    def decide(self, seen: Observation) -> Decision:
        began = time.process_time()
        decision = self._controller.decide(seen)
        self.seconds.append(time.process_time() - began)
        return decision


TIMES = ("seconds to target 1", "seconds to target 2")


def figures(result: EpisodeResult, targets: tuple[float, float]) -> dict[str, float]:
    return {
        **{name: result.seconds_to(target) for name, target in zip(TIMES, targets, strict=True)},
        "samples/s": result.samples_per_second,
        "loss at equal samples": result.final_loss,
        "loss at equal time": result.loss_in_time,
    }


Key = tuple[str, str, str, int]  # workload, cluster, arm or settings, seed


def measure(key: Key) -> dict[str, float]:
    """One episode, in a process of its own."""
    torch.set_num_threads(1)
    workload, place, seed = WORKLOADS[key[0]], places()[key[1]], key[3]
    if key[2] in ARMS:
        settings, make = ARMS[key[2]]
        controller = Timed(make(seed, workload.config.data.batch_size))
    else:
        slices, bound = map(int, key[2].split(","))
        settings, controller = Settings(bound, DEFAULT.quorum, slices), Timed(Fixed())
    result = run_episode(Episode(job_of(workload, place, seed, settings)), controller, LIMITS)
    cost = 1000 * statistics.median(controller.seconds) if controller.seconds else 0.0
    return {**figures(result, workload.targets), "ms a decision": cost}


def keys(workloads: Iterable[str], clusters: Iterable[str], seeds: int) -> list[Key]:
    statics = [f"{s.accumulation},{s.delay_bound}" for s in Actions(LIMITS).all(DEFAULT)]
    arms = [*ARMS, *statics]
    return [(w, c, arm, seed) for seed in range(seeds) for w in workloads for c in clusters for arm in arms]


def simulated(wanted: Sequence[Key], output: Path, processes: int) -> dict[Key, dict[str, float]]:
    path = output / "controllers.json"
    known: dict[Key, dict[str, float]] = {}
    if path.exists():
        known = {tuple(row["key"]): row["figures"] for row in json.loads(path.read_text())["rows"]}
    missing = [key for key in wanted if key not in known]
    with ProcessPoolExecutor(processes) as pool:
        for done, (key, result) in enumerate(zip(missing, pool.map(measure, missing), strict=True), 1):
            known[key] = result
            if done % 50 == 0 or done == len(missing):
                print(f"{done} of {len(missing)} episodes", flush=True)
                rows = [{"key": key, "figures": told} for key, told in known.items()]
                path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return {key: known[key] for key in wanted}


# Tables.


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


Rows = list[dict[str, float]]
Told = dict[str, Rows]  # by arm


def with_oracles(results: dict[Key, dict[str, float]], workload: str, cluster: str) -> Told:
    """Rows by arm, then those of each target's best static settings."""
    arms: Told = {}
    for (w, c, arm, _), told in results.items():
        if (w, c) == (workload, cluster):
            arms.setdefault(arm, []).append(told)
    out = {arm: arms[arm] for arm in ARMS}
    for target, name in enumerate(TIMES, 1):
        best = min((arm for arm in arms if arm not in ARMS), key=lambda arm: slowness(arms[arm], name))
        out[f"{ORACLE} {target}: K={best.replace(',', ', D=')}"] = arms[best]
    return out


def slowness(rows: Rows, name: str) -> tuple[int, float]:
    """Seeds that never got there, and the mean time of the others."""
    there = [row[name] for row in rows if math.isfinite(row[name])]
    return len(rows) - len(there), statistics.fmean(there) if there else 0.0


def number(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.4g}"


def table(arms: Told) -> str:
    names = list(next(iter(arms.values()))[0])
    lines = [f"| controller | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for arm, rows in arms.items():
        lines.append(f"| {arm} | {' | '.join(number(medians(rows)[name]) for name in names)} |")
    return "\n".join(lines) + "\n"


def markdown(results: dict[Key, dict[str, float]]) -> str:
    pairs = list(dict.fromkeys((key[0], key[1]) for key in results))
    told = {pair: with_oracles(results, *pair) for pair in pairs}
    parts = [ratios(told, target) for target in (1, 2)]
    for (workload, cluster), arms in told.items():
        targets = " and ".join(map(str, WORKLOADS[workload].targets))
        parts.append(f"### {workload}, {cluster}: losses {targets}\n\n{table(arms)}")
    return "\n".join(parts)


def ratios(told: dict[tuple[str, str], Told], target: int) -> str:
    """Time to a target over the oracle's, medians of seeds."""
    lines = [
        f"Time to target {target} over that of its best static settings, medians over seeds:\n",
        f"| workload | cluster | best static | {' | '.join(ARMS)} |",
        "| --- | --- | --- |" + " --- |" * len(ARMS),
    ]
    name = TIMES[target - 1]
    for (workload, cluster), arms in told.items():
        best = next(arm for arm in arms if arm.startswith(f"{ORACLE} {target}"))
        seconds = medians(arms[best])[name]
        there = math.isfinite(seconds)
        cells = [number(medians(arms[arm])[name] / (seconds if there else 1)) for arm in ARMS]
        label = best.split(": ")[1] if there else "none gets there; seconds"
        lines.append(f"| {workload} | {cluster} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# For real.

JOB_SECONDS = 300  # bound on one job
REAL = {
    "digits": (["--data.batch_size", 160, "--emulation.samples_per_second", 500], 12_000, "accuracy", 0.9, False),
    "deeptte_synthetic_city": (["--emulation.samples_per_second", 100], 12_000, "mape", 16.0, True),
}
REAL_CLUSTERS = ("heavy-jitter", "slow-link")
REAL_ARMS: dict[str, list[object]] = {
    "fixed K=1, D=0 (P2's)": ["--sync.delay_bound", 0],
    "fixed K=1, D=4 (default)": [],
    **{
        name: ["--control.name", name, "--control.min_delay_bound", 0, "--control.interval_seconds", 2]
        for name in ("schedule", "proportional", "goodput", "ppo")
    },
}


def real_run(recipe: str, cluster: str, arm: str, seed: int) -> dict[str, float]:
    words, samples, metric, target, falling = REAL[recipe]
    with tempfile.TemporaryDirectory() as folder:
        given = [RECIPES / f"{recipe}.yaml", *words, *REAL_ARMS[arm], "--run.dir", folder, "--run.seed", seed]
        given += ["--run.samples", samples, "--run.evaluate_every", samples // 12, "--emulate", cluster]
        summary = with_curves(summary_of(launched(8, given), Path(folder), JOB_SECONDS), Path(folder))
    warn_of_overruns(summary["overrun_fraction"], f"{recipe}, {cluster}, {arm}")
    return {
        "seconds to target": real_seconds_to(summary, metric, target, falling),
        "samples/s": summary["samples_per_second"],
        f"final {metric}": summary["metrics"][metric],
        "changes": summary.get("control", {}).get("changes", 0),
        "controller's CPU seconds": summary.get("control", {}).get("cpu_seconds", 0.0),
    }


def real_seconds_to(summary: dict[str, Any], metric: str, target: float, falling: bool) -> float:
    """Of training, on straight lines between evaluations; infinite where the target was never reached."""
    seconds = until_target(evaluations(summary["evaluations"]), metric, target, falling)
    return math.inf if seconds is None else seconds


def real(output: Path, seeds: int, recipes: Sequence[str]) -> None:
    path = output / "controllers-real.json"
    rows: dict[Key, dict[str, float]] = {}
    if path.exists():
        rows = {tuple(row["key"]): row["figures"] for row in json.loads(path.read_text())["rows"]}
    for seed in range(seeds):
        for recipe in recipes:
            for cluster in REAL_CLUSTERS:
                for arm in REAL_ARMS:
                    key = (recipe, cluster, arm, seed)
                    if key not in rows:
                        rows[key] = real_run(*key)
                        print(key, rows[key], flush=True)
                        told = [{"key": key, "figures": value} for key, value in rows.items()]
                        path.write_text(json.dumps({"machine": machine(), "rows": told}, indent=1))
    parts = []
    for recipe in recipes:
        for cluster in REAL_CLUSTERS:
            arms = {arm: [rows[recipe, cluster, arm, seed] for seed in range(seeds)] for arm in REAL_ARMS}
            parts.append(f"### {recipe}, {cluster}: {REAL[recipe][2]} {REAL[recipe][3]}\n\n{table(arms)}")
    (output / "controllers-real.md").write_text("\n".join(parts))
    print("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--seeds", type=int, help="runs of each cell (default: 5, for real 3)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="episodes at a time")
    parser.add_argument("--clusters", nargs="+", choices=places(), help="only these")
    parser.add_argument("--quick", action="store_true", help="one workload, three clusters, two seeds")
    parser.add_argument("--real", action="store_true", help="live controllers on emulated devices")
    parser.add_argument("--recipes", nargs="+", choices=REAL, default=list(REAL), help="with --real: only these")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.real:
        real(options.output, options.seeds or 3, options.recipes)
        return
    clusters = options.clusters or list(places())
    workloads, seeds = list(WORKLOADS), options.seeds or 5
    if options.quick:
        clusters, workloads, seeds = ["heavy-jitter", "slow-link", "changes half-way"], workloads[:1], 2
    results = simulated(keys(workloads, clusters, seeds), options.output, options.processes)
    text = f"`{command('studies.controllers')}`; {seeds} seeds, medians\n\n{markdown(results)}"
    (options.output / "controllers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
