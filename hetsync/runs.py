"""Run folders: `runs/NAME-DATE-TIME/`, or the one that the recipe names."""

from __future__ import annotations

import time
from pathlib import Path

from hetsync.config import RunConfig
from hetsync.errors import UserError
from hetsync.plane.base import Plane


def run_folder(plane: Plane, run: RunConfig, resume: Path | None) -> Path:
    """Collective: rank 0's choice on every rank, made and empty of earlier runs unless one is resumed."""
    told: Path | UserError | None = None
    if plane.rank == 0:
        try:
            told = _make(run, resume)
        except UserError as mistake:
            told = mistake
    told = plane.broadcast_object(told)
    if isinstance(told, UserError):
        raise told
    assert told is not None
    return told


def _make(run: RunConfig, resume: Path | None) -> Path:
    if resume is not None:
        return resume.resolve()
    folder = Path(run.dir) if run.dir else Path("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir {folder} cannot be made: {error.strerror}; choose another") from error
    if (folder / "checkpoints").exists() or (folder / "summary.json").exists():
        raise UserError(f"run.dir {folder} holds a run already: choose another, or go on with --resume {folder}")
    return folder.resolve()
