"""One JSON-lines file a rank: what it computed, where it waited, what travelled. Times are in seconds."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from hetsync.errors import UserError

FLUSH_SECONDS = 2.0


class Telemetry:
    """Appends records; safe from several threads. Without a path it keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._origin = time.monotonic()
        self._flushed = self._origin
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def record(self, kind: str, **fields: Any) -> None:
        """One line: `kind`, `at` (seconds since this process began the run), and the fields. UserError: full disk."""
        if self._file is None:
            return
        now = time.monotonic()
        line = json.dumps({"kind": kind, "at": round(now - self._origin, 6), **fields})
        try:
            with self._lock:
                self._file.write(line + "\n")
                if now - self._flushed > FLUSH_SECONDS:
                    self._file.flush()
                    self._flushed = now
        except OSError as error:
            raise _unwritable(self._file, error) from error

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            raise _unwritable(file, error) from error


def _unwritable(file: TextIO, error: OSError) -> UserError:
    return UserError(f"cannot write {file.name}: {error.strerror}; free space and go on with --resume")
