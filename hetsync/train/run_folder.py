"""Run folders: `runs/NAME-DATE-TIME/`, or the one that the recipe names; one job at a time in each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import yaml

from hetsync.config.schema import Config, RunConfig
from hetsync.errors import UserError, brief, complain
from hetsync.files import PLAN, RECIPE, SUMMARY, DiskError, write_atomically
from hetsync.launchers import write_run
from hetsync.plane.base import Plane, decided_by_first
from hetsync.train import data_facts

Resume = bool | Literal["auto"] | Path

LOCK = "job.lock"
SECONDS_TO_LET_GO = 5.0  # of a lock, for processes that a dead rank had started
MOST_AT_ONCE = 1000  # jobs of one name that begin in one second


class Status(str, Enum):
    """A summary's `status`: of a job under way, or killed; of one that an error has ended; of one that has saved to be
    resumed; of one at its end."""

    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"
    FINISHED = "finished"

    def __str__(self) -> str:  # as StrEnum, which Python 3.10 has not
        return str(self.value)


@contextlib.contextmanager
def opened_folder(plane: Plane, run: RunConfig, resume: Resume) -> Iterator[tuple[Path, bool]]:
    """Collective: the run folder, as `working_folder` has it, and whether there is a run in it to go on with.

    `resume`: False begins anew, True goes on with the run in `run.dir`, "auto" where there is one; a path goes on
    there.
    """
    folder = decided_by_first(plane, lambda: _resumed(run, resume))
    with working_folder(plane, run, folder) as opened:
        yield opened, folder is not None


def _resumed(run: RunConfig, resume: Resume) -> Path | None:
    if isinstance(resume, Path) or resume is False:
        return resume or None
    if resume not in (True, "auto"):
        raise UserError(f"resume is {resume!r}: give True, False or 'auto'")
    if run.dir is None:
        raise UserError("resume needs the folder of the run: give hetsync.join a run")
    there = has_checkpoint(Path(run.dir))
    if resume is True and not there:
        raise UserError(
            f"{run.dir}: there is no complete checkpoint to go on from; start afresh, or give resume='auto'"
        )
    return Path(run.dir) if there else None


def has_checkpoint(folder: Path) -> bool:
    """A complete one: a job that died in its first leaves only a part of it."""
    return any((folder / "checkpoints").glob("samples-*/state.json"))


@contextlib.contextmanager
def working_folder(plane: Plane, run: RunConfig, resume: Path | None) -> Iterator[Path]:
    """Collective: rank 0's choice on every rank, which no other job may use meanwhile.

    It is empty of earlier runs unless one is resumed; one that is made here and stays empty is removed again. Whoever
    may write in it could forge what a job goes on from: other users may not, and UserError where they could before.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(_not_writable_for_others())
        folder = decided_by_first(plane, lambda: held.enter_context(_held(run, resume)))
        if plane.rank == 0:
            write_run(folder)
        yield folder


@contextlib.contextmanager
def shared_folder(folder: Path) -> Iterator[Path]:
    """The run folder of a job that this process joins, and that another holds. UserError where it is not there."""
    if not folder.is_dir():
        raise UserError(f"the job's run folder is {folder}, which is not on this host: join from one that sees it")
    with _not_writable_for_others():
        yield folder


@contextlib.contextmanager
def _not_writable_for_others() -> Iterator[None]:
    """Inside, whatever umask the user has: of each file that this process makes. The group's rights stay."""
    before = os.umask(0o077)
    os.umask(before | stat.S_IWOTH)
    try:
        yield
    finally:
        os.umask(before)


def _check_protected(folder: Path) -> None:
    if folder.stat().st_mode & stat.S_IWOTH:
        if _ignores_modes(folder):
            complain(
                f"run folder {folder} is on a file system without permissions: whoever can write there can forge it"
            )
            return
        raise UserError(
            f"run folder {folder} can be written by every user of this machine, who could then forge its checkpoints:"
            f" chmod -R o-w {folder}, or choose another"
        )


