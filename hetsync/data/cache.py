"""Folders of prepared data, built once a host and read by all its ranks (memory-mapped where large)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from hetsync.errors import UserError, complain
from hetsync.files import BLOCK_BYTES, flush_to_disk, user_cache

PATIENCE_SECONDS = 10.0  # before a waiting process says what it waits for
LIMIT_SECONDS = 3600.0  # large sets of images are decoded one by one
POLL_SECONDS = 0.1
DIGESTS = "digests.json"
SAMPLES = 16  # blocks of a large file that are looked at
CACHE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def cached_folder(
    name: str,
    sources: Sequence[Path],
    version: str,
    build: Callable[[Path], None],
    limit_seconds: float = LIMIT_SECONDS,
) -> Path:
    """A folder with what `build` made of the sources; built at most once for their present state.

    Its files are compared with what was built: sizes, and content as far as `fingerprint` sees. What is damaged is
    built once more.

    One process builds, the others of the host (or of the cluster, where home is shared) wait for it. The folder
    appears complete or not at all: after a build that died, the next process builds anew.

    Args:
        name: Of the data set; the folder is hetsync/data/NAME-KEY in the user's cache.
        sources: Files that the content depends on; a folder stands for all files below it. The key covers
            their paths, sizes and times of change.
        version: Of the content's layout, with every option that changes the content.
        build: Writes the content into the folder given, which is empty.
        limit_seconds: How long to wait for another process's build.

    Raises:
        UserError: The cache cannot be written, the wait took too long, or what was just built is damaged.
        OSError: A source cannot be read.
    """
    folder = user_cache("data") / f"{name}-{_key(sources, version)}"
    if folder.is_dir() and _damage(folder) is None:
        return folder
    with _locked(folder, limit_seconds):
        if folder.is_dir() and (damage := _damage(folder)) is not None:
            complain(f"the data cache {folder} is damaged ({damage}), so it is built anew")
            _remove(folder)
        if not folder.is_dir():
            _build(folder, build)
            if (damage := _damage(folder)) is not None:
                raise UserError(
                    f"the data cache {folder} is damaged as soon as it is built ({damage}): "
                    "look at its disk, or set XDG_CACHE_HOME to another folder"
                )
    return folder


def fingerprint(path: Path) -> str:
    """Digest of a file's size and of its content, at most 16 MB of it, to be had in a fraction of a second.

    A file up to that size is read in whole. Of a larger one the first and last MiB and others evenly between are read:
    that notices a file that is cut, longer, empty, of other data, or overwritten in large parts, but not a few bytes.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for sample in range(SAMPLES):
            start = sample * BLOCK_BYTES
            file.seek(max(start, (size - BLOCK_BYTES) * sample // (SAMPLES - 1)))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _fingerprints(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / DIGESTS)
    return {str(path.relative_to(folder)): fingerprint(path) for path in files}


def _damage(folder: Path) -> str | None:
    """What is not as it was built."""
    try:
        wanted = json.loads((folder / DIGESTS).read_text())
        found = _fingerprints(folder)
        if found == wanted:
            return None
        changed = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        return f"{changed[0]} is not as it was built"
    except (OSError, ValueError, AttributeError) as error:
        return f"{DIGESTS}: {error}"


def _remove(folder: Path) -> None:
    """Out of the way in one step."""
    away = folder.with_name(f".{folder.name}.damaged")
    shutil.rmtree(away, ignore_errors=True)
    try:
        folder.rename(away)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    shutil.rmtree(away, ignore_errors=True)


def save_rows(path: Path, rows: int, batches: Iterable[np.ndarray]) -> None:
    """Write an array of some rows as .npy piece by piece, for arrays larger than memory.

    Read it by `np.load(path, mmap_mode="r")`. Unlike a memory map, a full disk raises OSError here, not SIGBUS.
    """
    written = 0
    with path.open("wb") as file:
        for batch in batches:
            if not written:
                descr = np.lib.format.dtype_to_descr(batch.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": (rows, *batch.shape[1:])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(np.ascontiguousarray(batch).data)
            written += len(batch)
    if written != rows:
        raise ValueError(f"{path}: {written} rows came where {rows} were announced")


def _key(sources: Sequence[Path], version: str) -> str:
    digest = hashlib.sha256(version.encode())
    for file in (file for source in sources for file in _files(source.resolve())):
        status = file.stat()
        digest.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _files(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield from sorted(path for path in source.rglob("*") if path.is_file())
    else:
        yield source


@contextlib.contextmanager
def _locked(folder: Path, limit_seconds: float) -> Iterator[None]:
    """The system frees the lock of a process that dies."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _wait(lock, folder, limit_seconds)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def _wait(lock: FileLock, folder: Path, limit_seconds: float) -> None:
    patience = min(PATIENCE_SECONDS, limit_seconds)
    with contextlib.suppress(Timeout):
        lock.acquire(patience, POLL_SECONDS)
        return
    complain(f"waiting for another process that prepares {folder}")
    try:
        lock.acquire(limit_seconds - patience, POLL_SECONDS)
    except Timeout as error:
        raise UserError(
            f"another process has been preparing the data cache {folder} for more than {limit_seconds:.0f} s: "
            "start the job again when it is done, or end that process"
        ) from error


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    """Under the lock: nobody else writes here, so what lies in the temporary folder is of a build that died."""
    building = folder.with_name(f".{folder.name}.building")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        build(building)
        (building / DIGESTS).write_text(json.dumps(_fingerprints(building), indent=1))
        for path in building.rglob("*"):
            flush_to_disk(path)
        building.rename(folder)
        flush_to_disk(folder.parent)
    except OSError as error:
        if error.errno in CACHE_ERRNOS or _is_short_write(error):
            raise _unwritable(folder.parent, error) from error
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_short_write(error: OSError) -> bool:
    """numpy's own report of a full disk, which carries no errno."""
    return error.errno is None and "requested and" in str(error)


def _unwritable(cache: Path, error: OSError) -> UserError:
    return UserError(
        f"the data cache {cache} cannot be written: {error.strerror or error}; "
        "free space there, or set XDG_CACHE_HOME to another folder"
    )
