"""A slower link than the machine has: collectives take the time that a profiled interconnect would need."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from hetsync.plane.base import Handle, Plane, WireFormat
from hetsync.plane.wire import encoded_bytes
from hetsync.plane.wrapper import PlaneWrapper


class _LinkHandle(Handle):
    def __init__(self, link: EmulatedLink, inner: Handle, seconds: float) -> None:
        self._link = link
        self.inner = inner
        self.seconds = seconds
        self.due = math.inf

    def done(self) -> bool:
        return self._link._now() >= self.due


class EmulatedLink(PlaneWrapper):
    """Allreduces take, on top of the plane's own time, those of a link with this latency and bandwidth.

    One collective of s bytes on the wire over N ranks takes `latency_seconds` once, and the ring
    allreduce's traffic through each rank's link (also that of the two stages of the low-precision formats):

        latency_seconds + 2 · (N − 1) / N · s / bytes_per_second         (nothing for N = 1)

    The link carries one collective at a time, in the order of posting. A transfer starts when all ranks have
    joined, as on a real link, which is when the plane's own allreduce is done: so ranks that come early save
    nothing, and the plane's own transfer time is added, which keeps the emulation on the slow side.

    Each rank wraps its own plane, with the same figures. `clock` gives seconds. Control messages and the
    blocking calls are not slowed. Raises `ValueError` for a negative latency and for a bandwidth that is
    not positive.
    """

    def __init__(
        self,
        plane: Plane,
        latency_seconds: float,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not latency_seconds >= 0 or not bytes_per_second > 0:
            raise ValueError(
                f"a link needs latency_seconds >= 0 and bytes_per_second > 0, not {latency_seconds} and"
                f" {bytes_per_second}"
            )
        super().__init__(plane)
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._busy_until = -math.inf
        self._waiting: list[_LinkHandle] = []

    def transfer_seconds(self, n: int, wire: WireFormat) -> float:
        """What the link needs for the allreduce of n values."""
        if self.size == 1:
            return 0.0
        n_bytes = 2 * (self.size - 1) / self.size * encoded_bytes(n, wire)
        return self._latency_seconds + n_bytes / self._bytes_per_second

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32") -> Handle:
        seconds = self.transfer_seconds(tensor.numel(), wire)
        handle = _LinkHandle(self, self.plane.allreduce(tensor, wire), seconds)
        self._waiting.append(handle)
        return handle

    def _now(self) -> float:
        """The time, after putting on the link what has become ready."""
        while self._waiting and self._waiting[0].inner.done():
            handle = self._waiting.pop(0)
            handle.due = self._busy_until = max(self._clock(), self._busy_until) + handle.seconds
        return self._clock()
