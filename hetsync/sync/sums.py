"""The collectives of one task of the communication thread: posted together, awaited together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetsync.plane.base import Handle, Plane, WireFormat
from hetsync.plane.wire import encoded_bytes


def squared_norm(tensor: torch.Tensor) -> float:
    """Of a flat tensor."""
    return float(tensor.dot(tensor))


class Sums:
    def __init__(self, plane: Plane, weigh: bool = False) -> None:
        """With `weigh`, the squared norms of addends are told, and on rank 0 those of the sums."""
        self.bytes_sent = 0
        self.addends_norm = 0.0  # of this task's addends so far, squared
        self.sums_norm = 0.0  # of the last task's sums, squared
        self._plane = plane
        self._weigh = weigh
        self._under_way: list[Handle] = []
        self._weighed: list[torch.Tensor] = []

    def post(self, tensor: torch.Tensor, wire: WireFormat, weigh: bool = True) -> None:
        """Sum a flat float32 tensor over all ranks, in place, in the order of posting; `weigh` counts it in norms."""
        if self._weigh and weigh:
            self.addends_norm += squared_norm(tensor)
            self._weighed.append(tensor)
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
        if self._plane.rank == 0:
            self.sums_norm = sum(map(squared_norm, self._weighed))
        self.addends_norm = 0.0
        self._weighed.clear()
        self._under_way.clear()
