"""What HetSync itself costs: CPU time of its parts with ResNet-50's 25.6 M weights.

    python -m benchmarks.runtime_cost [--ranks 2 4] [--repetitions 3]

Two rounds a second over real MPI; in delayed mode every rank gives to every round. Jobs of all kinds take turns within
a repetition. docs/results/runtime-cost.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.processes import environment, failure_of, mpirun
from benchmarks.common.report import command, grouped, machine
from hetsync.files import write_atomically

RANK = ("-m", "benchmarks.runtime_cost_rank")
JOB_SECONDS = 600  # bound on one job
MODES = ("delayed", "delayed, fragments by rule", "synchronous")

Job = dict[str, Any]


def run(ranks: int, mode: str, seconds: float) -> Job:
    """One job's result; a job that fails ends the benchmark."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = [*mpirun(ranks), sys.executable, *RANK, mode, seconds, folder]
        failure = failure_of(words, environment(), JOB_SECONDS)
        if failure is not None:
            sys.exit(f"{mode} on {ranks} ranks {failure}")
        return {"ranks": ranks, **json.loads((folder / "result.json").read_text())}


def markdown(jobs: Sequence[Job]) -> str:
    """Parts of a core: rank 0, which hosts the coordinator, and the mean of the others."""
    purposes = list(jobs[0]["per_rank"][0]["parts"])
    lines = [f"| ranks | mode | rank | rounds/s | {' | '.join(purposes)} | sum | counted in summary.json |"]
    lines.append("| --- " * (len(purposes) + 6) + "|")
    for (ranks, mode), some in grouped(jobs, "ranks", "mode").items():
        for name, chosen in (("0", slice(0, 1)), ("others", slice(1, None))):
            costs = [cost for job in some for cost in job["per_rank"][chosen]]
            parts = [statistics.mean(cost["parts"][purpose] for cost in costs) for purpose in purposes]
            rounds, counted = (statistics.mean(cost[key] for cost in costs) for key in ("rounds_per_second", "counted"))
            shown = " | ".join(f"{part:.2%}" for part in (*parts, sum(parts), counted))
            lines.append(f"| {ranks} | {mode} | {name} | {rounds:.2f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("results/runtime_cost"), help="folder for JSON and Markdown"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the jobs")
    parser.add_argument("--repetitions", type=int, default=3, help="of every job")
    parser.add_argument("--seconds", type=float, default=15.0, help="of training that are measured in a job")
    options = parser.parse_args()
    jobs: list[Job] = []
    for _ in range(options.repetitions):
        for ranks in options.ranks:
            for mode in MODES:
                jobs.append(run(ranks, mode, options.seconds))
                kept = {"command": command("runtime_cost"), "machine": machine(), "jobs": jobs}
                write_atomically(options.output / "runtime_cost.json", json.dumps(kept))
                write_atomically(options.output / "runtime_cost.md", markdown(jobs))
    print(markdown(jobs))


if __name__ == "__main__":
    main()
