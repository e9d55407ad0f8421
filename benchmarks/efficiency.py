"""The table of efficiencies and final accuracies: emulated clusters, real gradients, interleaved repetitions.

    python -m benchmarks.efficiency --output results [--traces DIR] [--repetitions 3] [--seeds 3]

Every cell is a job of its own under mpirun, started by launch/local; its figures come from the job's summary.json.
Within one repetition all arms run once, one after the other, so that a drift of the machine meets them alike.
`--traces` is a folder with Alibaba's job_1_norm.csv to job_3_norm.csv; without it the fitted profile is used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.local_job import ROOT, run_job
from benchmarks.common.plots import can_plot, headless_pyplot
from benchmarks.common.report import command, machine

RANKS = 8
BATCH = 160
JOB_SECONDS = 300  # bound on one job

MODES = {
    "synchronous, equal shares": ["--sync.delay_bound", "0", "--sync.shares", "equal"],
    "synchronous, by speed": ["--sync.delay_bound", "0"],
    "delayed, by speed": [],
}


@dataclass(frozen=True)
class Arm:
    """One way to run one job. `cluster` is a profile's name or path."""

    table: str
    cluster: str
    mode: str
    profile: str
    options: tuple[str, ...] = ()


@dataclass
class Cell:
    """The repetitions of one arm."""

    arm: Arm
    summaries: list[dict[str, Any]] = field(default_factory=list)

    def spread(self, key: str) -> tuple[float, float, float]:
        """Minimum, median, maximum."""
        values = [summary[key] for summary in self.summaries]
        return min(values), statistics.median(values), max(values)


def speed_arms(traces: Path | None, folder: Path) -> list[Arm]:
    """Clusters × modes of the efficiency table."""
    clusters = {"fixed speeds 4,4,2,2,1,1,1,1": "quickstart"}
    if traces is None:
        clusters["production jitter (fitted)"] = "alibaba-jitter"
    else:
        clusters |= {f"production trace, job {n}": trace_profile(traces, n, folder) for n in (1, 2, 3)}
    clusters |= {"heavy jitter (lognormal, σ 0.5)": "heavy-jitter", "slow link (half of compute)": "slow-link"}
    arms = []
    for cluster, profile in clusters.items():
        for mode, options in MODES.items():
            if "equal" not in mode or profile == "quickstart":
                arms.append(Arm("speed", cluster, mode, profile, tuple(options)))
    return arms


def trace_profile(traces: Path, job: int, folder: Path) -> str:
    """The quickstart's speeds under a replay of one job's trace."""
    profile = yaml.safe_load((ROOT / "cluster_profiles" / "quickstart.yaml").read_text())
    path = (traces / f"job_{job}_norm.csv").resolve()
    profile |= {
        "name": f"alibaba-job-{job}",
        "jitter": {"distribution": "trace", "path": str(path), "batch_time_column": "batch_time_norm"},
    }
    written = folder / f"alibaba-job-{job}.yaml"
    written.write_text(yaml.safe_dump(profile))
    return str(written)


def quality_arms(schedule: str) -> list[Arm]:
    """Final accuracy at equal samples: optimizer × model × mode."""
    optimizers = {
        "SGD momentum": ["--optimizer.name", "sgd", "--optimizer.learning_rate", "0.1"],
        "AdamW": ["--optimizer.name", "adamw", "--optimizer.learning_rate", "0.002"],
    }
    kinds = {"CNN": [], "batch-norm CNN": ["--model.options", '{"batch_norm": true}']}
    return [
        Arm(
            "quality",
            f"{kind}, {optimizer}, {schedule} learning rate",
            mode,
            "quickstart",
            (*model, *options, *MODES[mode], "--schedule.name", schedule),
        )
        for kind, model in kinds.items()
        for optimizer, options in optimizers.items()
        for mode in ("synchronous, by speed", "delayed, by speed")
    ]


def words(arm: Arm, seed: int, samples: int, rate: float) -> list[object]:
    """The arm's command line."""
    given: list[object] = ["--run.seed", seed, "--run.samples", samples, "--data.batch_size", BATCH]
    return [*given, "--emulate", arm.profile, "--emulation.samples_per_second", rate, *arm.options]


def measure(cells: Sequence[Cell], seeds: Iterable[int], samples: int, rate: float) -> Iterator[None]:
    """Interleaved: each seed runs every arm once; yields after each."""
    for seed in seeds:
        for cell in cells:
            cell.summaries.append(run_job(RANKS, words(cell.arm, seed, samples, rate), JOB_SECONDS))
            last = cell.summaries[-1]
            print(
                f"seed {seed}  {cell.arm.cluster}  {cell.arm.mode}: of solo rates {last['solo_fraction']:.3f}"
                f"  accuracy {last['metrics']['accuracy']:.4f}",
                flush=True,
            )
        yield


