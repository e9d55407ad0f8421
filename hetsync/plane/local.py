"""The plane of a job with one rank: nothing travels, but everything rounds as it would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane import codec
from hetsync.plane.base import Channels, Handle, Messages, Plane, PlaneError, Residual, Sums
from hetsync.plane.ending import leave
from hetsync.plane.wire import decode, deliver, encode_sum, flat, round_trip


class _Finished(Handle):
    def done(self) -> bool:
        return True


class LocalSums(Sums):
    """Of one rank."""

    sums_by = "this process alone"

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        tensor = flat(tensor)
        if wire == "float32":
            deliver(residual, tensor)
        else:
            # As addend and as sum: a caller that feeds errors back relies on the addend having been rounded.
            total = encode_sum(round_trip(tensor, wire), wire, residual)
            tensor.copy_(decode(total, tensor.numel(), wire))
        return _Finished()

    def close(self) -> None:
        pass


class LocalMessages(Messages):
    """Of rank 0 of 1, to itself."""

    rank, members = 0, (0,)
    messages_by = "this process alone"

    def __init__(self) -> None:
        self._messages: list[bytes] = []

    def send(self, message: Any, to: int) -> None:
        if to != 0:
            raise PlaneError(f"no rank {to} in a job of one rank")
        self._messages.append(codec.dumps(message))

    def unread(self, to: int) -> bool:
        return bool(self._messages)

    def receive(self) -> Sequence[tuple[int, Any]]:
        arrived, self._messages = self._messages, []
        return [(0, codec.loads(message)) for message in arrived]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def open_channels(self) -> Channels:
        raise PlaneError("a rank alone has no other to exchange tensors with")

    def abort(self, code: int) -> NoReturn:
        leave(code)

    def close(self) -> None:
        self._messages = []


class LocalPlane(Plane):
    """Rank 0 of 1; imports no MPI."""

    def __init__(self) -> None:
        super().__init__(LocalMessages(), LocalSums())
