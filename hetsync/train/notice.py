"""`RUN/join.json`: where processes that somebody starts by hand ask a running job for the place of a rank that has
died, and as what they are started (`hetsync join`)."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetsync.config.records import record
from hetsync.errors import UserError, brief, cause
from hetsync.files import write_atomically
from hetsync.start import STARTED_IN

NAME = "join.json"
FORMAT = 1
ELSE = "or requeue the job, and resume with more ranks"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """`asked_at`: of the plane; `command` is what a rank runs, in `directory`."""

    format: int
    asked_at: Mapping[str, Any]
    command: Sequence[str]
    directory: str


@contextmanager
def posted(folder: Path, asked_at: Mapping[str, Any]) -> Iterator[None]:
    """Inside, processes may ask this job."""
    command = [sys.executable, *sys.orig_argv[1:]]
    notice = Notice(format=FORMAT, asked_at=asked_at, command=command, directory=STARTED_IN)
    write_atomically(folder / NAME, json.dumps(asdict(notice), indent=1))
    (folder / NAME).chmod(0o600)
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / NAME).unlink()


def read(folder: Path) -> Notice:
    """UserError where there is none, or one that another user could have written: its command is run."""
    path = folder / NAME
    if not folder.is_dir():
        raise UserError(f"RUN is {str(folder)!r}, and there is no such folder: give the run folder of a running job")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is no file: {ELSE[3:]}")
        owners = {each.stat().st_uid for each in (folder, path)}
        open_to_others = path.stat().st_mode & 0o022 or folder.stat().st_mode & stat.S_IWOTH
        told = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {NAME}: its job has ended, or takes nobody in that is started by hand, which needs"
            f" fault.replace true and ranks that are started without MPI; start it so, {ELSE}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({cause(error)}): look at the run folder, {ELSE}") from error
    if owners != {os.getuid()} or open_to_others:
        raise UserError(
            f"{path} is another user's, or others may write there, and its command would be run: chmod go-w {path}, and"
            f" o-w {folder}, if both are yours, {ELSE}"
        )
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: use the HetSync that the job runs with, {ELSE}")
    notice = record(Notice, told, NAME)
    if not notice.command or any("\0" in word for word in notice.command):
        raise UserError(f"command is {brief(str(notice.command))} in {path}, which is none: {ELSE[3:]}")
    return notice
