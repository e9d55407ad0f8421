"""What is on disk is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from hetsync.errors import UserError


def write_atomically(path: Path, content: str) -> None:
    """Replace a text file as one step, flushed to disk first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; free space or choose another run.dir") from error


def sync_folder(path: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
