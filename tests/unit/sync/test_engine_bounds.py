"""No wait without a bound: what the main thread does where its communication thread does not come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from hetsync.plane.base import StalledError
from hetsync.plane.local import LocalPlane
from hetsync.sync.engine import Engine
from hetsync.sync.shared_state import EngineOptions

SECONDS = 15.0


class DeafPlane(LocalPlane):
    """A look never ends once it is `deaf`, as where an MPI library hangs. One rank alone has no such thread."""

    def __init__(self) -> None:
        super().__init__()
        self.members = 0, 1
        self.deaf, self.hangs, self.over = threading.Event(), threading.Event(), threading.Event()

    def receive(self) -> Sequence[tuple[int, Any]]:
        if self.deaf.is_set():
            self.hangs.set()
            self.over.wait(2 * SECONDS)
        return super().receive()


@pytest.fixture
def engine() -> Iterator[Engine]:
    plane = DeafPlane()
    made = Engine(plane, torch.nn.Linear(2, 2), EngineOptions(4, timeout_seconds=1.0))
    made.start()
    plane.deaf.set()
    assert plane.hangs.wait(SECONDS)
    yield made
    plane.over.set()
    made.stop()  # its thread would go on beside later tests


def outcome(wait: Callable[[], object]) -> BaseException | None:
    """What a call raised; AssertionError where it hangs."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            wait()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


@pytest.mark.parametrize("what", ["next_work", "allreduce", "stop"])
def test_a_communication_thread_that_hangs_is_told_of(engine: Engine, what: str) -> None:
    arguments = [torch.ones(3)] if what == "allreduce" else []
    error = outcome(lambda: getattr(engine, what)(*arguments))
    assert isinstance(error, StalledError)
    assert "communication thread of rank 0" in str(error)