def _ignores_modes(folder: Path) -> bool:
    """File systems of other kinds than Unix's (vfat, CIFS, some of containers) show one mode for all."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as probe:  # made for its owner alone
            return bool(os.stat(probe).st_mode & stat.S_IWOTH)
    except OSError:
        return False


@contextlib.contextmanager
def _held(run: RunConfig, resume: Path | None) -> Iterator[Path]:
    if resume is not None:
        _check_protected(resume)
        with _locked(resume.resolve()):
            yield resume.resolve()
        return
    folder = _made(run)
    _check_protected(folder)
    try:
        with _locked(folder):
            _check_unused(folder)
            yield folder.resolve()
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # of a job that failed before it wrote anything


def status_of(folder: Path) -> str | None:
    """What the summary of the run says; None where there is no summary."""
    try:
        return str(json.loads((folder / SUMMARY).read_text())["status"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def mark_failed(folder: Path) -> None:
    """The summary of a run under way says that it has failed: by the rank that has, as its failure ends rank 0 too."""
    if status_of(folder) == Status.RUNNING:
        path = folder / SUMMARY
        with contextlib.suppress(OSError, DiskError):  # the failure itself is what is to be told
            write_atomically(path, json.dumps({**json.loads(path.read_text()), "status": Status.FAILED}, indent=1))


def keep(path: Path, text: str) -> None:
    """Write a file; where it held something else, that stays beside it as NAME-1, NAME-2, ... DiskError."""
    before = path.read_text(encoding="utf-8") if path.is_file() else text
    if before != text:
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        write_atomically(next(name for name in names if not name.exists()), before)
    write_atomically(path, text)


@contextlib.contextmanager
def recorded(
    folder: Path, config: Config, plan: str | None, facts: Mapping[str, Any], saved: Callable[[], bool]
) -> Iterator[None]:
    """The recipe of the job inside, and the text of its plan, by which `--resume` goes on whatever becomes of the file;
    and what its data tell of themselves.

    They are written as `keep` does it. A job that fails before it has saved anything gives their places back to those
    before, which have led to the newest checkpoint.
    """
    with contextlib.ExitStack() as written:
        data_facts.keep(folder, facts)
        if plan is not None:
            written.enter_context(_recorded(folder / PLAN, plan, saved))
        recipe = yaml.safe_dump(asdict(config), sort_keys=False)
        written.enter_context(_recorded(folder / RECIPE, recipe, saved))
        yield


@contextlib.contextmanager
def _recorded(path: Path, text: str, saved: Callable[[], bool]) -> Iterator[None]:
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    keep(path, text)
    try:
        yield
    except BaseException:
        if before is not None and not saved():
            write_atomically(path, before)
        raise


def _made(run: RunConfig) -> Path:
    folder = Path(run.dir) if run.dir else Path("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if run.dir:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for name in (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, MOST_AT_ONCE))):
            with contextlib.suppress(FileExistsError):  # of a job that began in the same second
                name.mkdir(parents=True)
                return name
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    except (OSError, ValueError) as error:  # no name of a file
        why = error.strerror if isinstance(error, OSError) else error
        shown = brief(str(folder)).encode(errors="backslashreplace").decode()
        raise UserError(f"run folder {shown} cannot be made: {why}; choose another") from error


def _check_unused(folder: Path) -> None:
    """A job that has failed or died before it saved anything leaves nothing to go on with."""
    if has_checkpoint(folder) or status_of(folder) not in (None, Status.RUNNING, Status.FAILED):
        raise UserError(
            f"run folder {folder} holds a run already: choose another, or go on with --resume {folder} (in a script:"
            " resume='auto')"
        )


@contextlib.contextmanager
def taken_over(folder: Path) -> Iterator[None]:
    """Inside, the folder is held by a rank whose predecessor has died. UserError where another job was faster."""
    with contextlib.ExitStack() as held:
        deadline = time.monotonic() + SECONDS_TO_LET_GO
        while True:
            try:
                held.enter_context(_locked(folder))
                break
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other jobs out, by a lock of the operating system on a file that names the holder.

    The lock ends with its holder, however that ends, so what a killed job leaves is taken over. Other hosts see it as
    far as the file system tells them: NFS does (version 4, or 3 with its lock daemon), and Lustre mounted with `flock`;
    mounts whose locks are local (`nolock`, `localflock`) keep out the jobs of one host only. Where there are no locks
    at all, a file counts whose process lives or was on another host.
    """
    # Not filelock's: it leaves the file behind, and its versions differ in what becomes of a file that names the holder
    # and in what they do where there are no locks.
    path = folder / LOCK
    try:
        descriptor = _open_locked(path)
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}; free space or choose another run folder") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                holder = {"host": socket.gethostname(), "pid": os.getpid()}
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
                return descriptor
        except FileNotFoundError:
            pass  # removed by the holder that has just ended: lock the next one
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        host, pid = _holder(path)
        raise UserError(
            f"run folder {path.parent} is in use by process {pid} on {host}: wait for its end, or choose another"
        ) from None
    except OSError:  # no locks in this file system
        host, pid = _holder(path)
        if pid is not None and (host != socket.gethostname() or Path(f"/proc/{pid}").exists()):
            raise UserError(
                f"run folder {path.parent} is in use by process {pid} on {host}: if that has ended, remove {path}"
            ) from None


def _holder(path: Path) -> tuple[str | None, int | None]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(path.read_text())
        return str(told["host"]), int(told["pid"])
    return None, None
