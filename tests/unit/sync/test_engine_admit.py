"""Another rank's joining, which the main thread asks for and the communication thread does."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetsync.plane.base import DamagedError, MembersLost
from hetsync.plane.local import LocalPlane
from hetsync.sync.communicator import Communicator
from hetsync.sync.engine import Engine
from hetsync.sync.messages import Holding
from hetsync.sync.shared_state import EngineOptions


def test_nobody_is_admitted_by_whoever_has_not_heard_of_a_death() -> None:
    engine = Engine(LocalPlane(), torch.nn.Linear(2, 2), EngineOptions(4))
    engine._shared.recoveries += 1
    with pytest.raises(MembersLost):
        engine.admit(lambda: None)
    assert engine._shared.admit is None


def test_a_damaged_message_is_told_of_once() -> None:
    """And not at each later join."""
    made: Any = object.__new__(Communicator)
    made._plane = SimpleNamespace(rank=1, members=(0, 1, 2))
    made._keeps_going, made._in_vain, made._requested = True, 0, []
    made._books = made._coordinator = made._newest = made._damaged = None
    holding = SimpleNamespace(holding=lambda: Holding((), None, False))
    made._shared = SimpleNamespace(
        changed=threading.Condition(),
        recovering=False,
        outbox=deque(),
        worker=holding,
        landed=5,
        at_rest=True,
        cap=None,
        evaluating=None,
        admit=None,
    )
    told: list[int | None] = []
    made._agree = lambda admit=None: told.append(made._report().damaged)
    made._recover(DamagedError("it was lost", 2))
    made._shared.admit = lambda: None
    assert made._admit()
    assert told == [2, None]
