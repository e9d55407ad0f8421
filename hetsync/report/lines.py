"""Whole lines of a file of telemetry, also while another process appends to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

BLOCK_BYTES = 2**22


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

    def head(self, most_bytes: int) -> Iterator[Record]:
        """The first ones; OSError."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                *lines, _ = file.read(most_bytes).split(b"\n")
            yield from self._records(lines)

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
                yield {**record, "kind": str(record["kind"]), "at": float(record["at"])}
            except (ValueError, KeyError, TypeError, RecursionError):
                self.unreadable += 1
