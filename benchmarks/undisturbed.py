"""What it costs a job that it would outlive a death, or might go on with delay, while neither happens: in pairs.

    python -m benchmarks.undisturbed [--what tolerance|auto] [--output results] [--pairs 8] [--ranks 2]
                                     [--bounds 0 4] [--emulate PROFILE]

The same job of the digits CNN, whose ranks really compute, with and without; who begins changes from pair to pair:

- tolerance: by `launch/local --tolerate` (`mpirun --with-ft ulfm`, fault.tolerate true) and by `launch/local` with
  fault.tolerate false, at each of the bounds;
- auto: with AdamW by sync.delay_bound auto, which measures what ranks wait for, keeps a copy to go back to, judges the
  losses, and stays at D = 0 where they do not wait for long; and with 0.

A ratio is that of a pair's samples/s, with to without: 1 costs nothing. With --emulate devices have 1,200 samples/s
together, which leaves the host time to spare: ratios are steadier, and say less.
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

from benchmarks.common.local_job import RECIPES, launched, summary_of
from benchmarks.common.report import Record, grouped, keep, publish, spread

LIMIT_SECONDS = 120.0
RATE = 1200  # samples/s of emulated devices
SECONDS = 5  # of a job of these
LEAST = 0.99  # of the other's samples/s, as is promised


def samples_per_second(bound: str, options: argparse.Namespace, tolerant: bool = False) -> float:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        words = [RECIPES / "digits.yaml", "--run.samples", options.samples, "--sync.delay_bound", bound]
        if options.emulate is not None:
            words += ["--emulate", options.emulate, "--emulation.samples_per_second", RATE]
        if options.what == "auto":
            words += ["--optimizer.name", "adamw", "--optimizer.learning_rate", 0.003]
        words += ["--run.profile_seconds", 0.2, "--run.dir", run, "--fault.tolerate", str(tolerant).lower()]
        local, *rest = launched(options.ranks, words)
        summary = summary_of([local, *(["--tolerate"] if tolerant else []), *rest], run, LIMIT_SECONDS)
    assert summary["samples_applied"] == options.samples, summary
    assert summary["failures"] == [], summary["failures"]
    if options.what == "auto" and summary["rounds_changes"]:
        sys.exit(f"ranks have waited for so long that the job has gone on with delay: {summary['rounds_changes']}")
    return float(summary["samples_per_second"])


def pair(number: int, bound: str, options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for has_it in (True, False) if number % 2 else (False, True):
        if options.what == "auto":
            found[has_it] = samples_per_second("auto" if has_it else bound, options)
        else:
            found[has_it] = samples_per_second(bound, options, tolerant=has_it)
    told = {"what": options.what, "bound": bound}
    return {**told, "with": found[True], "without": found[False], "ratio": found[True] / found[False]}


def table(records: Sequence[Record]) -> str:
    lines = ["| what | D | pairs | samples/s with it | without | ratio of a pair |  |", "| --- " * 7 + "|"]
    for (what, bound), some in grouped(records, "what", "bound").items():
        cells = [spread([each[name] for each in some], ".0f") for name in ("with", "without")]
        ratios = [each["ratio"] for each in some]
        kept = f"{'at least' if statistics.median(ratios) >= LEAST else 'BELOW'} {LEAST:g}"
        lines.append(f"| {what} | {bound} | {len(some)} | {' | '.join(cells)} | {spread(ratios, '.3f')} | {kept} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", choices=("tolerance", "auto"), default="tolerance")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and Markdown")
    parser.add_argument("--pairs", type=int, default=8, help="for each D")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bounds", nargs="+", help="0 4; of auto 0")
    parser.add_argument("--emulate", help="a cluster profile")
    parser.add_argument("--samples", type=int, help="of a job: 40,000, emulated 6,000")
    options = parser.parse_args()
    options.bounds = options.bounds or (["0"] if options.what == "auto" else ["0", "4"])
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
