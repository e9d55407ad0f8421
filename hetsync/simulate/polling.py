"""What HetSync's own runtime takes, and when its communication threads poll: by the engine's rule, at drawn moments."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hetsync.sync.polling import (
    LONGEST_COLLECTIVE_POLL_SECONDS,
    LONGEST_IDLE_POLL_SECONDS,
    POLL_FRACTION_COMPUTING,
    POLL_FRACTION_WAITING,
    poll_seconds,
)

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Runtime:
    """What the engine itself takes, in seconds, on any cluster. What a cluster's hosts add to a synchronous step is a
    key of its profile. The polling intervals are the engine's own constants; the other defaults were fitted to runs of
    eight ranks on one machine of two cores (docs/guide/simulate.md).

    Args:
        message_seconds: A message from one communication thread to another, once that one polls.
        slice_seconds: From the end of a rank's slice to the begin of its next: books, hand-over, next batch.
        idle_poll_seconds: Longest time between two polls of a communication thread with no sum under way.
        collective_poll_seconds: The same while a sum is under way. A sum moves on when both ends of a message have
            polled, and takes log2(ranks) such steps.
        computing_fraction: A thread whose rank computes sleeps this fraction of the time since something happened.
        waiting_fraction: The same for a rank that waits.
        round_seconds: What a round takes from each rank's device: passes over memory, the communication thread where it
            shares the device's cores.
    """

    message_seconds: float = 0.3e-3
    slice_seconds: float = 2e-3
    idle_poll_seconds: float = LONGEST_IDLE_POLL_SECONDS
    collective_poll_seconds: float = LONGEST_COLLECTIVE_POLL_SECONDS
    computing_fraction: float = POLL_FRACTION_COMPUTING
    waiting_fraction: float = POLL_FRACTION_WAITING
    round_seconds: float = 0.0


@dataclass(frozen=True)
class PollTimes:
    """When each rank's thread polls: spread evenly over [first, last], in an order that `phase` turns."""

    first: float
    last: float
    phase: float

    def at(self, rank: int) -> float:
        # Multiples of the golden ratio fall evenly into [0, 1).
        return self.first + (self.last - self.first) * ((self.phase + rank * GOLDEN) % 1.0)


class Polling:
    """Draws when communication threads poll. The order of the draws is part of a simulation's result."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self._runtime = runtime
        # The seed's text is that of the first release: another would move every recorded result.
        self._dice = random.Random(f"looks/{seed}")

    def interval(self, quiet_seconds: float, waiting: bool, collective: bool) -> float:
        """Seconds between two polls of a thread for which nothing has happened so long, whose rank waits or computes,
        and whose collective is under way or not."""
        runtime = self._runtime
        fraction = runtime.waiting_fraction if waiting else runtime.computing_fraction
        limit = runtime.collective_poll_seconds if collective else runtime.idle_poll_seconds
        return poll_seconds(quiet_seconds, fraction, limit)

    def until_next(self, interval: float) -> float:
        """Seconds until a thread polls."""
        return interval * self._dice.random()

    def until_last(self, interval: float, threads: int) -> float:
        """Seconds until the last of some threads polls."""
        return interval * math.pow(self._dice.random(), 1 / threads)

    def times(self, first: float, interval: float, ranks: int) -> PollTimes:
        """When each of the ranks polls, none before `first`."""
        return PollTimes(first, first + self.until_last(interval, ranks), self._dice.random())

    def sum_seconds(self, interval: float, ranks: int) -> float:
        """What a sum waits for polls: each of its log2(ranks) steps is an exchange of two."""
        return sum(self.until_last(interval, 2) for _ in range(math.ceil(math.log2(ranks))))
