"""A plane around a plane, to change one of its behaviours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetsync.plane.base import Handle, Plane, Residual, WireFormat


class PlaneWrapper(Plane):
    """Hands everything on to `plane`; subclasses override what they change."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.rank = plane.rank
        self.size = plane.size

    @property
    def moves(self) -> int:
        return self.plane.moves

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        return self.plane.allreduce(tensor, wire, residual)

    def send(self, message: Any, to: int) -> None:
        self.plane.send(message, to)

    def unread(self, to: int) -> bool:
        return self.plane.unread(to)

    def receive(self) -> Sequence[tuple[int, Any]]:
        return self.plane.receive()

    def gather_objects(self, value: Any) -> list[Any]:
        return self.plane.gather_objects(value)

    def broadcast_object(self, value: Any) -> Any:
        return self.plane.broadcast_object(value)

    def barrier(self) -> None:
        self.plane.barrier()

    def abort(self, code: int) -> None:
        self.plane.abort(code)

    def close(self) -> None:
        self.plane.close()
