"""The memory that a rank's part of a replica needs while it trains: counted in the first slices, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hetsync.plan.blocks import state_of
from hetsync.plan.costs import bytes_of, storages_saved
from hetsync.sync.sparse import dense_parts

WATCHED_SLICES = 2  # by the second, the optimizer's state and the gradients are there


class Memory:
    """What backward needs of the micro-batches in flight, and gradients. What a kernel takes for a moment is not in it.

    On a GPU the allocator knows all of it.

    Attributes:
        beside: Bytes that something else has for the replica: delayed mode's buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.beside = 0
        self._slices = 0
        self._in_flight: dict[int, dict[int, int]] = {}  # by micro-batch, bytes by address
        self._saved = self._gradients = 0  # the most so far

    def begin(self) -> None:
        """What was taken before was for profiling, which tries other batches."""
        device = self._device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @contextmanager
    def saving(self, micro_batch: int) -> Iterator[None]:
        """Around a forward pass, and around the loss."""
        if self._slices == WATCHED_SLICES:
            yield
            return
        with storages_saved(self._model) as saved:
            yield
        self._in_flight.setdefault(micro_batch, {}).update(bytes_of(saved))
        self._saved = max(self._saved, sum(sum(each.values()) for each in self._in_flight.values()))

    def freed(self, micro_batch: int) -> None:
        """Its backward pass is over."""
        self._in_flight.pop(micro_batch, None)

    def end_slice(self) -> None:
        """Before gradients are gone."""
        if self._slices == WATCHED_SLICES:
            return
        self._slices += 1
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self._gradients = max(self._gradients, sum(gradient.nbytes for gradient in gradients))

    def bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Of weights, buffers, gradients, the optimizer's state, most that backward needs, and what is beside."""
        device = self._device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        values = [value for state in optimizer.state.values() for value in state.values()]
        held = [*state_of(self._model).values(), *(value for value in values if isinstance(value, torch.Tensor))]
        storages = bytes_of([part.untyped_storage() for tensor in held for part in dense_parts(tensor)])
        return sum(storages.values()) + self._gradients + self._saved + self.beside
