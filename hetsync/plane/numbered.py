"""Messages that carry their numbers: a plane around a plane, which notices what is lost on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hetsync.plane.base import DamagedError, Plane


class NumberedPlane(Plane):
    """A message that is lost is noticed with the next one of the same rank, by a DamagedError."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, plane)
        self._sent, self._received = Counter[int](), Counter[int]()  # by rank

    def send(self, message: Any, to: int) -> None:
        super().send((self._sent[to], message), to)
        self._sent[to] += 1

    def receive(self) -> Sequence[tuple[int, Any]]:
        arrived = []
        for sender, (number, message) in super().receive():
            if number != self._received[sender]:
                raise DamagedError(
                    f"a message of rank {sender} has been lost on its way, as the next one tells: look at the network"
                    " of these hosts, and go on with --resume",
                    sender,
                )
            self._received[sender] += 1
            arrived.append((sender, message))
        return arrived

    def _members_changed(self) -> None:
        super()._members_changed()
        self._sent.clear()
        self._received.clear()
