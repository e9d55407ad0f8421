"""One recipe on every plane: efficiency under mpirun and under torchrun, on the same emulated cluster.

    python -m benchmarks.planes_efficiency [--output results] [--repetitions 3] [--planes mpi torch torchrun horovod]

`mpi`, `torch` (Gloo, messages over MPI) and `horovod` are started by launch/local, `torchrun` (Gloo, messages over
torch's store) without any MPI. Within one repetition all arms run once, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import check, launched, summary_of
from benchmarks.common.report import command, machine, spread

RANKS = 8
JOB_SECONDS = 300  # bound on one job
BOUNDS = (4, 0)
PLANES = ("mpi", "torch", "torchrun", "horovod")
GOAL = 0.01  # by which planes may differ in efficiency

Arm = tuple[str, int]  # plane, delay bound


def words(plane: str, bound: int, seed: int, options: argparse.Namespace) -> list[object]:
    """What hetsync-train is given."""
    emulated = ["--emulate", options.cluster, "--emulation.samples_per_second", options.rate]
    given = [*emulated, "--run.seed", seed, "--run.samples", options.samples, "--data.batch_size", options.batch]
    return [*given, "--sync.delay_bound", bound, "--run.plane", "torch" if plane == "torchrun" else plane]


def job(plane: str, given: Sequence[object]) -> dict[str, Any]:
    """Its summary.json."""
    with tempfile.TemporaryDirectory() as run:
        train = [*given, "--run.dir", run]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
        trainer = Path(sys.executable).with_name("hetsync-train")
        started = [*torchrun, trainer, *train] if plane == "torchrun" else launched(RANKS, train)
        summary = summary_of(started, Path(run), JOB_SECONDS)
    check(given, summary)
    return summary


def table(found: dict[Arm, list[dict[str, Any]]]) -> str:
    lines = ["| plane | D | of solo rates | from `mpi`'s median | runtime, % of a core | MB a rank | plane, as told |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for (plane, bound), summaries in found.items():
        rates = [summary["solo_fraction"] for summary in summaries]
        first = [summary["solo_fraction"] for summary in found.get(("mpi", bound), summaries)]
        away = statistics.median(rates) - statistics.median(first)
        ranks = [rank for summary in summaries for rank in summary["per_rank"]]
        cost = 100 * statistics.mean(rank["runtime_cpu_fraction"] for rank in ranks)
        sent = statistics.mean(rank["bytes_sent"] for rank in ranks) / 1e6
        told = summaries[-1]["plane"]
        lines.append(f"| {plane} | {bound} | {spread(rates, '.3f')} | {away:+.3f} | {cost:.1f} | {sent:.1f} | {told} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=list(PLANES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cluster", default="quickstart", help="profile of the emulated cluster")
    parser.add_argument("--samples", type=int, default=9_600, help="to train on in each job")
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--rate", type=float, default=500.0, help="samples/s of the emulated cluster")
    options = parser.parse_args()
    if "horovod" in options.planes and find_spec("horovod") is None:
        print("left out: horovod, which launch/horovod builds", file=sys.stderr)
        options.planes.remove("horovod")
    found: dict[Arm, list[dict[str, Any]]] = {(plane, bound): [] for bound in BOUNDS for plane in options.planes}
    for seed in range(options.repetitions):
        for (plane, bound), summaries in found.items():
            summaries.append(job(plane, words(plane, bound, seed, options)))
            print(f"seed {seed}  {plane}  D = {bound}: of solo rates {summaries[-1]['solo_fraction']:.3f}", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    records = [{"plane": plane, "delay_bound": bound, "jobs": jobs} for (plane, bound), jobs in found.items()]
    raw = {"machine": machine(), "command": command("planes_efficiency"), "records": records}
    (options.output / "planes_efficiency.json").write_text(json.dumps(raw, indent=1))
    text = table(found)
    (options.output / "planes_efficiency.md").write_text(text + "\n")
    print(text)
    delayed = [statistics.median(s["solo_fraction"] for s in found[plane, BOUNDS[0]]) for plane in options.planes]
    apart = max(delayed) - min(delayed)
    print(f"medians at D = {BOUNDS[0]} are {apart:.3f} apart; the goal is {GOAL}")


if __name__ == "__main__":
    main()
