"""The controller's process beside rank 0: what was seen goes in through one queue, decisions come out of another.

It is started afresh (spawned), so nothing of MPI is in it, and runs with the least priority. Nobody ever waits for it:
`offer` and `answers` return at once, and whoever finds it dead, failed or silent goes on without it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hetsync.config.schema import ControlConfig
from hetsync.control.actions import Limits
from hetsync.control.controller import Controller, Decision
from hetsync.control.envelope import Envelope
from hetsync.control.registry import check, make_controller
from hetsync.errors import UserError
from hetsync.stop_signal import signals_held
from hetsync.sync.observation import Observation

NICENESS = 19
# Observations that may wait while the controller is busy. Old ones are of little use.
QUEUE_LENGTH = 1
# How soon after rank 0's end, however that came, the process ends too.
PARENT_SECONDS = 1.0
# What a controller gets to end by itself. It has nothing to save.
STOP_SECONDS = 2.0

# Configuration, seed and batch size to the controller. Called within the process.
Make = Callable[[ControlConfig, int, int], Controller]


@dataclass(frozen=True)
class Ready:
    """The controller is made; `cpu_seconds` of the process so far, here and below."""

    cpu_seconds: float


@dataclass(frozen=True)
class Decided:
    """The answer to the oldest observation that has none yet."""

    decision: Decision
    cpu_seconds: float


@dataclass(frozen=True)
class Failed:
    """The process ends with this error. `mistake`: it is the user's."""

    error: str
    mistake: bool


Answer = Ready | Decided | Failed


def safe_controller(config: ControlConfig, seed: int, batch_size: int) -> Controller:
    """What a recipe's `control` section names, kept within its limits."""
    return Envelope(make_controller(config, seed, batch_size), Limits.of(config))


class ControlProcess:
    """Rank 0's end. Used from one thread at a time."""

    def __init__(
        self, config: ControlConfig, seed: int, batch_size: int, log: Path | None = None, make: Make = safe_controller
    ) -> None:
        """Start the process. Its output is appended to `log`; None leaves it on this process's, and so does a file
        that cannot be opened.

        UserError where the policy in `config` cannot be read or does not fit.
        """
        check(config)
        self.config = config
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._observations: multiprocessing.Queue[Observation | None] = context.Queue(QUEUE_LENGTH)
        self._answers: multiprocessing.Queue[Answer] = context.Queue()
        self._observations.cancel_join_thread()  # nobody may read any more when this process ends
        self._process = context.Process(
            target=_serve,
            args=(make, (config, seed, batch_size), log, self._observations, self._answers),
            name="hetsync-control",
            daemon=True,
        )
        with _apart():
            self._process.start()
        atexit.register(self._process.kill)  # multiprocessing would ask by a signal that it does not hear
        with contextlib.suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._process.exitcode

    def offer(self, seen: Observation) -> bool:
        """Put an observation on the observation queue; False where that is full."""
        try:
            self._observations.put_nowait(seen)
        except queue.Full:
            return False
        return True

    def answers(self) -> list[Answer]:
        """What has come out of the answer queue since the last call."""
        out: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            while True:
                out.append(self._answers.get_nowait())
        return out

    def kill(self) -> None:
        """End it at once, without a word."""
        self._process.kill()

    def close(self, patience_seconds: float = STOP_SECONDS) -> None:
        """Ask it to end, wait so long, then kill it."""
        with contextlib.suppress(queue.Full):
            self._observations.put_nowait(None)
            self._process.join(patience_seconds)
        self._process.kill()
        self._process.join()
        atexit.unregister(self._process.kill)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """What a process started herein does not share: the user's script, and signals that are meant for rank 0."""
    # Spawning runs the script a second time in the new process, up to its MPI.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with signals_held():
            yield
    finally:
        sys.modules["__main__"] = main


def _serve(
    make: Make,
    arguments: tuple[ControlConfig, int, int],
    log: Path | None,
    observations: multiprocessing.Queue[Observation | None],
    answers: multiprocessing.Queue[Answer],
) -> None:
    """The process's life."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for controllers that load torch
    if log is not None:
        _write_to(log)
    try:
        controller = make(*arguments)
        answers.put(Ready(time.process_time()))
        while (seen := _next(observations)) is not None:
            decision = controller.decide(seen)
            answers.put(Decided(decision, time.process_time()))
    except Exception as error:
        mistake = isinstance(error, UserError)
        if not mistake:
            with contextlib.suppress(OSError):  # the disk is full
                traceback.print_exc()
        answers.put(Failed(str(error) if mistake else f"{type(error).__name__}: {error}", mistake))


def _next(observations: multiprocessing.Queue[Any]) -> Observation | None:
    """The next observation; None at the end of the job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        with contextlib.suppress(queue.Empty):
            seen: Observation | None = observations.get(timeout=PARENT_SECONDS)
            return seen
    return None


def _write_to(log: Path) -> None:
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return  # no reason to stop controlling
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
