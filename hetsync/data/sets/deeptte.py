"""Trips in DeepTTE's JSON lines (Wang et al. 2018), as its authors distribute Chengdu's taxis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.findings import Findings
from hetsync.data.sets.trips import TripTable, split_by_date, trip_data, validate
from hetsync.errors import UserError

VERSION = "1"  # of the cached layout


def deeptte(path: str = "data/deeptte", test_fraction: float = 0.25, local_weight: float = 0.3) -> Data:
    """Trips of a file of JSON lines, or of a folder's *.jsonl files, else of its files train*, eval* and test*.

    Args:
        path: File or folder.
        test_fraction: Share of the trips to test on: the last whole days whose share is nearest to it.
        local_weight: Weight of the windows' loss in models that have one (DeepTTE's α).

    Raises:
        UserError: Nothing there, a bad record, or trips of one day only.
    """
    files = _files(Path(path))
    if not files:
        raise UserError(f"data.options.path is {path}, where no *.jsonl, train*, eval* or test* is: name their folder")
    folder = cached_folder("deeptte", files, VERSION, lambda made: TripTable.write(_valid(files, path), made))
    train, test = split_by_date(TripTable.open(folder), test_fraction)
    return trip_data(train, test, local_weight)


def check(path: Path, findings: Findings) -> None:
    """Count trips and points of a file or folder; report what is wrong by file and line."""
    files = _files(path)
    if not files:
        findings.problem(str(path), "no *.jsonl, train*, eval* or test* there")
    try:
        for where, record, wrong in _read(files):
            if wrong:
                findings.problem(where, wrong)
            else:
                findings.count("trips")
                findings.count("points", len(record["lngs"]))
    except OSError as error:
        findings.problem(str(path), f"cannot be read: {error}")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    split = [file for pattern in ("train*", "eval*", "test*") for file in sorted(path.glob(pattern))]
    return [file for file in sorted(path.glob("*.jsonl")) or split if file.is_file()]


def _valid(files: list[Path], path: str) -> Iterator[Any]:
    for where, record, wrong in _read(files):
        if wrong:
            raise UserError(f"{where}: {wrong}; see all bad records with hetsync data check deeptte {path}")
        yield record


def _read(files: list[Path]) -> Iterator[tuple[str, Any, str | None]]:
    """(file:line, record, what is wrong with it) of every line that is not blank."""
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield f"{file}:{number}", *_parse(line)


def _parse(line: bytes) -> tuple[Any, str | None]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None, "is no JSON"
    return record, validate(record)
