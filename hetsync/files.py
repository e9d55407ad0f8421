"""What is on disk is whole or not there; JSON for any reader; and what the files of a run folder are called."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from hetsync.errors import UserError

BLOCK_BYTES = 2**20
RECIPE, PLAN, SUMMARY = "recipe.yaml", "plan.yaml", "summary.json"  # in a run folder
TEST, PREDICTIONS = "test.json", "predictions.parquet"  # there, too


class DiskError(UserError):
    """Something could not be written: the disk is full, read-only or gone."""


def write_atomically(path: Path, content: str | bytes, otherwise: str = "choose another run folder") -> None:
    """Replace a file as one step, flushed to disk first; text is written as UTF-8.

    DiskError where that fails. `otherwise`: what its reader may do instead of freeing space.
    """
    _check_name(path)
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
        raise DiskError(f"cannot write {path}: {error.strerror}; free space or {otherwise}") from error


def user_cache(name: str) -> Path:
    """The folder of this name in the user's cache. UserError where nothing says where that is."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetsync" / name
    except RuntimeError as error:  # an account without a home, as in some containers
        raise UserError(
            "there is no home folder to keep a cache in: let XDG_CACHE_HOME name a folder, or set HOME"
        ) from error


def check_writable(path: Path) -> None:
    """DiskError, before anything that takes long, where no file can be written there."""
    _check_name(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DiskError(f"cannot write {path}: {folder} is no folder that may be written; choose another")


def _check_name(path: Path) -> None:
    if not path.name or path.is_dir():
        raise DiskError(f"cannot write {str(path)!r}: it is a folder; give the name of a file")


def json_text(value: Any) -> str:
    """JSON in one line. It has no inf, -inf and nan: they become these texts, of which `float` makes them again."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(value), allow_nan=False)


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(each) for each in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def flush_to_disk(path: Path) -> None:
    """Make durable a file's content, or the renames in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
