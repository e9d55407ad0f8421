"""A slower link than the machine has: collectives take the time that a profiled interconnect would need."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetsync.config.schema import WireFormat
from hetsync.emulation.cluster import Cluster, Link
from hetsync.errors import UserError
from hetsync.plane.base import Channels, Handle, Plane, Residual, Sums
from hetsync.plane.wire import bytes_of, encoded_bytes


@dataclass(frozen=True)
class LinkTimes:
    """What collectives take on a link, for a model whose round of float32 values has `round_bytes`.

    There is one figure for a whole round, however many buckets it travels in: each takes the `latency_seconds`, and of
    the `round_seconds` what its bytes on the wire are of the round's.
    """

    latency_seconds: float
    round_seconds: float
    round_bytes: int
    ranks: int

    @staticmethod
    def of(link: Link, ranks: int, round_bytes: int, slice_seconds: float) -> LinkTimes:
        """`slice_seconds` are those of the slowest rank."""
        seconds = link.seconds(round_bytes, ranks, slice_seconds) - link.latency_seconds
        return LinkTimes(link.latency_seconds, seconds, round_bytes, ranks)

    def seconds(self, values: int, wire: WireFormat) -> float:
        """One collective of so many values."""
        return self.latency_seconds + self.round_seconds * encoded_bytes(values, wire) / self.round_bytes

    @property
    def bytes_per_second(self) -> float:
        """Of each rank's own link, which a ring allreduce crosses 2 · (N − 1) / N times."""
        carried = 2 * (self.ranks - 1) / self.ranks
        return carried * self.round_bytes / self.round_seconds if self.round_seconds > 0 else math.inf


def behind_link(plane: Plane, cluster: Cluster | None, round_bytes: int, slice_seconds: float) -> Plane:
    """The plane behind an emulated cluster's link; as it is without one. Arguments as in `LinkTimes.of`."""
    ranks = plane.ranks_at_start
    link = Link() if cluster is None else cluster.ring_link(range(ranks))
    if link == Link() or ranks == 1:
        return plane
    times = LinkTimes.of(link, ranks, round_bytes, slice_seconds)
    return EmulatedLink(plane, times.latency_seconds, times.bytes_per_second)


class _LinkHandle(Handle):
    def __init__(self, link: EmulatedLink, inner: Handle, seconds: float) -> None:
        self._link = link
        self.inner = inner
        self.seconds = seconds
        self.due = math.inf

    def done(self) -> bool:
        return self._link._now() >= self.due


class EmulatedSums(Sums):
    """Sums over some ranks that take, on top of their own time, that of a link: `seconds` of so many bytes.

    A rank's `way` carries one at a time, whatever the ranks are with which it sums; those of one rank share it. A
    transfer starts when all its ranks have joined, as in `EmulatedLink`.
    """

    def __init__(
        self,
        sums: Sums,
        seconds: Callable[[int], float],
        way: Way,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sums, self._seconds, self._way, self._clock = sums, seconds, way, clock

    @property
    def sums_by(self) -> str:
        return self._sums.sums_by

    @property
    def moves(self) -> int:
        return self._sums.moves

    @property
    def failed(self) -> bool:
        return self._sums.failed

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        return self._sums.allocate(count, device)

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        seconds = self._seconds(bytes_of(tensor, wire))
        return _WayHandle(self._sums.allreduce(tensor, wire, residual), seconds, self._way, self._clock)

    def close(self) -> None:
        self._sums.close()


@dataclass
class Way:
    """Of one rank, to those with which it sums."""

    busy_until: float = -math.inf


class _WayHandle(Handle):
    def __init__(self, inner: Handle, seconds: float, way: Way, clock: Callable[[], float]) -> None:
        self._inner, self._seconds, self._way, self._clock = inner, seconds, way, clock
        self._due: float | None = None  # once all ranks have joined

    def done(self) -> bool:
        if self._due is None:
            if not self._inner.done():
                return False
            self._due = self._way.busy_until = max(self._clock(), self._way.busy_until) + self._seconds
        return self._clock() >= self._due


class EmulatedLink(Plane):
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
        super().__init__(plane, plane)
        self._figures = Link(latency_seconds, bytes_per_second)
        self._clock = clock
        self._busy_until = -math.inf
        self._waiting: list[_LinkHandle] = []

    def transfer_seconds(self, n_bytes: int) -> float:
        """What the link needs for the allreduce of so many bytes on the wire."""
        return self._figures.seconds(n_bytes, self.size, slice_seconds=0.0)

    def open_channels(self) -> Channels:
        """Refused: channels would be as fast as the machine's."""
        raise UserError("tensors between single ranks cannot be slowed to an emulated link: use a profile without link")

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        seconds = self.transfer_seconds(bytes_of(tensor, wire))
        handle = _LinkHandle(self, super().allreduce(tensor, wire, residual), seconds)
        self._waiting.append(handle)
        return handle

    def _members_changed(self) -> None:
        super()._members_changed()
        self._waiting.clear()

    def _now(self) -> float:
        """The time, after putting on the link what has become ready."""
        while self._waiting and self._waiting[0].inner.done():
            handle = self._waiting.pop(0)
            handle.due = self._busy_until = max(self._clock(), self._busy_until) + handle.seconds
        return self._clock()
