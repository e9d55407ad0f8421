"""When a job saves: at rest, where a checkpoint is due by samples, by time, or because it is the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetsync.config.schema import RunConfig
from hetsync.errors import Trouble
from hetsync.files import DiskError
from hetsync.sync.milestones import CHECKPOINT
from hetsync.train import checkpoint
from hetsync.train.frozen_file import FrozenFile
from hetsync.train.session import Session


def progress_of(session: Session, seconds_before: float) -> checkpoint.Progress:
    """Of a job at rest, which goes on from one that has trained for so many seconds."""
    return checkpoint.Progress(
        samples_applied=session.applied,
        version=session.version,
        ranks=session.plane.size,
        shares=tuple(session.shares[rank] for rank in sorted(session.plane.members)),
        train_seconds=seconds_before + session.totals.train_seconds,
        **asdict(session.settings),
    )


class Saver:
    """Every rank has one; the first writes. `saved`: there is a checkpoint by this process; `newest` was written last.

    None where it stood there already: what has changed at the rest since is not in it."""

    def __init__(
        self,
        session: Session,
        run_folder: Path,
        run: RunConfig,
        seconds_before: float,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`seconds_before`: of training, by the jobs that this one goes on from. `before` is called before each
        checkpoint, on all ranks."""
        self.saved = False
        self.newest: Path | None = None
        self._session = session
        self._folder = run_folder / "checkpoints"
        self._keep = run.keep_checkpoints
        self._interval_seconds = run.checkpoint_seconds
        self._seconds_before = seconds_before
        self._before = before
        self._frozen = FrozenFile(session.digests)
        self._unsaved = Trouble()
        self._alarm: threading.Timer | None = None

    def start_timer(self) -> None:
        """From now on the first rank asks for checkpoints by time."""
        if self._session.plane.leads and self._interval_seconds is not None:
            longest = min(self._interval_seconds, threading.TIMEOUT_MAX)
            self._alarm = threading.Timer(longest, self._session.request_rest, [CHECKPOINT])
            self._alarm.daemon = True
            self._alarm.start()

    def stop_timer(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def save(self, state: Callable[[], Mapping[str, Any]], last: bool) -> None:
        """Collective, at rest. Training goes on without a checkpoint that cannot be written, unless it is the last.
        `state`, asked for where it is written: what else is to be kept.

        DiskError for the last one.
        """
        self.stop_timer()
        self.newest = None
        plane, agreed = self._session.plane, False

        def agree() -> None:
            """A rank that the others have given up never gets here: only their checkpoint counts."""
            nonlocal agreed
            agreed = True
            plane.barrier()

        try:
            self._before()
            if plane.leads:
                self._write(state(), agree)
                self.saved = True
        except DiskError as error:
            if last:
                raise
            self._unsaved.tell(f"{error}; training goes on")
        if not agreed:
            plane.barrier()
        plane.barrier()
        if not last:
            self.start_timer()

    def _write(self, state: Mapping[str, Any], agree: Callable[[], None]) -> None:
        session = self._session
        progress = progress_of(session, self._seconds_before)
        outer = session.outer.velocity if session.outer is not None else None
        before = checkpoint.complete(self._folder)
        written = checkpoint.save(
            self._folder, progress, session.model, session.optimizers, outer, self._keep, state, agree, self._frozen
        )
        self.newest = None if written in before else written
