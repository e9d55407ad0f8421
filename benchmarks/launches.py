"""What a communication thread costs the main thread, which launches small operations, by Python's lock.

    launch/local 2 -- python -m benchmarks.launches

The main thread adds to a tensor of eight values, over and over: alone, beside a thread that polls for messages, and
beside one that has a sum of 10 MB under way. CPU time, so that it depends little on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

from benchmarks.common.report import source, spread
from hetsync.plane.mpi import MpiPlane
from hetsync.threads import cpu_seconds, single_threaded

LAUNCHES = 20_000
SUM_VALUES = 2_500_000
PAUSES_SECONDS = (4e-3, 1e-3, 0.0)


class Beside:
    """A thread that polls as a communication thread does; `sums` keeps one sum under way."""

    def __init__(self, plane: MpiPlane, pause_seconds: float, sums: bool) -> None:
        self.polls = 0
        self._plane, self._pause_seconds = plane, pause_seconds
        self._lock = threading.Lock()
        self._posted, self._limit = 0, math.inf if sums else 0
        self._ending = False
        self._thread = threading.Thread(target=single_threaded(self._run))
        self._thread.start()

    def _run(self) -> None:
        values = torch.zeros(SUM_VALUES)
        handle = None
        while True:
            self.polls += 1
            self._plane.receive()
            if handle is None or handle.done():
                with self._lock:
                    if self._posted < self._limit:
                        handle = self._plane.allreduce(values)
                        self._posted += 1
                    elif self._ending:
                        return
            if self._pause_seconds:
                time.sleep(self._pause_seconds)
            else:
                os.sched_yield()

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self._thread)

    def end(self) -> None:
        """Collective, as every rank is to post as many sums."""
        with self._lock:
            self._limit = self._posted
        most = MPI.COMM_WORLD.allreduce(self._posted, MPI.MAX)
        with self._lock:
            self._limit, self._ending = most, True
        self._thread.join()


def launch_microseconds(clock: Callable[[], float]) -> float:
    values = torch.zeros(8)
    began = clock()
    for _ in range(LAUNCHES):
        values.add_(1.0)
    return 1e6 * (clock() - began) / LAUNCHES


def row(plane: MpiPlane, pause_seconds: float, sums: bool, repetitions: int) -> str:
    alone, beside, polls = [], [], []
    for _ in range(repetitions):
        MPI.COMM_WORLD.Barrier()
        alone.append(launch_microseconds(time.thread_time))
        thread = Beside(plane, pause_seconds, sums)
        before, counted = thread.cpu_seconds, thread.polls
        beside.append(launch_microseconds(time.thread_time))
        polls.append(1e6 * (thread.cpu_seconds - before) / max(thread.polls - counted, 1))
        thread.end()
    ratio = statistics.median(beside) / statistics.median(alone)
    under_way = "a sum of 10 MB" if sums else "nothing"
    cells = [under_way, f"{1000 * pause_seconds:g}", *(spread(each, ".2f") for each in (alone, beside))]
    return f"| {' | '.join([*cells, f'{ratio:.2f}', spread(polls, '.0f')])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7, help="of each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plane = MpiPlane()
    lines = ["| under way | pause, ms | launch alone, µs | beside, µs | ratio | a poll, µs |", "| --- " * 6 + "|"]
    for sums in (False, True):
        for pause_seconds in PAUSES_SECONDS:
            lines.append(row(plane, pause_seconds, sums, options.repetitions))
    if plane.rank == 0:
        print(source("launches"), "", *lines, sep="\n")
    plane.close()


if __name__ == "__main__":
    main()
