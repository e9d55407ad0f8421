"""Virtual time: what happens when, and when a thread looks."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from hetsync.simulate.scenario import Runtime
from hetsync.sync.naps import nap_seconds

GOLDEN = (5**0.5 - 1) / 2


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


class Naps:
    """How long communication threads sleep between two looks, by the engine's rule; when they look is drawn."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self._runtime = runtime
        self._dice = random.Random(f"looks/{seed}")

    def longest(self, quiet_seconds: float, waiting: bool, collective: bool) -> float:
        """Of a thread for which nothing has happened so long, whose rank waits or computes."""
        runtime = self._runtime
        fraction = runtime.waiting_fraction if waiting else runtime.computing_fraction
        limit = runtime.collective_nap_seconds if collective else runtime.idle_nap_seconds
        return nap_seconds(quiet_seconds, fraction, limit)

    def phase(self) -> float:
        return self._dice.random()

    def first_look(self, nap: float) -> float:
        """How long until a thread looks."""
        return nap * self._dice.random()

    def last_look(self, nap: float, threads: int) -> float:
        """How long until the last of some threads looks."""
        return nap * math.pow(self._dice.random(), 1 / threads)

    def exchanges(self, nap: float, ranks: int) -> float:
        """What a sum waits for looks: each of its log2(ranks) steps is an exchange of two."""
        return sum(self.last_look(nap, 2) for _ in range(math.ceil(math.log2(ranks))))


@dataclass(frozen=True)
class Looks:
    """When each rank's thread looks: spread evenly over [first, last], in an order that `phase` turns."""

    first: float
    last: float
    phase: float

    def at(self, rank: int) -> float:
        # Multiples of the golden ratio fall evenly into [0, 1).
        return self.first + (self.last - self.first) * ((self.phase + rank * GOLDEN) % 1.0)
