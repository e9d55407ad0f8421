"""Jobs below Accelerate's objects, of which a process has one: what the tests of both doors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from hetsync.errors import UserError
from hetsync.neighbours.accelerate_state import JOB
from hetsync.plane.base import Plane


@pytest.fixture(autouse=True)
def no_state_left(plane: Plane) -> Iterator[None]:
    """For the module that imports it."""
    yield
    end_job()
    GradientState._reset_state()


def end_job() -> None:
    job = PartialState._shared_state.get(JOB)
    if job is not None and job.in_batch:
        job._give_up(UserError("the test has seen enough"))
    elif job is not None:
        job.close()
    AcceleratorState._reset_state(reset_partial_state=True)
