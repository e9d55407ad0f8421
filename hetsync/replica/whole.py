"""A replica on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetsync.plan.calls import Scored
from hetsync.replica.base import MicroBatch, Replica
from hetsync.replica.passes import Passes


class WholeReplica(Replica):
    """The model as it is; several micro-batches accumulate their gradients."""

    def __init__(self, model: nn.Module, loss: Scored, passes: Passes | None = None) -> None:
        self.model = model
        self.passes = passes or Passes()
        self._loss = loss

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def run(self, micro_batches: Sequence[MicroBatch]) -> float:
        samples = sum(each.samples for each in micro_batches)
        total = 0.0
        for each in micro_batches:
            with self.passes.timed(each.samples, backward=False):
                loss = self._loss(self.model, each.batch) * (each.samples / samples)
            with self.passes.timed(each.samples, backward=True):
                loss.backward()
            total += loss.item()
        return total

    def clip_grad_norm(self, greatest: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), greatest))

    def gather(self) -> None:
        pass

    def merged(self, values: Mapping[int, Any]) -> dict[int, Any]:
        return dict(values)
