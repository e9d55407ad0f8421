"""How many bytes of telemetry a rank writes in a week, and what a task and its round cost it, on a clock of its own.

python -m benchmarks.telemetry_size
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.common.report import source
from hetsync.telemetry import Telemetry

DAY = 86_400.0
RANKS = 64


def week_of(folder: Path, days: float, tasks_a_second: float) -> tuple[int, float]:
    """Bytes of a rank's file, and CPU seconds a task, with a round for each; lines as long as a real job's."""
    now = 0.0
    path = folder / "rank-0000.jsonl"
    telemetry = Telemetry(path, lambda: now)
    began, count = time.process_time(), round(days * DAY * tasks_a_second)
    for number in range(count):
        now += 1 / tasks_a_second
        telemetry.record(
            "piece",
            piece=64 * number,
            samples=64,
            slices=1,
            version=number,
            compute_seconds=0.451234,
            data_seconds=0.000123,
            wait_seconds=0.012345,
            loss=2.3042867751348595,
        )
        telemetry.record("round", round=number, seconds=0.023456, staleness=number % 4)
    telemetry.close()
    return path.stat().st_size, (time.process_time() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--tasks-a-second", type=float, default=2.0)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size, seconds = week_of(Path(folder), told.days, told.tasks_a_second)
    print(f"{told.days:g} days at {told.tasks_a_second:g} tasks/s: {size / 1e6:.1f} MB a rank, ", end="")
    print(f"{RANKS * size / 1e6:.0f} MB for {RANKS} ranks; {seconds * 1e6:.1f} µs of CPU a task with its round")
    print(source("telemetry_size"))


if __name__ == "__main__":
    main()
