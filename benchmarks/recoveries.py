"""From a rank's death to the next round: ranks of jobs on this machine that are killed from outside, at any moment.

    python -m benchmarks.recoveries [--output results] [--trials 30] [--seed 0] [--ranks 4]

Each trial is a job of its own under `launch/local --tolerate`: the digits recipe on emulated devices and a user's
script (recoveries_script.py) in turn, at D = 0 and D = 4 in turn. While it trains, one rank gets SIGKILL, in every
third trial rank 0. Seconds are those from that signal until the first round without the dead rank has landed on all
that are left, by the system's clock and the ranks' telemetry; `noticed` is until the first of them began to recover. A
job must end with status 0, every sample applied, and that one death among its failures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.local_job import RECIPES, launched
from benchmarks.common.processes import end_session
from benchmarks.common.report import Record, grouped, keep, publish, spread

SECONDS = 6.0  # of training, undisturbed
LATEST = 2.0  # seconds after training was seen to go on, which is up to two seconds late
RATE = 1200  # samples/s of the emulated cluster
LIMIT_SECONDS = 120.0
SCRIPT = Path(__file__).with_name("recoveries_script.py")
MEDIAN_SECONDS, WORST_SECONDS = 1.0, 5.0  # that are promised


class Trial(NamedTuple):
    number: int
    way: str
    bound: int
    rank: int  # that is killed
    after: float  # seconds


def trials(count: int, ranks: int, seed: int) -> Iterator[Trial]:
    draw = random.Random(seed)
    for number in range(count):
        rank = 0 if number % 3 == 0 else draw.randrange(1, ranks)
        yield Trial(number, ("recipe", "script")[number % 2], (0, 4)[number // 2 % 2], rank, draw.uniform(0, LATEST))


def words_of(trial: Trial, ranks: int, folder: Path) -> list[object]:
    if trial.way == "script":
        program: list[object] = ["--", sys.executable, SCRIPT, folder, trial.bound, SECONDS]
    else:
        samples = int(SECONDS * RATE)
        program = [RECIPES / "digits.yaml", "--emulate", "v100-p100-k80", "--emulation.samples_per_second", RATE]
        program += ["--run.samples", samples, "--run.evaluate_every", samples // 3, "--run.dir", folder]
        program += ["--sync.delay_bound", trial.bound, "--run.profile_seconds", 0.2, "--quiet"]
    local, *rest = launched(ranks, program)
    return [local, "--tolerate", *rest]


def run(trial: Trial, ranks: int) -> dict[str, Any]:
    """What came of one. A job that does not go on as it should ends the benchmark."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        line = list(map(str, words_of(trial, ranks, folder)))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (Path(place) / "said").open("w+") as said:
            with subprocess.Popen(line, env=env, stdout=said, stderr=said, start_new_session=True) as job:
                killed_at = kill_in_training(job, folder, trial)
                status = wait_or_end(job)
            said.seek(0)
            story = said.read()
        summary = json.loads((folder / "summary.json").read_text())
        deaths = [(each["rank"], each["kind"]) for each in summary.get("failures") or ()]
        applied, expected = summary["samples_applied"], summary["samples_expected"]
        if status or applied != expected or deaths != [(trial.rank, "died")]:
            sys.exit(f"{trial} ended with {status}, {applied} of {expected} samples, failures {deaths}:\n{story}")
        first = summary["failures"][0]["round"]
        left = [rank for rank in range(ranks) if rank != trial.rank]
        told = [lines_of(folder, rank) for rank in left]
        recovered = max(min(landed_at(lines, first)) for lines in told) - killed_at
        began = min(at - line["recovered_seconds"] for lines in told for at, line in lines if line["kind"] == "death")
        return {**trial._asdict(), "seconds": round(recovered, 4), "noticed": round(began - killed_at, 4)}


def kill_in_training(job: subprocess.Popen[bytes], folder: Path, trial: Trial) -> float:
    """The moment, by the system's clock."""
    told, deadline = folder / "telemetry" / f"rank-{trial.rank:04d}.jsonl", time.monotonic() + LIMIT_SECONDS
    while not (told.exists() and '"round"' in told.read_text()):
        if job.poll() is not None or time.monotonic() > deadline:
            end_session(job.pid)
            sys.exit(f"{trial} has not begun to train: status {job.returncode}")
        time.sleep(0.02)
    time.sleep(trial.after)
    pid = process_of(job, trial.rank)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def process_of(job: subprocess.Popen[bytes], rank: int) -> int:
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == job.pid and wanted in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
        except OSError:
            continue
    end_session(job.pid)
    sys.exit(f"rank {rank} has gone before it was killed")


def wait_or_end(job: subprocess.Popen[bytes]) -> int:
    try:
        return job.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        end_session(job.pid)
        sys.exit(f"a job did not end within {LIMIT_SECONDS:.0f} s of a death")


def lines_of(folder: Path, rank: int) -> list[tuple[float, dict[str, Any]]]:
    """A rank's telemetry, each line with its moment by the system's clock."""
    lines = (folder / "telemetry" / f"rank-{rank:04d}.jsonl").read_text().splitlines()
    start, *others = map(json.loads, lines)
    origin = datetime.fromisoformat(start["wall_clock"]).timestamp()
    return [(origin + line["at"], line) for line in others]


def landed_at(lines: Sequence[tuple[float, Record]], first: int) -> list[float]:
    """When rounds from `first` on have landed."""
    return [at for at, line in lines if line["kind"] == "round" and line["round"] >= first]


def table(records: Sequence[Record]) -> str:
    lines = ["| job | D | killed | trials | s to the next round | s to notice |", "| --- " * 6 + "|"]
    by_kind = [{**each, "killed": "rank 0" if each["rank"] == 0 else "another"} for each in records]
    for key, some in sorted(grouped(by_kind, "way", "bound", "killed").items()):
        times = [spread([each[name] for each in some], ".3f") for name in ("seconds", "noticed")]
        lines.append(f"| {' | '.join(map(str, key))} | {len(some)} | {' | '.join(times)} |")
    return "\n".join(lines)


def verdict(records: Sequence[Record]) -> str:
    seconds = [each["seconds"] for each in records]
    middle, worst = statistics.median(seconds), max(seconds)
    kept = "kept" if middle <= MEDIAN_SECONDS and worst <= WORST_SECONDS else "NOT KEPT"
    firsts = sum(each["rank"] == 0 for each in records)
    return (
        f"{len(records)} deaths, {firsts} of them of rank 0: median {middle:.3f} s, worst {worst:.3f} s; promised are"
        f" {MEDIAN_SECONDS:g} and {WORST_SECONDS:g} s: {kept}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    for trial in trials(options.trials, options.ranks, options.seed):
        records.append(run(trial, options.ranks))
        print(json.dumps(records[-1]), flush=True)
        keep(options.output, "recoveries", seed=options.seed, trials=records)
    publish(options.output, "recoveries", table(records), verdict(records))


if __name__ == "__main__":
    main()
