"""Virtual time: what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Actions in the order of their times; of equal times, in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._tickets = 0

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        self._tickets += 1
        heapq.heappush(self._queue, (when, self._tickets, action, arguments))

    def step(self, until: float) -> bool:
        """Do what comes next; False, and the time is `until`, where nothing comes before."""
        if not self._queue or self._queue[0][0] > until:
            self.now = until
            return False
        self.now, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)
        return True
