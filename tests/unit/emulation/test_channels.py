"""Channels behind emulated links: when tensors come, and that the sender goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetsync.emulation.channels import EmulatedChannels
from hetsync.emulation.cluster import Link
from hetsync.plane.base import Channels


class Wire(Channels):
    """Takes no time, by itself; every rank's."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, list[torch.Tensor]]] = []

    def send(self, note: Any, tensors: Sequence[torch.Tensor], to: int) -> None:
        self.sent.append((note, list(tensors)))

    def receive(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        return self.sent.pop(0)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Times:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


LINKS = {1: Link(0.5, 100.0), 2: Link(0.25)}


def test_one_tensor_at_a_time_then_latency() -> None:
    times, wire = Times(), Wire()
    channels = EmulatedChannels(wire, LINKS.__getitem__, times, times.sleep)
    for number in range(2):
        channels.send(number, [torch.zeros(25), torch.zeros(25)], 1)  # 200 bytes
    assert times.now == 100.0  # the sender goes on
    for number, due in enumerate((102.5, 104.5)):
        note, tensors = channels.receive(0)
        assert (note, len(tensors)) == (number, 2)
        assert times.now == pytest.approx(due)
    times.now = 200.0
    channels.send(2, [torch.zeros(25)], 1)  # the link has long been free
    channels.receive(0)
    assert times.now == pytest.approx(201.5)


def test_links_are_each_for_themselves_and_notes_are_free() -> None:
    times, wire = Times(), Wire()
    channels = EmulatedChannels(wire, LINKS.__getitem__, times, times.sleep)
    channels.send("much", [torch.zeros(1000)], 1)
    wire.sent.clear()
    channels.send("note", [], 1)
    channels.receive(0)
    assert times.now == 100.0
    channels.send("little", [torch.zeros(1000)], 2)  # latency alone
    channels.receive(0)
    assert times.now == pytest.approx(100.25)


def test_who_comes_late_waits_for_nothing() -> None:
    times, wire = Times(), Wire()
    channels = EmulatedChannels(wire, LINKS.__getitem__, times, times.sleep)
    channels.send(None, [torch.zeros(25)], 1)
    times.now = 110.0
    channels.receive(0)
    assert times.now == 110.0
