"""One JSON-lines file a rank: what it computed, where it waited, what travelled. Times are in seconds."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from hetsync.errors import Trouble
from hetsync.files import json_text

FORMAT = 2  # of the lines; 1 had neither `profile` and `failure` nor lines of several tasks or rounds
FLUSH_SECONDS = 2.0
KEPT = 100_000  # records, while they cannot be written; the oldest go first

# How a file stays small: its first stretch tells each task and round, each further stretch covers twice the time.
STRETCH_BYTES = 2**20
FIRST_INTERVAL, LONGEST_INTERVAL = 0.25, 60.0  # seconds between two lines of a kind, after the first stretch

Fields = dict[str, Any]


class Telemetry:
    """Appends records; safe from several threads. Without a path it keeps nothing.

    The first record of a process, `start`, says when its `at` was 0. In a large file a line tells of several tasks or
    rounds: it has their number and `since`, the `at` of the line before.

    Records that cannot be written are kept for a while and tried again; the job does not end for them.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._records: deque[tuple[str, float, Fields]] = deque()  # of tasks and rounds, no text yet
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._unwritable = Trouble()
        self._origin = clock()
        self._flushed = self._origin
        self._began = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        self._started = False  # has there been anything to tell?
        self._bytes = 0  # of the file, with what is to be written
        self._held: dict[str, Fields] = {}  # by kind: told in a later line
        self._told = dict.fromkeys(SEVERAL, 0.0)  # the `at` of each kind's last line

    def record(self, kind: str, **fields: Any) -> None:
        """One line: `kind`, `at` (seconds since this process began the run), and the fields."""
        if self._path is None:
            return
        with self._lock:
            now = self._clock()
            if not self._started:
                self._start(self._path)
            if kind not in SEVERAL:
                self._write_out()
                self._lines.append(self._line(kind, now, fields))
            elif now - self._origin >= self._told[kind] + self._interval():
                self._tell(kind, now, fields)
            else:
                self._hold(kind, fields)
            if now - self._flushed > FLUSH_SECONDS:
                self._flush(self._path)
                self._flushed = now

    def _start(self, path: Path) -> None:
        self._started = True
        with contextlib.suppress(OSError):
            self._bytes = path.stat().st_size
        self._lines.append(self._line("start", self._origin, {"wall_clock": self._began, "format": FORMAT}))

    def _interval(self) -> float:
        """Seconds between two lines of a kind, by the size of the file: also over resumes."""
        stretch = self._bytes // STRETCH_BYTES
        return min(LONGEST_INTERVAL, FIRST_INTERVAL * 2.0 ** min(stretch - 1, 60)) if stretch else 0.0

    def _hold(self, kind: str, fields: Fields) -> None:
        held = self._held.get(kind)
        self._held[kind] = SEVERAL[kind](held, fields) if held is not None else fields

    def _tell(self, kind: str, now: float, fields: Fields | None = None) -> None:
        """One line of all that has come since the one before."""
        held = self._held.pop(kind, None)
        if held is not None:
            fields = {**(held if fields is None else SEVERAL[kind](held, fields)), "since": self._told[kind]}
        if fields is not None:
            self._told[kind] = round(now - self._origin, 6)
            self._records.append((kind, now, fields))

    def _write_out(self) -> None:
        """Make text of the records, many at once: one between two slices finds the code for it out of the cache."""
        while self._records:
            self._lines.append(self._line(*self._records.popleft()))

    def _line(self, kind: str, now: float, fields: Fields) -> str:
        line = json_text({"kind": kind, "at": round(now - self._origin, 6), **fields})
        self._bytes += len(line) + 1
        return line

    def close(self) -> None:
        with self._lock:
            if self._path is not None:
                now = self._clock()
                for kind in SEVERAL:
                    self._tell(kind, now)
                self._flush(self._path)

    def _flush(self, path: Path) -> None:
        self._write_out()
        if not self._lines:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_whole(path, "".join(f"{line}\n" for line in self._lines).encode())
        except OSError as error:
            self._unwritable.tell(f"cannot write {path}: {error.strerror}; training goes on without its records")
        else:
            self._lines.clear()


def _tasks(one: Fields, other: Fields) -> Fields:
    """Two lines of tasks as one: sums, the mean loss, and what the newest knew."""
    sums = ("samples", "slices", "compute_seconds", "data_seconds", "wait_seconds")
    both = {**other, **{name: round(one[name] + other[name], 6) for name in sums}}
    told = [line for line in (one, other) if line["loss"] is not None and line["samples"]]
    samples = sum(line["samples"] for line in told)
    both["loss"] = sum(line["loss"] * line["samples"] for line in told) / samples if samples else None
    return {**both, "tasks": one.get("tasks", 1) + other.get("tasks", 1)}


def _rounds(one: Fields, other: Fields) -> Fields:
    """Two lines of rounds as one: seconds together, the mean staleness of those that were given something."""
    stale = [(line["staleness"], line.get("contributions", 1)) for line in (one, other)]
    known = [(staleness, weight) for staleness, weight in stale if staleness is not None]
    weight = sum(weight for _, weight in known)
    return {
        **other,
        "seconds": round(one["seconds"] + other["seconds"], 6),
        "staleness": sum(staleness * weight for staleness, weight in known) / weight if weight else None,
        "contributions": weight,
        "rounds": one.get("rounds", 1) + other.get("rounds", 1),
    }


SEVERAL = {"piece": _tasks, "round": _rounds}  # kinds of which a line may tell several


def append_whole(path: Path, block: bytes) -> None:
    """All of it or nothing, so that no line is torn; OSError."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if _write(file, block) < len(block):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(file: BinaryIO, block: bytes) -> int:
    return file.write(block)