def markdown(cells: Sequence[Cell]) -> str:
    """Both tables; medians with the range in brackets."""
    lines = [
        "| cluster (emulated) | mode | of solo rates | efficiency | staleness mean / max"
        " | runtime, % of a core: mean, rank 0 | rounds/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        if cell.arm.table == "speed" and cell.summaries:
            lines.append(speed_row(cell))
    lines += ["", "| workload | synchronous accuracy | delayed accuracy | difference of means, points |"]
    lines += ["| --- | --- | --- | --- |"]
    quality = [cell for cell in cells if cell.arm.table == "quality" and cell.summaries]
    for synchronous, delayed in zip(quality[::2], quality[1::2], strict=True):
        lines.append(quality_row(synchronous, delayed))
    return "\n".join(lines) + "\n"


def speed_row(cell: Cell) -> str:
    low, middle, high = cell.spread("solo_fraction")
    stale = statistics.median(summary["staleness"]["mean"] for summary in cell.summaries)
    most = max(summary["staleness"]["max"] for summary in cell.summaries)
    costs = [[100 * rank["runtime_cpu_fraction"] for rank in summary["per_rank"]] for summary in cell.summaries]
    mean_cost, first_cost = statistics.median(map(statistics.mean, costs)), statistics.median(c[0] for c in costs)
    drawn = statistics.median(summary["efficiency"] for summary in cell.summaries)
    rounds = statistics.median(summary["rounds"] / summary["train_seconds"] for summary in cell.summaries)
    efficiency = f"**{middle:.3f}** ({low:.3f}–{high:.3f}) | {drawn:.3f}"
    figures = f"{efficiency} | {stale:.2f} / {most} | {mean_cost:.1f}, {first_cost:.1f} | {rounds:.1f}"
    return f"| {cell.arm.cluster} | {cell.arm.mode} | {figures} |"


def accuracies(cell: Cell) -> list[float]:
    return [summary["metrics"]["accuracy"] for summary in cell.summaries]


def quality_row(synchronous: Cell, delayed: Cell) -> str:
    mine, theirs = accuracies(delayed), accuracies(synchronous)
    difference = 100 * (statistics.mean(mine) - statistics.mean(theirs))
    shown = [f"{statistics.mean(a):.4f} ({min(a):.4f}–{max(a):.4f})" for a in (theirs, mine)]
    return f"| {synchronous.arm.cluster} | {shown[0]} | {shown[1]} | {difference:+.2f} |"


def plot(cells: Sequence[Cell], path: Path) -> None:
    """The speed table: bars of the median efficiency, with the range, and the ceiling of equal shares."""
    pyplot = headless_pyplot()
    colours = dict(zip(MODES, ("tab:gray", "tab:orange", "tab:blue"), strict=True))
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(cells) + 1))
    for row, cell in enumerate(cells):
        low, middle, high = cell.spread("solo_fraction")
        error = [[middle - low], [high - middle]]
        axes.barh(row, middle, xerr=error, color=colours[cell.arm.mode], capsize=3)
        axes.text(0.01, row, f"{middle:.3f}  {cell.arm.mode}", va="center", color="white", fontsize=8)
    axes.axvline(0.5, color="black", linestyle=":", label="ceiling of equal shares")
    axes.set_yticks(range(len(cells)), [cell.arm.cluster for cell in cells], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("samples/s of the job ÷ sum of solo samples/s (emulated devices)")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON, Markdown and plot")
    parser.add_argument("--traces", type=Path, help="folder with Alibaba's job_N_norm.csv")
    parser.add_argument("--repetitions", type=int, default=3, help="of the speed table")
    parser.add_argument("--seeds", type=int, default=3, help="of the accuracy table; 0 leaves it out")
    parser.add_argument("--samples", type=int, default=12_000, help="to train on in each job, speed table")
    parser.add_argument("--quality-samples", type=int, default=24_000, help="the same, accuracy table")
    parser.add_argument("--schedule", default="cosine", help="of the learning rate, accuracy table")
    parser.add_argument("--rate", type=float, default=500.0, help="samples/s of the emulated cluster, speed table")
    parser.add_argument("--quality-rate", type=float, default=2400.0, help="the same, accuracy table")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        speed = [Cell(arm) for arm in speed_arms(options.traces, folder)]
        quality = [Cell(arm) for arm in quality_arms(options.schedule)]
        parts = (
            measure(speed, range(options.repetitions), options.samples, options.rate),
            measure(quality, range(options.seeds), options.quality_samples, options.quality_rate),
        )
        for _ in itertools.chain(*parts):
            write([*speed, *quality], options.output)  # so that an interrupted table is not lost
    print(markdown([*speed, *quality]))
    if any(cell.summaries for cell in speed) and can_plot():
        plot(speed, options.output / "efficiency.png")


def write(cells: Sequence[Cell], output: Path) -> None:
    """JSON and Markdown of what has been measured so far."""
    record = {
        "command": command("efficiency"),
        "machine": machine(),
        "cells": [{"arm": vars(cell.arm), "summaries": cell.summaries} for cell in cells],
    }
    (output / "efficiency.json").write_text(json.dumps(record, indent=1))
    (output / "efficiency.md").write_text(markdown(cells))


if __name__ == "__main__":
    main()
