"""A plane as some of its ranks see it, who talk to each other beside what they have with the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hetsync.plane.base import Plane


class SomeRanks(Plane):
    """Its members are these ranks, and messages of others are put aside. Blocking calls stay those of all ranks.

    A death ends the job: those who are left are not all of these ranks' business.
    """

    def __init__(self, plane: Plane, members: Sequence[int]) -> None:
        super().__init__(plane, plane)
        self.members, self.tolerant = tuple(sorted(members)), False
        self._aside: deque[tuple[int, Any]] = deque()

    def receive(self) -> Sequence[tuple[int, Any]]:
        arrived: list[tuple[int, Any]] = []
        for sender, message in super().receive():
            (arrived if sender in self.members else self._aside).append((sender, message))
        return arrived

    def take_aside(self) -> list[tuple[int, Any]]:
        """What others have sent, as of the last `receive`."""
        taken = list(self._aside)
        self._aside.clear()
        return taken
