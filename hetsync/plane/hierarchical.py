"""Sums over ranks of several kinds, which no one library joins: within groups by what suits their devices, and between
the groups' first ranks by what reaches all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane.base import Residual, Sums
from hetsync.plane.groups import GroupLane
from hetsync.plane.polled import PolledSums, Queue, Step, Waiting, until
from hetsync.plane.wire import deliver


class HierarchicalSums(PolledSums):
    """Sums that are not rounded in three steps: within each group, between the groups, and back from each group's first
    rank.

    Every rank ends with the bits that the first ranks agree on. The low-precision formats round each addend and the sum
    once, which sums of sums would not: they stay with `flat`, which sums over all ranks at once.

    `within`: this rank's group. `between`: the groups' first ranks; None on the others. `by` names both. `server`: of
    the store at which the group has met, where this rank holds it; kept as long as the sums.
    """

    def __init__(
        self, by: str, rank: int, size: int, flat: Sums, within: GroupLane, between: Sums | None, server: Any = None
    ) -> None:
        super().__init__(by, rank, size, within, within, within.reads)
        self._flat, self._within, self._between = flat, within, between
        self._sums_between = Queue()
        self._server = server

    def _sum(self, tensor: torch.Tensor, residual: Residual | None) -> Waiting[None]:
        deliver(residual, tensor)
        within, between, back = self._within.ticket(), self._sums_between.ticket(), self._within.ticket()
        staging = self._staging_for(tensor.device)
        values, ready = staging.fetch(tensor)
        yield from self._within.run(within, [Step(self._within.sum_in_place(values), ready)], values)
        if (leaders := self._between) is not None:
            yield from self._sums_between.run(between, [Step(lambda: leaders.allreduce(values).done)], values)
        yield from self._within.run(back, [Step(self._within.broadcast(values))], values)
        yield from until(staging.store(values, into=tensor))

    def _rounded_sum(self, tensor: torch.Tensor, wire: WireFormat, residual: Residual | None) -> Waiting[None]:
        handle = self._flat.allreduce(tensor, wire, residual)
        while not handle.done():
            yield

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        return super().allocate(count, device) if self._between is None else self._between.allocate(count, device)

    @property
    def moves(self) -> int:
        between = self._between.moves if self._between is not None else 0
        return super().moves + between + self._flat.moves

    def close(self) -> None:
        super().close()
        self._flat.close()
        if self._between is not None:
            self._between.close()
        self._within.close()
