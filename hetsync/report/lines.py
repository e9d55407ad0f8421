"""Whole lines of a file of telemetry, also while another process appends to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Record = dict[str, Any]

BLOCK_BYTES = 2**22
LARGEST = 2**53

# Fields of the kinds that are shown; a record without them, or with others in their place, is somebody else's.
NUMBERS = {
    "piece": ("samples", "slices", "compute_seconds", "data_seconds", "wait_seconds"),
    "round": ("seconds",),
    "score": ("seconds",),
    "rest": ("seconds",),
    "evaluation": ("samples_applied", "train_seconds"),
    "rounds_change": ("accumulation",),
    "profile": ("accumulation",),
    "death": ("rank", "round"),
    "join": ("rank", "round"),
    "damage": ("rank", "round"),
    "left_out": ("rank", "round", "samples"),
    "rollback": ("rank", "round", "samples", "checkpoint_samples"),
}
NUMBERS_OR_NULL = {
    "piece": ("since", "tasks"),
    "round": ("since", "rounds", "contributions", "staleness"),
    "rounds_change": ("delay_bound",),
    "profile": ("delay_bound", "share", "solo_samples_per_second", "solo_uncertainty"),
    "death": ("samples_returned",),
    "damage": ("recovered_seconds",),
}
TEXTS = {"rest": ("reason",), "rounds_change": ("reason",), "failure": ("error",), "profile": ("host", "device")}


class LineReader:
    """Attributes:
    unreadable: Lines that were no records.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """`last_bytes`: begin that far before the file's end; what is left of a line there is passed over."""
        self.path = path
        self.unreadable = 0
        self._offset = 0
        self._torn = b""  # the line that is being written
        if last_bytes is not None and path.is_file() and (size := path.stat().st_size) > last_bytes:
            self._offset = size - last_bytes
            self._skip_line()

    def _skip_line(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            self._offset += len(file.readline())

    def passed_over(self, begin: str, *kinds: str) -> list[Record]:
        """Of what comes before the first `read`: the newest record of kind `begin`, and those of the others since;
        OSError."""
        wanted, found = (begin, *kinds), list[Record]()
        for line in self._backwards():
            if any(kind.encode() in line for kind in wanted):
                found += [record for record in self._records([line]) if record["kind"] in wanted]
                if found and found[-1]["kind"] == begin:
                    break
        return found[::-1]

    def _backwards(self) -> Iterator[bytes]:
        """Lines before the offset, the last one first."""
        if not self._offset:
            return
        end, torn = self._offset, b""
        with self.path.open("rb") as file:
            while end:
                begin = max(0, end - BLOCK_BYTES)
                file.seek(begin)
                torn, *lines = (file.read(end - begin) + torn).split(b"\n")
                yield from filter(None, reversed(lines))
                end = begin
        yield torn

    def read(self) -> Iterator[Record]:
        """Those that have come since the last call; OSError."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self._offset:  # another run's, begun anew
                self._offset, self._torn = 0, b""
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                self._offset += len(block)
                *lines, self._torn = (self._torn + block).split(b"\n")
                yield from self._records(lines)

    def _records(self, lines: list[bytes]) -> Iterator[Record]:
        for line in lines:
            try:
                record = json.loads(line)
                _check(record)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.unreadable += 1
            else:
                yield record


def _check(record: Any) -> None:
    """Raises what comes of looking at it."""
    kind = record["kind"]
    if kind == "control" and "died" not in record:  # told as those by rule are, but for their place
        kind, record = "rounds_change", {**record, **record["decision"]}
    numbers = [record["at"], *(record[name] for name in NUMBERS.get(kind, ()))]
    perhaps = [record.get(name) for name in NUMBERS_OR_NULL.get(kind, ())]
    if not all(abs(number) < LARGEST for number in [*numbers, *(number for number in perhaps if number is not None)]):
        raise ValueError("not finite, or larger than a float counts")
    if not all(isinstance(text, str) for text in [kind, *(record[name] for name in TEXTS.get(kind, ()))]):
        raise TypeError("no text")
    if kind == "start":
        began(record)


def began(start: Record) -> float:
    """The moment, in seconds since 1970; ValueError."""
    moment = datetime.fromisoformat(start["wall_clock"])
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def outlived(death: Record) -> str:
    """In a sentence."""
    cause = death.get("cause", "died")
    what = "died" if cause == "died" else f"was excluded, as it was {cause}"
    return f"{what}: the others went on from round {death['round']}"
