"""What synchronisation takes of a rank: of its main thread, and of its device's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class Stopwatch:
    """Seconds in its blocks, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *failure: object) -> None:
        self.seconds += self._clock() - self._began


class MainThreadTimer:
    """What synchronisation takes of a rank's main thread: blocks that wait for other ranks, and blocks that copy or
    keep books. Blocks of one kind do not nest."""

    def __init__(self) -> None:
        self.waiting = Stopwatch(time.monotonic)
        self.working = Stopwatch(time.thread_time)

    @property
    def wait_seconds(self) -> float:
        return self.waiting.seconds

    @property
    def cpu_seconds(self) -> float:
        return self.working.seconds


@dataclass(frozen=True)
class Spent:
    """Seconds so far: CPU time of synchronisation, waits, and CPU time of the whole process."""

    work: float
    waits: float
    process: float


class Overhead:
    """For how long synchronisation's own work, and waits, keep a device from computing."""

    def __init__(self, timer: MainThreadTimer, cpu_seconds: Callable[[], float], on_host: bool) -> None:
        """`cpu_seconds` of all that synchronisation has cost the process so far, which counts where the host's cores
        compute (`on_host`); elsewhere only the main thread's part does."""
        self._timer = timer
        self._cpu_seconds = cpu_seconds
        self._on_host = on_host
        self._told: Spent | None = None

    def forget(self) -> None:
        """What comes before the next call counts for nothing."""
        self._told = None

    def since(self, seconds: float) -> tuple[float, float]:
        """Seconds of work and of waits since the last call, in which the device has computed for so many.

        Where the host's cores compute, work takes its part of all that the process gets of them: under a quota of a
        fifth of a core five times as long as by its own clock.
        """
        work = self._cpu_seconds() if self._on_host else self._timer.cpu_seconds
        now = Spent(work, self._timer.wait_seconds, time.process_time())
        before, self._told = self._told or now, now
        work = now.work - before.work
        if self._on_host and (process := now.process - before.process) > 0:
            work = min(work, process) / process * seconds
        return work, now.waits - before.waits
