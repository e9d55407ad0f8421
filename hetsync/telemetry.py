"""One JSON-lines file a rank: what it computed, where it waited, what travelled. Times are in seconds."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from hetsync.errors import Trouble

FLUSH_SECONDS = 2.0
KEPT = 100_000  # records, while they cannot be written; the oldest go first


class Telemetry:
    """Appends records; safe from several threads. Without a path it keeps nothing.

    The first record of a process, `start`, says when its `at` was 0.

    Records that cannot be written are kept for a while and tried again; the job does not end for them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._unwritable = Trouble()
        self._origin = time.monotonic()
        self._flushed = self._origin
        self._began = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        self._started = False  # has there been anything to tell?

    def record(self, kind: str, **fields: Any) -> None:
        """One line: `kind`, `at` (seconds since this process began the run), and the fields."""
        if self._path is None:
            return
        now = time.monotonic()
        line = self._line(kind, now, **fields)
        with self._lock:
            if not self._started:
                self._started = True
                self._lines.append(self._line("start", self._origin, wall_clock=self._began))
            self._lines.append(line)
            if now - self._flushed > FLUSH_SECONDS:
                self._flush(self._path)
                self._flushed = now

    def _line(self, kind: str, now: float, **fields: Any) -> str:
        return json.dumps({"kind": kind, "at": round(now - self._origin, 6), **fields})

    def close(self) -> None:
        with self._lock:
            if self._path is not None:
                self._flush(self._path)

    def _flush(self, path: Path) -> None:
        if not self._lines:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_whole(path, "".join(f"{line}\n" for line in self._lines).encode())
        except OSError as error:
            self._unwritable.tell(f"cannot write {path}: {error.strerror}; training goes on without its records")
        else:
            self._lines.clear()


def append_whole(path: Path, block: bytes) -> None:
    """All of it or nothing, so that no line is torn; OSError."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if _write(file, block) < len(block):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(file: BinaryIO, block: bytes) -> int:
    return file.write(block)
