"""What rounds need to know of a sum comes to the host while nobody waits for the device.

The device is played by torch's "meta", on which whatever reads a value fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetsync.plane.local import LocalPlane
from hetsync.plane.staging import Test
from hetsync.sync.deltas import Nesterov
from hetsync.sync.device_order import DeviceOrder
from hetsync.sync.engine import Engine
from hetsync.sync.gradients import Gradients
from hetsync.sync.messages import NormMeasured, RoundCompleted, StartRound
from hetsync.sync.rounds import Rounds
from hetsync.sync.shared_state import EngineOptions
from hetsync.telemetry import Telemetry

META = torch.device("meta")
BATCH = 8
POLLS = 3


class SlowOrder(DeviceOrder):
    """Values that are read come after some polls, and all are 1."""

    def __init__(self) -> None:
        self.unread: list[torch.Tensor] = []

    def read(self, values: torch.Tensor) -> tuple[torch.Tensor, Test]:
        left = POLLS
        self.unread.append(values)

        def there() -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                self.unread = [each for each in self.unread if each is not values]
            return left <= 0

        return torch.ones(values.shape, dtype=values.dtype), there


class Listener:
    """Asks what a communication thread asks of a sum."""

    keeps_going = True

    def __init__(self, order: SlowOrder) -> None:
        self.order = order
        self.given: list[dict[int, int]] = []
        self.completions: list[RoundCompleted] = []

    def flush(self) -> int:
        return 0

    def landed(self, start: StartRound, summed: Any) -> None:
        assert not self.order.unread, "the lock is taken before all is there"
        self.given.append(summed.samples_given())

    def completed(self, event: RoundCompleted) -> None:
        self.completions.append(event)

    def has_closed(self, number: int) -> bool:
        return True


def rank(model: torch.nn.Module, outer: Nesterov | None = None, norms: bool = True) -> tuple[Engine, Rounds, Listener]:
    """Whose communication thread is played, too."""
    options = EngineOptions(BATCH, measure_norms=norms)
    engine = Engine(LocalPlane(), model, options, outer=outer)
    shared = engine._shared
    order = shared.order = SlowOrder()
    shared.ranks_counted = 1
    shared.weights = list(model.parameters())
    shared.buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    listener = Listener(order)
    rounds = Rounds(LocalPlane(), options, shared, listener, Telemetry(None), lambda start, steps: steps)
    return engine, rounds, listener


def polls_to_land(engine: Engine, rounds: Rounds, start: StartRound) -> int:
    """How often it was polled, each time without waiting."""
    with engine._shared.changed:
        rounds.announce(start)
    for polls in range(100):
        if engine._shared.landed > start.number:
            return polls
        rounds.proceed()
    raise AssertionError("the round does not land")


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_delayed_round_lands_without_waiting_for_the_device(wire: Any, norms: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(META)
    engine, rounds, listener = rank(model, Nesterov(0.7, 0.9, BATCH), norms)
    for number in range(3):  # in the first, buffers have changed for once
        assert polls_to_land(engine, rounds, StartRound(number, frozenset(), 0, wire=wire)) >= POLLS
        with engine._shared.changed:
            engine._apply()  # the main thread's
    assert listener.given == 3 * [{0: 1}]


def test_a_synchronous_round_lands_without_waiting_for_the_device() -> None:
    model = torch.nn.Linear(3, 2).to(META)
    engine, rounds, listener = rank(model)
    gradients = rounds.gradients = Gradients(model, 64, lambda fraction: None, lambda: None, ranks_counted=1)
    gradients.samples = 4
    for stage in gradients.stages:
        stage.tail.pack()
    for _ in range(len(gradients.buckets) + len(gradients.stages)):
        gradients._released.release()
    assert polls_to_land(engine, rounds, StartRound(0, frozenset({0}), 0, synchronous=True)) >= POLLS
    assert listener.completions[0].samples == 1
    told = [event for event in engine._shared.outbox if isinstance(event, NormMeasured)]
    assert [event.squared_norm for event in told] == [len(gradients.buckets)]
