"""What a rank tells of the time that synchronisation has taken from its device."""

from __future__ import annotations

import pytest
import torch

from hetsync.plane.local import LocalPlane
from hetsync.sync import overhead as module
from hetsync.sync.engine import Engine
from hetsync.sync.overhead import MainThreadTimer, Overhead
from hetsync.sync.shared_state import EngineOptions


@pytest.mark.parametrize(
    ("on_host", "process", "expected"),
    [
        (False, 10.0, 0.01),  # the device is another one: by the clock
        (True, 0.5, 0.02),  # all that computes has half a core: twice as long
        (True, 2.0, 0.005),  # two threads of a core each
        (True, 0.0, 0.01),  # too short for the clock
        (True, 0.005, 1.0),  # never more than there was
    ],
)
def test_work_counts_as_its_part_of_what_the_process_gets(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, process: float, expected: float
) -> None:
    timer, clock = MainThreadTimer(), 7.0
    overhead = Overhead(timer, lambda: timer.cpu_seconds, on_host)
    monkeypatch.setattr(module.time, "process_time", lambda: clock)
    assert overhead.since(1.0) == (0.0, 0.0)  # the first task after a rest
    timer.working.seconds += 0.01
    timer.waiting.seconds += 0.2
    clock += process
    assert overhead.since(1.0) == (pytest.approx(expected), pytest.approx(0.2))


def test_what_a_rest_takes_counts_for_nothing() -> None:
    timer = MainThreadTimer()
    overhead = Overhead(timer, lambda: timer.cpu_seconds, on_host=False)
    overhead.since(1.0)
    timer.waiting.seconds += 5.0
    overhead.forget()
    assert overhead.since(1.0) == (0.0, 0.0)


def test_elsewhere_than_on_the_host_only_the_main_threads_work_counts() -> None:
    timer = MainThreadTimer()
    overhead = Overhead(timer, lambda: 3.0, on_host=False)
    overhead.since(1.0)
    timer.working.seconds += 0.01
    assert overhead.since(1.0) == (pytest.approx(0.01), 0.0)


@pytest.mark.parametrize(("on_host", "expected"), [(True, 0.02), (False, 0.01)])
def test_an_engine_has_that_of_its_device(monkeypatch: pytest.MonkeyPatch, on_host: bool, expected: float) -> None:
    made = Engine(LocalPlane(), torch.nn.Linear(2, 2), EngineOptions(4, on_host=on_host))
    clock = 7.0
    monkeypatch.setattr(module.time, "process_time", lambda: clock)
    made._overhead.since(1.0)
    made.timer.working.seconds += 0.01
    clock += 0.5
    assert made._overhead.since(1.0) == (pytest.approx(expected), 0.0)
