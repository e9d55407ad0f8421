"""The simulator against the trainer: emulated devices, real gradients, the same recipes and seeds.

    python -m benchmarks.simulator --output results [--quick] [--repetitions 3] [--clusters quickstart slow-link]

Every real job runs under mpirun, started by launch/local; the simulator gets its words and computes its gradients. Real
runs found in the output folder (FOLDER/real-*.json) are not repeated: delete them to measure anew. Predictions are made
anew each time. About 40 s of an otherwise idle machine for each cluster, mode and repetition.

`seconds to accuracy` is when the test accuracy first reaches the target, between evaluations by interpolation over
samples, and from samples to seconds by the run's own samples/s. `seconds to loss` is the same of the training loss,
mean over twentieths of the samples. There the prediction computes no gradients: the simulator's noisy quadratic,
calibrated by the first real run of the first cluster in delayed mode, walks on all clusters and in both modes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import launched, summary_of, with_curves
from benchmarks.common.report import source
from hetsync.config.parser import read_recipe
from hetsync.emulation.cluster import load_cluster, save_cluster
from hetsync.files import RECIPE
from hetsync.simulate.calibrate import calibrated, simulated_curve
from hetsync.simulate.quadratic import Landscape
from hetsync.simulate.recipe import build, scenario_of

RANKS = 8
BATCH = 160
JOB_SECONDS = 300  # bound on one real job
QUICK_CLUSTERS = ("quickstart", "v100-p100-k80", "alibaba-jitter", "heavy-jitter", "slow-link")
CLUSTERS = (*QUICK_CLUSTERS, "t4-v100-a100", "homogeneous", "one-rank-in-trouble")
MODES = {"synchronous": ["--sync.delay_bound", "0"], "delayed": []}
TARGETS = {"samples/s": 0.05, "staleness": 0.10, "seconds to accuracy": 0.10, "seconds to loss": 0.10}


@dataclass(frozen=True)
class Arm:
    cluster: str
    mode: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.cluster}-{self.mode}-{self.seed}"


def words(arm: Arm, options: argparse.Namespace, folder: Path) -> list[str]:
    """What both are told."""
    told = ["--run.dir", folder, "--run.seed", arm.seed, "--run.samples", options.samples]
    told += ["--run.evaluate_every", options.evaluate_every, "--data.batch_size", BATCH, "--emulate", arm.cluster]
    told += ["--optimizer.name", "adamw", "--optimizer.learning_rate", 0.003]
    return [*map(str, told), "--emulation.samples_per_second", str(options.rate), *MODES[arm.mode]]


def measured(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    kept: Path = options.output / f"real-{arm.name}.json"
    folder: Path = options.output / f"run-{arm.name}"  # stays: one of them calibrates
    if not kept.exists():
        told = summary_of(launched(RANKS, words(arm, options, folder)), folder, JOB_SECONDS)
        kept.write_text(json.dumps(with_curves(told, folder)))
    summary: dict[str, Any] = json.loads(kept.read_text())
    return summary


def predicted(arm: Arm, options: argparse.Namespace, landscape: Landscape) -> dict[str, Any]:
    """By gradients; but the losses by the landscape."""
    cluster = replace(load_cluster(arm.cluster), step_seconds=options.step_seconds)
    profile = options.output / f"{arm.cluster}.yaml"
    save_cluster(cluster, profile)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = words(replace(arm, cluster=str(profile)), options, folder)
        program = [sys.executable, "-c", "from hetsync.cli.main import main; main()", "simulate", "--gradients"]
        summary = with_curves(summary_of([*program, "--ranks", RANKS, *told], folder, JOB_SECONDS), folder)
        config = read_recipe(folder / RECIPE)
    scenario = scenario_of(config, cluster, RANKS, *build(config))
    return {**summary, "losses": simulated_curve(landscape, config, scenario).tolist()}


def seconds_to_accuracy(target: float, summary: dict[str, Any]) -> float | None:
    """Seconds of training until the test accuracy reaches the target; None where it does not."""
    points = [(record["samples_applied"], record["accuracy"]) for record in summary["evaluations"]]
    return seconds_to(target, [(0, 0.0), *points], summary)


def seconds_to_loss(target: float, summary: dict[str, Any]) -> float | None:
    """The same of the training loss."""
    losses, part = summary["losses"], summary["samples_applied"] / len(summary["losses"])
    return seconds_to(-target, [((i + 0.5) * part, -loss) for i, loss in enumerate(losses)], summary)


def seconds_to(target: float, points: Sequence[tuple[float, float]], summary: dict[str, Any]) -> float | None:
    for (start, low), (stop, high) in pairwise(points):
        if low < target <= high:
            samples = start + (target - low) / (high - low) * (stop - start)
            return samples / float(summary["samples_per_second"])
    return None


def figures(summary: dict[str, Any], options: argparse.Namespace) -> dict[str, float | None]:
    return {
        "samples/s": summary["samples_per_second"],
        "staleness": summary["staleness"]["mean"],
        "seconds to accuracy": seconds_to_accuracy(options.target, summary),
        "seconds to loss": seconds_to_loss(options.target_loss, summary),
    }


def medians(summaries: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, float | None]:
    rows = [figures(summary, options) for summary in summaries]
    out: dict[str, float | None] = {}
    for key in TARGETS:
        known = [value for row in rows if (value := row[key]) is not None]
        out[key] = statistics.median(known) if len(known) == len(rows) else None
    return out


def cell(key: str, real: float | None, virtual: float | None) -> str:
    """`predicted / measured (difference)`, in bold where it is outside the target."""
    if real is None or virtual is None:
        return " / ".join("not reached" if value is None else f"{value:.2f}" for value in (virtual, real))
    if real == virtual == 0:
        return "0 / 0"
    error = virtual / real - 1
    digits = 1 if key == "samples/s" else 2
    text = f"{virtual:.{digits}f} / {real:.{digits}f} ({error:+.1%})"
    return f"**{text}**" if abs(error) > TARGETS[key] else text


Results = dict[tuple[str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]]  # real, virtual


def markdown(results: Results, options: argparse.Namespace) -> str:
    lines = [
        f"| cluster | mode | samples/s | staleness | seconds to accuracy {options.target} |"
        f" seconds to loss {options.target_loss} (calibrated) | overrun slices of the real runs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (cluster, mode), (real, virtual) in results.items():
        ours, theirs = medians(virtual, options), medians(real, options)
        cells = [cell(key, theirs[key], ours[key]) for key in TARGETS]
        overrun = max(summary["overrun_fraction"] for summary in real)
        lines.append(f"| {cluster} | {mode} | {' | '.join(cells)} | {overrun:.1%} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for real runs and the table")
    parser.add_argument("--quick", action="store_true", help="five clusters once: less than ten minutes")
    parser.add_argument("--clusters", nargs="+", help="profiles to run")
    parser.add_argument("--repetitions", type=int, help="seeds of each; medians are compared")
    parser.add_argument("--samples", type=int, default=6_000, help="to train on in each job")
    parser.add_argument("--evaluate-every", type=int, default=1_500, help="samples between evaluations")
    parser.add_argument("--rate", type=float, default=500.0, help="samples/s of the emulated cluster")
    words = "what a synchronous step takes beyond devices and link on this machine (the profiles' key)"
    parser.add_argument("--step-seconds", type=float, default=15e-3, help=words)
    parser.add_argument("--target", type=float, default=0.8, help="test accuracy to reach")
    parser.add_argument("--target-loss", type=float, default=0.8, help="training loss to reach")
    options = parser.parse_args()
    options.clusters = options.clusters or (QUICK_CLUSTERS if options.quick else CLUSTERS)
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    return options


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    first = Arm(options.clusters[0], "delayed", 0)
    measured(first, options)
    landscape = calibrated(options.output / f"run-{first.name}")
    results: Results = {}
    for seed in range(options.repetitions):
        for cluster in options.clusters:
            for mode in MODES:
                arm = Arm(cluster, mode, seed)
                real, virtual = results.setdefault((cluster, mode), ([], []))
                real.append(measured(arm, options))
                virtual.append(predicted(arm, options, landscape))
                print(f"{arm.name}: {figures(virtual[-1], options)} / {figures(real[-1], options)}", flush=True)
    text = f"{source('simulator')}; predicted / measured; {landscape}\n\n{markdown(results, options)}"
    (options.output / "simulator.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
