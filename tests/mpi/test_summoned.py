"""A process that is started for a dead rank's place, and comes up when the job is about to end.

mpirun -np 1 python -m pytest --with-mpi tests/mpi/test_summoned.py
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hetsync.plane import mpi_summoned
from hetsync.plane.mpi_summoned import DISMISSAL, SECONDS_TO_COME_UP, SECONDS_TO_HEAR, MpiSummoned

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1)]


class Starting:
    """In MPI's place: a process that comes up when it is told to."""

    Exception = mpi_summoned.MPI.Exception

    def __init__(self) -> None:
        self.comes_up = threading.Event()
        self.COMM_SELF = self

    class Info:
        @staticmethod
        def Create() -> Starting.Info:
            return Starting.Info()

        def Set(self, key: str, value: str) -> None: ...

    def Spawn(self, *words: Any) -> object:
        self.comes_up.wait()
        return object()


class Link:
    def __init__(self, sent: list[int]) -> None:
        self.sent = sent

    def send(self, value: Any, tag: int = 1, seconds: float = 0.0) -> None:
        self.sent.append(tag)

    def receive(self) -> None:
        return None


def test_a_process_that_comes_up_late_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its starter ends the job in order: it has more patience than for one that has come up."""
    starting, sent = Starting(), list[int]()
    monkeypatch.setattr(mpi_summoned, "MPI", starting)
    monkeypatch.setattr(mpi_summoned, "_Link", lambda comm: Link(sent))
    summoned = MpiSummoned(1, 2, "told")
    timer = threading.Timer(0.3, starting.comes_up.set)
    timer.start()
    summoned.dismiss(5.0)
    timer.join()
    assert DISMISSAL in sent
    assert SECONDS_TO_COME_UP > 60 > SECONDS_TO_HEAR


def test_an_error_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, sent = Starting(), list[int]()
    monkeypatch.setattr(mpi_summoned, "MPI", starting)
    monkeypatch.setattr(mpi_summoned, "_Link", lambda comm: Link(sent))
    MpiSummoned(1, 2, "told").dismiss(0.1)
    assert sent == []
    starting.comes_up.set()
