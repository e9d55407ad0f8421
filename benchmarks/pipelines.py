"""Plans that are run: pipelines, replicas and data parallelism on emulated clusters of three link speeds.

    python -m benchmarks.pipelines --output results --data DIR [--quick] [--seeds 3] [--workloads NAME ...]

Every cell is a job of its own under mpirun, started by launch/local, on four emulated devices of three kinds; gradients
and what travels are real. A link is so fast that a round of the whole model takes a quarter, one or four slices. Each
workload's speed is what this machine affords, found out once and kept under `--output`, as plans are. Within a seed all
arms run one after the other. Jobs are kept in jobs.jsonl: a run that is begun again goes on there.

`--data` is a folder with cifar10_lossless, ptb and multi30k_en_de; digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.common.local_job import RECIPES, launched, with_curves
from benchmarks.common.report import Record, command, grouped, machine, source, spread, until_target
from hetsync.config.parser import recipe_of
from hetsync.errors import USER_ERROR
from hetsync.simulate.recipe import build

DEVICES = {"A100": (1, 3.13), "V100": (1, 2.45), "T4": (2, 1.00)}
RANKS = 4
ROUND_SLICES = {"fast": 0.25, "middle": 1.0, "slow": 4.0}  # by link: how long a round takes
AFFORDABLE = 0.7  # of the speed that a job chooses for itself, so that no arm overruns
JOB_SECONDS = 1800
BSP, BEST = "synchronous, equal shares", "best, D = 0"
PLANNED = {  # how its plan is searched for, and the bound on delay that it is run with
    "pipeline, exact": (["--search", "exact", "--replicas", "0,1,2,3"], 0),
    "pipeline, tapp": (["--search", "tapp", "--replicas", "0,1,2,3"], 0),
    BEST: (["--search", "best"], 0),
    "best, D = 4": (["--search", "best"], 4),
}
UNPLANNED = {
    BSP: ["--sync.delay_bound", "0", "--sync.shares", "equal"],
    "synchronous, by speed": ["--sync.delay_bound", "0"],
    "delayed, D = 4": ["--sync.delay_bound", "4"],
}
ARMS = (*UNPLANNED, *PLANNED)


class Workload(NamedTuple):
    """`samples`: of a job. `metric`: of its evaluations, by which the target is told."""

    recipe: str
    folder: str | None
    samples: int
    metric: str
    falling: bool


WORKLOADS = {
    "digits": Workload("digits", None, 6400, "loss", True),
    "nasnet": Workload("cifar10_nasnet_a", "cifar10_lossless", 1920, "accuracy", False),
    "ptb": Workload("ptb_lstm_small", "ptb", 1600, "perplexity", True),
    "nmt": Workload("nmt_multi30k", "multi30k_en_de", 3200, "perplexity", True),
}


class Bench:
    """Where results are, and what jobs are told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output, self.data, self.part = options.output, options.data, options.part
        self.output.mkdir(parents=True, exist_ok=True)

    def recipe(self, name: str) -> list[object]:
        """Recipe and data of a workload."""
        workload = WORKLOADS[name]
        words: list[object] = [RECIPES / f"{workload.recipe}.yaml"]
        if workload.folder is not None:
            content = yaml.safe_load(words[0].read_text())["data"]  # type: ignore[attr-defined]
            given = {**content["options"], "path": str(self.data / workload.folder)}
            words += ["--data.options", json.dumps(given)]
        return words

    def cluster(self, name: str, link: str) -> Path:
        """The profile of this link for this workload, written."""
        path = self.output / f"{name}-{link}.yaml"
        if not path.exists():
            config = recipe_of(yaml.safe_load((RECIPES / f"{WORKLOADS[name].recipe}.yaml").read_text()))
            slice_seconds = config.data.batch_size / self.rate(name)
            carried = 2 * (RANKS - 1) / RANKS * self.weight_bytes(name)
            devices = [{"name": kind, "count": count, "speed": speed} for kind, (count, speed) in DEVICES.items()]
            profile = {
                "name": f"{name}-{link}",
                "source": f"made up: a round takes {ROUND_SLICES[link]} slices",
                "devices": devices,
                "link": {"latency_seconds": 1e-4, "bytes_per_second": carried / (ROUND_SLICES[link] * slice_seconds)},
            }
            path.write_text(yaml.safe_dump(profile, sort_keys=False))
        return path

    def weight_bytes(self, name: str) -> int:
        content = yaml.safe_load((RECIPES / f"{WORKLOADS[name].recipe}.yaml").read_text())
        if (folder := WORKLOADS[name].folder) is not None:
            content["data"]["options"]["path"] = str(self.data / folder)
        _, model = build(recipe_of(content))
        return sum(weight.numel() * weight.element_size() for weight in model.parameters())

    def rate(self, name: str) -> float:
        """Samples a second of all devices together: what a job found that this machine affords, and less."""
        path = self.output / f"{name}-rate.json"
        if not path.exists():
            devices = [{"name": kind, "count": count, "speed": speed} for kind, (count, speed) in DEVICES.items()]
            profile = self.output / f"{name}-devices.yaml"
            profile.write_text(yaml.safe_dump({"name": "devices", "source": "made up", "devices": devices}))
            words = [*self.recipe(name), "--emulate", profile, "--run.samples", 4 * RANKS * 16]
            summary = self.job([*words, "--sync.delay_bound", "0"])
            path.write_text(json.dumps(AFFORDABLE * summary["solo_samples_per_second_sum"]))
        rate: float = json.loads(path.read_text())
        return rate

    def plan(self, name: str, link: str, arm: str) -> Path:
        """The arm's plan, searched for."""
        path = self.output / f"{name}-{link}-{arm.replace(', ', '-').replace(' ', '')}.yaml"
        if not path.exists():
            search, bound = PLANNED[arm]
            words = [*self.recipe(name), *self.emulated(name, link), *search, "--sync.delay_bound", bound]
            asked = [Path(sys.executable).with_name("hetsync"), "plan", *words, "--output", path]
            done = subprocess.run(list(map(str, asked)), capture_output=True, text=True, timeout=JOB_SECONDS)
            if done.returncode:
                sys.exit(f"no plan for {name}, {link}, {arm}:\n{done.stdout}{done.stderr}")
            print(f"{name}, {link}, {arm}:\n{done.stdout}", flush=True)
        return path

    def emulated(self, name: str, link: str) -> list[object]:
        return ["--emulate", self.cluster(name, link), "--emulation.samples_per_second", self.rate(name)]

    def measured(self, name: str, link: str, arm: str, seed: int) -> dict[str, Any]:
        """What one job told."""
        samples = max(64, int(WORKLOADS[name].samples * self.part))
        words = [*self.recipe(name), *self.emulated(name, link), "--run.seed", seed, "--run.samples", samples]
        words += ["--run.evaluate_every", max(32, samples // 4)]
        if arm in UNPLANNED:
            words += UNPLANNED[arm]
        else:
            words += ["--plan", self.plan(name, link, arm), "--sync.delay_bound", PLANNED[arm][1]]
        summary = self.job(words)
        return summary if "missing" in summary else figures(summary)

    def job(self, words: Sequence[object]) -> dict[str, Any]:
        """A job's summary; `missing`, in its own words, where it is refused. One that fails ends the benchmark."""
        with tempfile.TemporaryDirectory() as run:
            told = list(map(str, launched(RANKS, [*words, "--run.dir", run])))
            done = subprocess.run(told, capture_output=True, text=True, timeout=JOB_SECONDS)
            if done.returncode == USER_ERROR:
                return {"missing": next(line for line in done.stderr.splitlines() if line.startswith("hetsync: "))}
            if done.returncode:
                sys.exit(f"{' '.join(told)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return with_curves(json.loads((Path(run) / "summary.json").read_text()), Path(run))


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """What a table needs of a summary. `wait_fraction`: of the ranks' time, for others, links and empty pipelines."""
    ranks, plan = summary["per_rank"], summary.get("plan")
    samples, seconds = summary["samples_applied"], summary["train_seconds"]
    waited = statistics.mean(rank["wait_fraction"] for rank in ranks)
    memory = [rank["predicted_memory_bytes"] for rank in ranks if "predicted_memory_bytes" in rank]
    sent = sum(rank["bytes_sent"] for rank in ranks) / samples
    return {
        "samples_per_second": summary["samples_per_second"],
        "wait_fraction": waited,
        "wait_seconds": waited * seconds,
        "bytes_per_sample": plan["bytes_per_sample"] if plan else 2 * (RANKS - 1) / RANKS * sent,
        "memory_bytes": max(memory, default=None),
        "overrun_fraction": summary["overrun_fraction"],
        "predicted_step_seconds": plan["predicted_step_seconds"] if plan else None,
        "measured_step_seconds": plan["measured_step_seconds"] if plan else None,
        "replicas": plan["replicas"] if plan else None,
        "evaluations": summary["evaluations"],
    }


def run(options: argparse.Namespace, kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Jobs that are not among these, interleaved."""
    bench = Bench(options)
    done = {tuple(record[key] for key in ("workload", "link", "arm", "seed")) for record in kept}
    for seed in range(options.seeds):
        for name in options.workloads:
            for link in options.links:
                for arm in options.arms:
                    if (name, link, arm, seed) not in done:
                        told = {"workload": name, "link": link, "arm": arm, "seed": seed}
                        yield {**told, **bench.measured(name, link, arm, seed)}


# Tables.


def target_of(cell: Sequence[Record], workload: Workload) -> float:
    """What the weakest arm ends with, by medians: all can reach it."""
    ends = [
        statistics.median(one["evaluations"][-1][workload.metric] for one in runs)
        for runs in grouped(cell, "arm").values()
    ]
    return max(ends) if workload.falling else min(ends)


def seconds_to(record: Record, workload: Workload, target: float) -> float | None:
    points = [{"seconds": one["train_seconds"], workload.metric: one[workload.metric]} for one in record["evaluations"]]
    return until_target(points, workload.metric, target, workload.falling)


def markdown(records: Sequence[Record]) -> str:
    lines: list[str] = []
    for (name, link), cell in grouped(records, "workload", "link").items():
        done, workload = [one for one in cell if "missing" not in one], WORKLOADS[name]
        target = target_of(done, workload)
        lines += [f"### {name}, {link} link: a round takes {ROUND_SLICES[link]:g} slices", ""]
        lines += [f"| arm | samples/s | of BSP | waiting | kB a sample | MiB | s to {workload.metric} {target:.4g} |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        base = [one["samples_per_second"] for one in done if one["arm"] == BSP]
        for (arm,), runs in grouped(cell, "arm").items():
            if "missing" in runs[0]:
                lines.append(f"| {arm} | {runs[0]['missing']} |" + " |" * 5)
                continue
            rates = [one["samples_per_second"] for one in runs]
            part = f"{statistics.median(rates) / statistics.median(base):.2f}" if base else "–"
            memory = [None if one["memory_bytes"] is None else one["memory_bytes"] / 2**20 for one in runs]
            row = [spread(rates, ".1f"), part, spread([one["wait_fraction"] for one in runs], ".1%")]
            row += [spread([one["bytes_per_sample"] / 1e3 for one in runs], ".1f"), spread(memory, ".1f")]
            row += [spread([seconds_to(one, workload, target) for one in runs], ".1f")]
            lines.append(f"| {arm} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join([*lines, *planned_and_measured(records)])


def planned_and_measured(records: Sequence[Record]) -> list[str]:
    """How far predicted steps are from measured ones, and whether both have the same order."""
    pairs = [
        (*key, statistics.median(one["predicted_step_seconds"] for one in runs), runs)
        for key, runs in grouped(records, "workload", "link", "arm").items()
        if runs[0].get("predicted_step_seconds") is not None
    ]
    if len(pairs) < 2:
        return []
    lines = [
        "### Planned against measured",
        "",
        "| plan | predicted s | measured s | off by |",
        "| --- | --- | --- | --- |",
    ]
    measured = [statistics.median(one["measured_step_seconds"] for one in runs) for *_, runs in pairs]
    errors = []
    for (name, link, arm, seconds, _), real in zip(pairs, measured, strict=True):
        errors.append(abs(seconds / real - 1))
        lines.append(f"| {name}, {link}, {arm} | {seconds:.4g} | {real:.4g} | {seconds / real - 1:+.1%} |")
    correlation = rank_correlation([pair[3] for pair in pairs], measured)
    told = f"Off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
    return [*lines, "", f"{told}; rank correlation {correlation:.3f} over {len(pairs)} plans."]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, of values of which no two are equal."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for plans, jobs and tables")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the data sets")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--links", nargs="+", choices=ROUND_SLICES, default=list(ROUND_SLICES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", default=list(ARMS), help="; ".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", type=float, default=1.0, help="of each workload's samples")
    parser.add_argument("--quick", action="store_true", help="digits alone, one seed, half of the samples")
    options = parser.parse_args(words)
    if options.quick:
        options.workloads, options.seeds, options.part = ["digits"], 1, 0.5
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "jobs.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for record in run(options, records):
        records.append(record)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        told = record.get("missing") or f"{record['samples_per_second']:.1f} samples/s"
        print(f"seed {record['seed']}, {record['workload']}, {record['link']}, {record['arm']}: {told}", flush=True)
        kept = {"command": command("pipelines"), "machine": machine(), "jobs": records}
        (options.output / "pipelines.json").write_text(json.dumps(kept, indent=1) + "\n")
        (options.output / "pipelines.md").write_text(f"{source('pipelines')}\n\n{markdown(records)}\n")


if __name__ == "__main__":
    main()
