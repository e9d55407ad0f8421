"""A replica that is not cut: on one rank, or on several of which each computes a part of every micro-batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetsync.data import Data
from hetsync.data.evaluation import evaluate_range
from hetsync.plan.blocks import state_of
from hetsync.plan.calls import Scored
from hetsync.plan.division import WHOLE, Division
from hetsync.plane.base import Channels
from hetsync.replica.base import MicroBatch, Replica, copy_on_host, own_part, scale_to, squared_norms
from hetsync.replica.lockstep import Lockstep, sizes_of
from hetsync.replica.passes import Passes


class WholeReplica(Replica):
    """The model as it is; several micro-batches accumulate their gradients.

    Args:
        model: On this rank's device.
        loss: Of (model, batch).
        passes: Times this rank's.
        division: Of micro-batches among the replica's ranks, its only stage.
        rank: This rank.
        channels: Between the ranks; None for a rank alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Scored,
        passes: Passes | None = None,
        division: Division = WHOLE,
        rank: int = 0,
        channels: Channels | None = None,
    ) -> None:
        super().__init__(model, passes)
        self._loss, self._rank, self._channels = loss, rank, channels
        self._lockstep = Lockstep(division, 0, rank, list(self.held), model, channels)

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        return state_of(self.model)

    def run(self, micro_batches: Sequence[MicroBatch]) -> float:
        samples = sum(each.samples for each in micro_batches)
        total = 0.0
        self._lockstep.begin()
        for index, each in enumerate(micro_batches):
            own = self._lockstep.own(each)
            with self.memory.saving(index), self.passes.timed(sizes_of(own), backward=False):
                losses = [self._loss(self.model, piece.batch) * (piece.samples / samples) for _, piece in own]
            with self.passes.timed(sizes_of(own), backward=True):
                for loss in losses:
                    loss.backward()
            self.memory.freed(index)
            total += sum(loss.item() for loss in losses)
        self.memory.end_slice()
        total = self._told_by_all(total)
        self._lockstep.finish(micro_batches)
        return total

    def _told_by_all(self, loss: float) -> float:
        """The sum of the ranks' parts of the loss."""
        if self._channels is None:
            return loss
        others = [rank for rank in self._lockstep.ranks if rank != self._rank]
        for rank in others:
            self._channels.send(loss, [], rank)
        told = {self._rank: loss, **{rank: self._channels.receive(rank)[0] for rank in others}}
        self._channels.flush()
        return sum(told[rank] for rank in self._lockstep.ranks)

    def seed_losses(self, seed: int) -> None:
        """Each piece's runs on one rank, once."""

    def clip_grad_norm(self, greatest: float) -> float:
        norm = math.sqrt(math.fsum(squared_norms(self.parameters)))
        scale_to(self.parameters, norm, greatest)
        return norm

    def release(self) -> None:
        """All is held."""

    def whole(self, ranks: Collection[int]) -> nn.Module | None:
        return copy_on_host(self.model, self.held) if self._rank in ranks else None

    def merged(self, values: Mapping[int, Any]) -> dict[int, Any]:
        return dict(values)

    def evaluate(self, data: Data, first: int, stop: int) -> dict[str, float]:
        return evaluate_range(self.model, data, *own_part(first, stop, self._lockstep.ranks, self._rank))
