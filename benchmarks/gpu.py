"""One GPU as a mixed cluster: checks HetSync on it, and measures it beside DDP, in about ten minutes.

    python -m benchmarks.gpu [--small]

Runs tests/gpu; then four ranks that share one GPU with 100, 50, 25 and 25 % of its multiprocessors (launch/mps; without
MPS they take turns) train three models by DDP with equal shares, by DDP with shares by speed, by HetSync at D = 0, and
delayed. Ranks of one GPU cannot sum by NCCL: DDP's sums go by Gloo, HetSync's by MPI. What that makes of a
difference D = 0 shows. Beside that: the runtime's own cost, copies beside kernels (traces for chrome://tracing), memory
of delayed mode's buffers. `--small` runs the same code on processors, where emulated speeds stand in for percentages:
that shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which
from typing import Any

import torch

from benchmarks.common.local_job import ROOT
from benchmarks.common.plots import can_plot, headless_pyplot
from benchmarks.common.processes import environment, failure_of, mpirun
from benchmarks.common.report import command, grouped, machine, source, spread
from benchmarks.gpu_rank import DELAYED
from benchmarks.gpu_tasks import TASKS
from hetsync.emulation.cluster import Cluster, DeviceGroup, save_cluster
from hetsync.files import write_atomically

PERCENTAGES = (100, 50, 25, 25)
RANK = [sys.executable, "-m", "benchmarks.gpu_rank"]
JOB_SECONDS = 600  # bound on all training
TESTS_SECONDS = 300


def checked() -> str:
    """The last line of tests/gpu."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TESTS_SECONDS)
    lines = done.stdout.strip().splitlines() or [f"pytest ended with status {done.returncode}"]
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr, flush=True)
    return lines[-1].strip("= ")


def setting_of(small: bool, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What ranks are told; a small job's cluster is written to the folder."""
    told = {"small": small, "seed": 0, "repetitions": options.repetitions, "seconds": options.seconds}
    told["tasks"] = options.tasks
    if not small:
        return {**told, "device": "cuda", "emulate": None, "samples_per_second": None, "profile_seconds": 4.0}
    groups = tuple(DeviceGroup(f"{part} %", 1, float(part)) for part in PERCENTAGES)
    profile = folder / "parts.yaml"
    save_cluster(Cluster("parts", "made up: parts of one device", groups), profile)
    return {**told, "device": "cpu", "emulate": str(profile), "samples_per_second": 256.0, "profile_seconds": 0.1}


def launcher(small: bool) -> tuple[list[object], str]:
    """How ranks are started, and what that makes of the GPU."""
    if small:
        return mpirun(len(PERCENTAGES)), "emulated devices"
    if which("nvidia-cuda-mps-control"):
        parts = ",".join(map(str, PERCENTAGES))
        return [ROOT / "launch" / "mps", parts, "--"], f"parts of one GPU by MPS: {parts} %"
    return mpirun(len(PERCENTAGES)), "one GPU in turns: MPS is not installed, so that all parts are alike"


def trained(small: bool, options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], str, str | None]:
    """All tasks' results, what the devices were, and what went wrong; tasks before that are there."""
    write_atomically(folder / "setting.json", json.dumps(setting_of(small, options, folder)))
    start, devices = launcher(small)
    failure = failure_of([*start, *RANK, folder], environment(), JOB_SECONDS)
    result = folder / "result.json"
    return (json.loads(result.read_text()) if result.exists() else []), devices, failure


