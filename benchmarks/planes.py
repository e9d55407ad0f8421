"""What a sum costs on each plane, beside the bare call of the same library: latency, bandwidth, CPU time.

    python -m benchmarks.planes [--ranks 2 4 8] [--planes mpi torch] [--output FOLDER]

Jobs take turns within a repetition, and ways of summing within a job: in one the library's own calls, and the plane's
sums, polled without a break; in the next the engine's, by its communication thread with the pauses that it makes
between two polls, of a tensor where the plane sums fastest, as its buffers are, and of any other. A plane that cannot
be opened here is left out, with its reason. docs/results/planes.md has our tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.processes import environment, failure_of, mpirun
from benchmarks.common.report import command, grouped, machine, source, spread
from hetsync.files import write_atomically
from hetsync.plane import PLANES

RANK = ("-m", "benchmarks.planes_rank")
LIBRARY, ENGINE = "library", "engine"  # whose ways of summing a job times
JOB_SECONDS = 600  # bound on one job
OF_SEVERAL = [name for name in PLANES if name not in ("auto", "local")]
HEAD = ("plane", "ranks", "bytes", "way", "ms", "to the bare call", "MB/s", "CPU, ms a rank")

Job = dict[str, Any]


def run(plane: str, ranks: int, largest: int, seconds: float, lab: Path | None) -> Job:
    """The result of a job for the library's ways, with that of one for the engine's."""
    found = run_ways(LIBRARY, plane, ranks, largest, seconds, lab)
    if "left_out" not in found:
        engine = run_ways(ENGINE, plane, ranks, largest, seconds, lab)
        for row, more in zip(found["sums"], engine["sums"], strict=True):
            row["ways"] |= more["ways"]
    return found


def run_ways(ways: str, plane: str, ranks: int, largest: int, seconds: float, lab: Path | None) -> Job:
    """One job's result; a job that fails ends the benchmark."""
    launcher = mpirun(ranks) if lab is None else [lab / "mpirun", "-np", ranks]
    between = {} if lab is None else {"MASTER_ADDR": "h0", "GLOO_SOCKET_IFNAME": "eth0"}
    with tempfile.TemporaryDirectory() as folder:
        words = [*launcher, sys.executable, *RANK, plane, ways, largest, seconds, folder]
        failure = failure_of(words, environment() | between, JOB_SECONDS)
        if failure is not None:
            sys.exit(f"{plane} on {ranks} ranks {failure}")
        return {"plane": plane, "ranks": ranks, **json.loads((Path(folder) / "result.json").read_text())}


def markdown(jobs: Sequence[Job]) -> str:
    """Medians and ranges of all repetitions; ratios are of the medians within one."""
    lines = [f"| {' | '.join(HEAD)} |", "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |"]
    rows = [{**job, **row} for job in jobs for row in job.get("sums", ())]
    for (plane, ranks, size), some in grouped(rows, "plane", "ranks", "bytes").items():
        for way in some[0]["ways"]:
            lines.append(f"| {plane} | {ranks} | {size:,} | {way} | {' | '.join(cells(some, way, size))} |")
    reasons = {f"{job['plane']}: left out, since {job['left_out']}": None for job in jobs if "left_out" in job}
    return "\n".join([*lines, *(f"\n{reason}" for reason in reasons)]) + "\n"


def cells(rows: Sequence[dict[str, Any]], way: str, size: int) -> list[str]:
    """Of all repetitions of one size: milliseconds, ratio to the first way, bandwidth, CPU time."""
    took = [s for row in rows for s in row["ways"][way]["seconds"]]
    cpu = [1000 * s for row in rows for s in row["ways"][way]["cpu_seconds"]]
    ratios = []
    for row in rows:
        bare, *_ = row["ways"].values()
        ratios.append(median(row["ways"][way]["seconds"]) / median(bare["seconds"]))
    milliseconds = spread([1000 * s for s in took], ".3f")
    return [milliseconds, spread(ratios, ".2f"), f"{size / median(took) / 1e6:.0f}", spread(cpu, ".3f")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/planes"), help="folder for JSON and Markdown")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="sizes of the jobs")
    parser.add_argument("--planes", nargs="+", choices=OF_SEVERAL, default=OF_SEVERAL, help="what carries the sums")
    parser.add_argument("--repetitions", type=int, default=3, help="of every job")
    parser.add_argument("--seconds", type=float, default=5.0, help="about as long each size is summed in a job")
    parser.add_argument("--largest", type=float, default=1e8, help="bytes of the largest sum")
    parser.add_argument("--lab", type=Path, help="folder of tests/fault/namespaces_lab.sh: a host for each rank")
    options = parser.parse_args()
    jobs: list[Job] = []
    for _ in range(options.repetitions):
        for ranks in options.ranks:
            for plane in options.planes:
                jobs.append(run(plane, ranks, int(options.largest), options.seconds, options.lab))
                kept = {"command": command("planes"), "machine": machine(), "jobs": jobs}
                write_atomically(options.output / "planes.json", json.dumps(kept))
                write_atomically(options.output / "planes.md", f"{source('planes')}\n\n{markdown(jobs)}")
    print(markdown(jobs))


if __name__ == "__main__":
    main()
