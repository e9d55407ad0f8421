"""Thousands of damaged inputs: recipes, profiles, checkpoints, run folders, data files and what else HetSync reads.

    python -m benchmarks.fuzz.run --cases 10000 --seed 0

Each must work or be refused in a sentence (`UserError`), within 5 seconds of CPU time. What did neither is told with
its seed, and left in the folder that `--keep` names; then the status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzz.inputs import KINDS, Kind
from hetsync.cli.shared import on_one_process
from hetsync.errors import UserError
from hetsync.files import write_atomically

SECONDS = 5.0  # of CPU time


@dataclass(frozen=True)
class Case:
    """What a reader made of a damaged input: it worked, refused or failed. `told`: its sentence, or its traceback."""

    kind: str
    seed: str
    outcome: str
    told: str
    seconds: float


class SlowError(BaseException):
    """It takes longer than anybody would wait."""


@contextlib.contextmanager
def sound_inputs(kinds: Sequence[str]) -> Iterator[dict[str, Path]]:
    """A folder of each kind, all of which its reader takes. Data caches and warnings are kept apart from the user's."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["XDG_CACHE_HOME"] = str(Path(place) / "cache")
        folders = {kind: Path(place) / f"sound-{number}" for number, kind in enumerate(kinds)}
        for kind, folder in folders.items():
            folder.mkdir()
            KINDS[kind].make(folder)
            KINDS[kind].read(folder)
        yield folders


def try_case(kind: str, sound: Path, seed: str, keep: Path | None = None) -> Case:
    """Damage a copy of the sound input, and read it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(sound, Path(place) / "input"))
        KINDS[kind].damage(folder, random.Random(seed))
        begin = time.process_time()
        outcome, told = _outcome(KINDS[kind], folder)
        case = Case(kind, seed, outcome, told, round(time.process_time() - begin, 3))
        if keep is not None and outcome == "failed":
            shutil.copytree(folder, keep / f"{kind} {seed}".replace("/", "-"), dirs_exist_ok=True)
        return case


def _outcome(kind: Kind, folder: Path) -> tuple[str, str]:
    try:
        with _limited():
            kind.read(folder)
    except UserError as mistake:
        return ("refused" if str(mistake).strip() else "failed"), str(mistake)
    except (Exception, SystemExit, SlowError):
        return "failed", traceback.format_exc()
    return "worked", ""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise SlowError(f"over {SECONDS:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _seeds(cases: int, seed: int) -> list[tuple[str, str]]:
    """Kinds by weight, each case with a seed that makes it alone."""
    turns = [name for name, kind in KINDS.items() for _ in range(kind.weight)]
    return [(turns[number % len(turns)], f"{seed}/{number}") for number in range(cases)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="how many, of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="of this kind only")
    parser.add_argument("--keep", type=Path, help="folder for inputs that failed")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    told = parser.parse_args()
    cases = [(kind, seed) for kind, seed in _seeds(told.cases, told.seed) if told.kind in (None, kind)]
    outcomes: Counter[tuple[str, str]] = Counter()
    failed, slowest = [], {kind: 0.0 for kind, _ in cases}
    with sound_inputs(list(slowest)) as sound:
        for kind, seed in cases:
            case = try_case(kind, sound[kind], seed, told.keep)
            outcomes[kind, case.outcome] += 1
            slowest[kind] = max(slowest[kind], case.seconds)
            if case.outcome == "failed":
                failed.append(asdict(case))
                print(f"{kind}, seed {seed}:\n{case.told}", flush=True)
    rows = {kind: {o: outcomes[kind, o] for o in ("worked", "refused", "failed")} for kind in slowest}
    print(f"| input | worked | refused | failed | slowest, s of CPU |\n| --- {'| ---: ' * 4}|")
    for kind, row in rows.items():
        print(f"| {kind} | {' | '.join(f'{count:,}' for count in row.values())} | {slowest[kind]:.2f} |")
    if told.output is not None:
        figures = {
            "cases": told.cases,
            "seed": told.seed,
            "outcomes": rows,
            "slowest_seconds": slowest,
            "failed": failed,
        }
        write_atomically(told.output, json.dumps(figures, indent=1), "choose another --output")
    return 1 if failed else 0


if __name__ == "__main__":
    with on_one_process():  # an extra may be missing
        sys.exit(main())
