"""What stages hand over to each other: nested values, tensors among them, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hetsync.plan.parts import Gradients
from hetsync.plane.base import Channels


class Exchange:
    """Of one rank, whose tensors are on `device`. `bytes_sent` are those of tensors, gradients among them."""

    def __init__(self, channels: Channels, device: torch.device) -> None:
        self.bytes_sent = 0
        self._channels, self._device = channels, device

    def send(self, values: Mapping[Any, Any], rank: int) -> None:
        tensors: list[torch.Tensor] = []

        def stowed(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return _Stowed(len(tensors) - 1, value.requires_grad)
            return _Device() if isinstance(value, torch.device) else value

        note = tree_map(stowed, dict(values))
        self._channels.send(note, tensors, rank)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)

    def receive(self, rank: int) -> dict[Any, Any]:
        note, tensors = self._channels.receive(rank)

        def unstowed(value: Any) -> Any:
            if isinstance(value, _Stowed):
                return tensors[value.place].to(self._device).requires_grad_(value.requires_grad)
            return self._device if isinstance(value, _Device) else value

        values: dict[Any, Any] = tree_map(unstowed, note)
        return values

    def send_gradients(self, gradients: Sequence[Gradients], rank: int) -> None:
        note = [[gradient is not None for gradient in each] for each in gradients]
        tensors = [gradient for each in gradients for gradient in each if gradient is not None]
        self._channels.send(note, tensors, rank)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)

    def receive_gradients(self, rank: int) -> list[Gradients]:
        note, tensors = self._channels.receive(rank)
        arrived = iter(tensors)
        return [[next(arrived).to(self._device) if there else None for there in each] for each in note]

    def flush(self) -> None:
        """Return once all that was sent has been received."""
        self._channels.flush()


@dataclass(frozen=True)
class _Stowed:
    """Where a tensor was among the values of a note."""

    place: int
    requires_grad: bool


@dataclass(frozen=True)
class _Device:
    """A device among the values: the receiver's own."""
