"""What it costs a job that it would outlive a death, while nobody dies: samples/s in pairs.

    python -m benchmarks.undisturbed [--output results] [--pairs 8] [--ranks 2] [--bounds 0 4] [--emulate PROFILE]

The same job of the digits CNN, whose ranks really compute, alternately by `launch/local --tolerate` (`mpirun --with-ft
ulfm`, fault.tolerate true) and by `launch/local` with fault.tolerate false; who begins changes from pair to pair. A
ratio is that of a pair's samples/s, tolerant to not: 1 costs nothing. With --emulate devices have 1,200 samples/s
together, which leaves the host time to spare: ratios are steadier, and say less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.local_job import RECIPES, launched, summary_of
from benchmarks.common.report import Record, grouped, keep, publish, spread

LIMIT_SECONDS = 120.0
RATE = 1200  # samples/s of emulated devices
SECONDS = 5  # of a job of these
LEAST = 0.99  # of the other's samples/s, as is promised


def samples_per_second(tolerant: bool, bound: str, options: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        words = [RECIPES / "digits.yaml", "--run.samples", options.samples, "--sync.delay_bound", bound]
        if options.emulate is not None:
            words += ["--emulate", options.emulate, "--emulation.samples_per_second", RATE]
        words += ["--run.profile_seconds", 0.2, "--run.dir", run, "--fault.tolerate", str(tolerant).lower()]
        local, *rest = launched(options.ranks, words)
        summary = summary_of([local, *(["--tolerate"] if tolerant else []), *rest], run, LIMIT_SECONDS)
    assert summary["samples_applied"] == options.samples, summary
    assert summary["failures"] == [], summary["failures"]
    return float(summary["samples_per_second"])


def pair(number: int, bound: str, options: argparse.Namespace) -> dict[str, Any]:
    order = (True, False) if number % 2 else (False, True)
    found = {tolerant: samples_per_second(tolerant, bound, options) for tolerant in order}
    return {"bound": bound, "tolerant": found[True], "not": found[False], "ratio": found[True] / found[False]}


def table(records: Sequence[Record]) -> str:
    lines = ["| D | pairs | samples/s, tolerant | samples/s, not | ratio of a pair |  |", "| --- " * 6 + "|"]
    for (bound,), some in grouped(records, "bound").items():
        cells = [spread([each[name] for each in some], ".0f") for name in ("tolerant", "not")]
        ratios = [each["ratio"] for each in some]
        kept = f"{'at least' if statistics.median(ratios) >= LEAST else 'BELOW'} {LEAST:g}"
        lines.append(f"| {bound} | {len(some)} | {' | '.join(cells)} | {spread(ratios, '.3f')} | {kept} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--pairs", type=int, default=8, help="for each D")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bounds", nargs="+", default=["0", "4"])
    parser.add_argument("--emulate", help="a cluster profile")
    parser.add_argument("--samples", type=int, help="of a job: 40,000, emulated 6,000")
    options = parser.parse_args()
    options.samples = options.samples or (40_000 if options.emulate is None else SECONDS * RATE)
    records: list[dict[str, Any]] = []
    for number in range(options.pairs):
        for bound in options.bounds:
            records.append(pair(number, bound, options))
            print(json.dumps(records[-1]), flush=True)
            keep(options.output, "undisturbed", pairs=records)
    publish(options.output, "undisturbed", table(records))


if __name__ == "__main__":
    main()
