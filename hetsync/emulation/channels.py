"""Slower channels than the machine has: tensors come when they would over a profiled link."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetsync.emulation.cluster import Link
from hetsync.plane.base import Channels


class EmulatedChannels(Channels):
    """From one rank to another goes one tensor at a time, at the link's bandwidth, and arrives its latency later.

    The sender says when its tensors are due, and goes on; the receiver waits until then, by the wall clock of a machine
    that both are on. Notes without tensors are not held back.
    """

    def __init__(
        self,
        channels: Channels,
        link_to: Callable[[int], Link],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`link_to` another rank."""
        self._channels, self._link_to = channels, link_to
        self._clock, self._sleep = clock, sleep
        self._free: dict[int, float] = {}  # when the way to a rank is

    def send(self, note: Any, tensors: Sequence[torch.Tensor], to: int) -> None:
        self._channels.send((note, self._due(tensors, to)), tensors, to)

    def _due(self, tensors: Sequence[torch.Tensor], to: int) -> float:
        if not tensors:
            return 0.0
        link = self._link_to(to)
        seconds = sum(tensor.nbytes for tensor in tensors) / (link.bytes_per_second or math.inf)
        self._free[to] = max(self._clock(), self._free.get(to, 0.0)) + seconds
        return self._free[to] + link.latency_seconds

    def receive(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        (note, due), tensors = self._channels.receive(source)
        if (early := due - self._clock()) > 0:
            self._sleep(early)
        return note, tensors

    def flush(self) -> None:
        self._channels.flush()

    def close(self) -> None:
        self._channels.close()