def markdown(kept: dict[str, Any]) -> str:
    lines = [f"{source('gpu')}; {kept['gpu']}; {kept['devices']}", "", f"tests/gpu: {kept['tests']}", ""]
    if kept["failure"] is not None:
        lines += [f"**the job {kept['failure']}**", ""]
    for by in [task["sums_by"] for task in kept["tasks"][:1]]:
        lines += [f"DDP sums by {by['DDP']}, HetSync by {by['HetSync']}; {order_of(kept['repetitions'])}", ""]
    lines += ["| task | way | samples/s | efficiency | last loss |", "| --- | --- | ---: | ---: | ---: |"]
    for task in kept["tasks"]:
        for (way,), runs in grouped(task["runs"], "way").items():
            rates, efficiencies, losses = (
                spread([run[key] for run in runs], form)
                for key, form in (("samples_per_second", ".1f"), ("efficiency", ".3f"), ("loss", ".3f"))
            )
            lines.append(f"| {task['task']} | {way} | {rates} | {efficiencies} | {losses} |")
    heads = ["weights, MB", "delayed mode, MB", "allocated, MB", "runtime, part of a core", "waits"]
    lines += ["", f"| task | {' | '.join(heads)} | copies, s | of these beside kernels, s |"]
    lines.append("| --- " + "| ---: " * 7 + "|")
    return "\n".join([*lines, *map(cost_row, kept["tasks"])]) + "\n"


def order_of(repetitions: int) -> str:
    if repetitions == 1:
        return "each way once, in the order of the rows"
    return f"each way {repetitions} times, in the order of the rows, from a place that moves on"


def cost_row(task: dict[str, Any]) -> str:
    ranks = [row for run in task["runs"] if run["way"] == DELAYED for row in run["summary"]["per_rank"]]
    parts = [statistics.mean(row[key] for row in ranks) for key in ("runtime_cpu_fraction", "wait_fraction")]
    megabytes = [task["bytes"].get(key) for key in ("weights", "delayed_mode", "allocated")]
    copies = [traced for traced in task["copies"] if traced is not None]
    seconds = [sum(traced[key] for traced in copies) for key in ("copy_seconds", "beside_kernels")] if copies else []
    cells = ["–" if value is None else f"{value / 1e6:.1f}" for value in megabytes]
    cells += [f"{part:.1%}" for part in parts]
    cells += [f"{value:.3f}" for value in seconds] or ["–", "–"]
    return f"| {task['task']} | {' | '.join(cells)} |"


def plot(kept: dict[str, Any], path: Path) -> None:
    """Efficiency of each way, a group of bars a task."""
    pyplot = headless_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for place, task in enumerate(kept["tasks"]):
        for number, ((way,), runs) in enumerate(grouped(task["runs"], "way").items()):
            height = statistics.median(run["efficiency"] for run in runs)
            axes.bar(place + 0.2 * number, height, 0.18, color=f"C{number}", label=way if place == 0 else None)
    axes.set_xticks([place + 0.3 for place in range(len(kept["tasks"]))], [task["task"] for task in kept["tasks"]])
    axes.set_ylabel("samples/s, part of what ranks reach alone")
    axes.set_title(kept["devices"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models on processors, with emulated speeds")
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder for figures and traces")
    parser.add_argument("--seconds", type=float, help="of each training at full speed (default: 5, small: 1)")
    parser.add_argument("--repetitions", type=int, help="of every way (default: 2, small: 1)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options = parser.parse_args()
    small = options.small
    options.seconds = options.seconds or (1.0 if small else 5.0)
    options.repetitions = options.repetitions or (1 if small else 2)
    if not small and not torch.cuda.is_available():
        parser.error("no CUDA device: start it on a machine with a GPU, or give --small")
    options.output.mkdir(parents=True, exist_ok=True)
    gpu = "no GPU" if small else torch.cuda.get_device_name()
    tests = "not run: no GPU" if small else checked()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tasks, devices, failure = trained(small, options, folder)
        for trace in folder.glob("trace-*.json"):
            write_atomically(options.output / trace.name, trace.read_text())
    kept = {"command": command("gpu"), "machine": machine(), "gpu": gpu, "devices": devices, "tests": tests}
    kept |= {"failure": failure, "repetitions": options.repetitions, "tasks": tasks}
    write_atomically(options.output / "gpu.json", json.dumps(kept))
    write_atomically(options.output / "gpu.md", markdown(kept))
    if tasks and can_plot():
        plot(kept, options.output / "gpu.png")
    print(markdown(kept))
    sys.exit(failure is not None or "failed" in tests or "error" in tests)


if __name__ == "__main__":
    main()
