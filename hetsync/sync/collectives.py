"""What a communication thread has posted, and waits for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetsync.plane.base import Handle, Plane, Residual, WireFormat
from hetsync.plane.wire import encoded_bytes


def squared_norm(tensor: torch.Tensor) -> float:
    """Of a flat tensor."""
    return float(tensor.dot(tensor))


class PendingCollectives:
    """The collectives of one round: posted one after the other, awaited together."""

    def __init__(self, plane: Plane, measure_norms: bool = False) -> None:
        """With `measure_norms` the squared norms of addends are known, and on rank 0 those of the sums."""
        self.bytes_sent = 0
        self.addends_norm = 0.0  # of this round's addends so far, squared
        self.sums_norm = 0.0  # of its sums that are in
        self._plane = plane
        self._measure_norms = measure_norms
        self._under_way: list[Handle] = []
        self._measured: list[torch.Tensor] = []

    def begin_round(self) -> None:
        self.addends_norm = self.sums_norm = 0.0

    def post(
        self, tensor: torch.Tensor, wire: WireFormat, residual: Residual | None = None, in_norms: bool = True
    ) -> None:
        """Sum a flat float32 tensor over all ranks, in place, in the order of posting."""
        if self._measure_norms and in_norms:
            self.addends_norm += squared_norm(tensor)
            self._measured.append(tensor)
        self.bytes_sent += encoded_bytes(tensor.numel(), wire)
        self._under_way.append(self._plane.allreduce(tensor, wire, residual))

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

    def wait(self) -> Iterator[None]:
        """Yields until all are complete."""
        while not self.poll():
            yield
        if self._plane.rank == 0 and self._measured:
            self.sums_norm += sum(map(squared_norm, self._measured))
        self._measured.clear()
        self._under_way.clear()
