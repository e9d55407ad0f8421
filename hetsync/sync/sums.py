"""The collectives of one task of the communication thread: posted together, awaited together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetsync.plane.base import Handle, Plane, WireFormat
from hetsync.plane.wire import encoded_bytes


class Sums:
    def __init__(self, plane: Plane) -> None:
        self.bytes_sent = 0
        self._plane = plane
        self._under_way: list[Handle] = []

    def post(self, tensor: torch.Tensor, wire: WireFormat) -> None:
        """Sum a flat float32 tensor over all ranks, in place, in the order of posting."""
        self.bytes_sent += encoded_bytes(tensor.numel(), wire)
        self._under_way.append(self._plane.allreduce(tensor, wire))

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def arrived(self) -> bool:
        """Are all in? What was posted moves on only when it is looked at."""
        return all([handle.done() for handle in self._under_way])

    def wait(self) -> Iterator[None]:
        """Yields until all are in."""
        while not self.arrived():
            yield
        self._under_way.clear()
