"""What a communication thread has posted, and waits for."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane.base import Handle, Plane, Residual, Sums
from hetsync.plane.wire import bytes_of
from hetsync.sync.device_order import DeviceOrder
from hetsync.sync.tail import Tail


class Part(Protocol):
    """Of what a round sums: its `tail` beside its addend. `sums` carries it where the job's plane does not."""

    tail: Tail
    residual: Residual

    @property
    def sums(self) -> Sums | None: ...


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Of a flat tensor, on its device."""
    return tensor.dot(tensor)


def read(order: DeviceOrder, values: Sequence[torch.Tensor]) -> Generator[None, None, list[torch.Tensor]]:
    """Yields until all are in the host's memory."""
    coming = [order.read(each) for each in values]
    while not all([there() for _, there in coming]):
        yield
    return [host for host, _ in coming]


class PendingCollectives:
    """The collectives of one round: posted one after the other, awaited together."""

    def __init__(self, plane: Plane, measure_norms: bool = False) -> None:
        """With `measure_norms` the squared norms of addends are known, and on the first rank those of the sums."""
        self.bytes_sent = 0
        self.addends_norms: list[torch.Tensor] = []  # of this round's addends so far, squared
        self.sums_norm = 0.0  # of its sums that are in, squared
        self._plane = plane
        self._measure_norms = measure_norms
        self._under_way: list[Handle] = []
        self._measured: list[torch.Tensor] = []

    def begin_round(self) -> None:
        self.addends_norms, self.sums_norm = [], 0.0

    def post(
        self,
        tensor: torch.Tensor,
        wire: WireFormat,
        residual: Residual | None = None,
        in_norms: bool = True,
        sums: Sums | None = None,
    ) -> None:
        """Sum a flat tensor of float32 or float64 over all ranks, or by `sums`, in place, in the order of posting."""
        if self._measure_norms and in_norms:
            self.addends_norms.append(squared_norm(tensor))
            self._measured.append(tensor)
        self.bytes_sent += bytes_of(tensor, wire)
        self._under_way.append((sums or self._plane).allreduce(tensor, wire, residual))

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def drop(self) -> None:
        """They will not come to an end: a rank has gone."""
        self._under_way.clear()
        self._measured.clear()

    def poll(self) -> bool:
        """Are all complete? What was posted moves on only when it is polled."""
        return not self._under_way or all([handle.done() for handle in self._under_way])

    def wait(self, order: DeviceOrder) -> Iterator[None]:
        """Yields until all are complete."""
        while not self.poll():
            yield
        if self._plane.leads and self._measured:
            norms = yield from read(order, list(map(squared_norm, self._measured)))
            self.sums_norm += sum(map(float, norms))
        self._measured.clear()
        self._under_way.clear()

    def post_addends(self, parts: Sequence[Part], addends: Sequence[torch.Tensor], wire: WireFormat) -> None:
        for part, addend in zip(parts, addends, strict=True):
            if addend.numel():
                self.post(addend, wire, part.residual, sums=part.sums)

    def sum_tails(self, tails: Sequence[tuple[Tail, Sums | None]], order: DeviceOrder) -> Iterator[None]:
        """Until all that a round sums is in."""
        while tails:
            for tail, sums in tails:
                if tail.flat.numel():
                    self.post(tail.flat, "float32", in_norms=False, sums=sums)
            yield from self.wait(order)
            heads = yield from read(order, [tail.head for tail, _ in tails])
            tails = [each for each, head in zip(tails, heads, strict=True) if each[0].unpack(head)]
