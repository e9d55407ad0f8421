"""What is on disk is whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hetsync.errors import UserError


def write_atomically(path: Path, content: str | bytes, otherwise: str = "choose another run.dir") -> None:
    """Replace a file as one step, flushed to disk first; text is written as UTF-8.

    UserError where that fails. `otherwise`: what its reader may do instead of freeing space.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}; free space or {otherwise}") from error


def sync_folder(path: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
