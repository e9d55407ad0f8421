"""What a rank tells of the time that synchronisation has taken from its device."""

from __future__ import annotations

import pytest
import torch

from hetsync.plane.local import LocalPlane
from hetsync.sync import engine as module
from hetsync.sync.engine import Engine
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
    made = Engine(LocalPlane(), torch.nn.Linear(2, 2), EngineOptions(4, on_host=on_host))
    clock = 7.0
    monkeypatch.setattr(module.time, "process_time", lambda: clock)
    assert made._kept_from_computing(1.0) == (0.0, 0.0)  # the first task after a rest
    made.timer.working.seconds += 0.01
    made.timer.waiting.seconds += 0.2
    clock += process
    assert made._kept_from_computing(1.0) == (pytest.approx(expected), pytest.approx(0.2))
