"""The simulator against the trainer: emulated devices, real gradients, the same recipes and seeds.

    python benchmarks/simulator.py --output results [--repetitions 2] [--clusters quickstart slow-link]

Every real job runs under mpirun, started by launch/local; the simulator gets its words and computes its gradients. Real
runs found in the output folder (FOLDER/real-*.json) are not repeated: delete them to measure anew. Predictions are made
anew each time.

`time to target` is when the test accuracy first reaches the target, between evaluations by interpolation over samples,
and from samples to seconds by the run's own samples/s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RANKS = 8
BATCH = 160
JOB_SECONDS = 300  # bound on one real job
CLUSTERS = ("quickstart", "v100-p100-k80", "t4-v100-a100", "alibaba-jitter", "heavy-jitter", "slow-link", "homogeneous")
MODES = {"synchronous": ["--sync.delay_bound", "0"], "delayed": []}
TARGETS = {"samples/s": 0.05, "staleness": 0.10, "seconds to target": 0.10}


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


def run(command: list[str], folder: Path) -> dict[str, Any]:
    """The summary that the command leaves in the folder, with rank 0's evaluations."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    lines = (folder / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {**summary, "evaluations": [record for record in records if record["kind"] == "evaluation"]}


def measured(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    kept: Path = options.output / f"real-{arm.name}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [str(ROOT / "launch" / "local"), str(RANKS), *words(arm, options, Path(folder))]
            kept.write_text(json.dumps(run(command, Path(folder))))
    summary: dict[str, Any] = json.loads(kept.read_text())
    return summary


def predicted(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-c", "from hetsync.cli import main; main()", "simulate", "--gradients"]
        return run([*program, "--ranks", str(RANKS), *words(arm, options, Path(folder))], Path(folder))


def seconds_to(target: float, summary: dict[str, Any]) -> float | None:
    """Seconds of training until the accuracy reaches the target; None where it does not."""
    before = (0, 0.0)
    for record in summary["evaluations"]:
        here = (record["samples_applied"], record["accuracy"])
        if here[1] >= target:
            part = (target - before[1]) / (here[1] - before[1])
            samples: float = before[0] + part * (here[0] - before[0])
            return samples / float(summary["samples_per_second"])
        before = here
    return None


def figures(summary: dict[str, Any], target: float) -> dict[str, float | None]:
    return {
        "samples/s": summary["samples_per_second"],
        "staleness": summary["staleness"]["mean"],
        "seconds to target": seconds_to(target, summary),
    }


def medians(summaries: list[dict[str, Any]], target: float) -> dict[str, float | None]:
    rows = [figures(summary, target) for summary in summaries]
    out: dict[str, float | None] = {}
    for key in TARGETS:
        known = [value for row in rows if (value := row[key]) is not None]
        out[key] = statistics.median(known) if len(known) == len(rows) else None
    return out


def cell(key: str, real: float | None, virtual: float | None) -> str:
    """`predicted / measured (difference)`, in bold where it is outside the target."""
    if real is None or virtual is None:
        return "not reached" if real is virtual else f"{virtual} / {real}"
    if real == virtual == 0:
        return "0 / 0"
    error = virtual / real - 1
    digits = 1 if key == "samples/s" else 2
    text = f"{virtual:.{digits}f} / {real:.{digits}f} ({error:+.1%})"
    return f"**{text}**" if abs(error) > TARGETS[key] else text


def markdown(results: dict[tuple[str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]], target: float) -> str:
    lines = [
        f"| cluster | mode | samples/s | staleness | seconds to accuracy {target} | overrun slices of the real runs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (cluster, mode), (real, virtual) in results.items():
        ours, theirs = medians(virtual, target), medians(real, target)
        cells = [cell(key, theirs[key], ours[key]) for key in TARGETS]
        overrun = max(summary["overrun_fraction"] for summary in real)
        lines.append(f"| {cluster} | {mode} | {' | '.join(cells)} | {overrun:.1%} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for real runs and the table")
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, help="profiles to run")
    parser.add_argument("--repetitions", type=int, default=1, help="seeds of each; medians are compared")
    parser.add_argument("--samples", type=int, default=6_000, help="to train on in each job")
    parser.add_argument("--evaluate-every", type=int, default=1_500, help="samples between evaluations")
    parser.add_argument("--rate", type=float, default=500.0, help="samples/s of the emulated cluster")
    parser.add_argument("--target", type=float, default=0.8, help="test accuracy to reach")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    for seed in range(options.repetitions):
        for cluster in options.clusters:
            for mode in MODES:
                arm = Arm(cluster, mode, seed)
                real, virtual = results.setdefault((cluster, mode), ([], []))
                real.append(measured(arm, options))
                virtual.append(predicted(arm, options))
                print(f"{arm.name}: {figures(virtual[-1], options.target)} / {figures(real[-1], options.target)}")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    command = " ".join(["python", "benchmarks/simulator.py", *sys.argv[1:]])
    text = f"`{command}` on {machine}; predicted / measured\n\n{markdown(results, options.target)}"
    (options.output / "simulator.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
