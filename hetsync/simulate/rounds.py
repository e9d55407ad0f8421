"""Rounds under way: what is known of each between its start and the moment when every rank has seen it land."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetsync.simulate.polling import PollTimes
from hetsync.sync.messages import Contributed, StartRound


@dataclass
class DelayedRound:
    """Ranks join when they hear of it; once all have, its sum travels; then each rank sees it land."""

    start: StartRound
    joins: PollTimes
    missing: set[int]  # contributors that have not put anything in
    contributed: list[Contributed] = field(default_factory=list)  # what the others have put in
    staleness: dict[int, int] = field(default_factory=dict)  # of that
    lands: PollTimes | None = None  # None until the sum is there

    @property
    def number(self) -> int:
        return self.start.number


@dataclass
class SynchronousRound:
    """Buckets travel one after the other, each once all ranks have released it; the tail once all have finished."""

    start: StartRound
    shares: Sequence[float]  # part of backward after which each bucket is full
    missing: int  # ranks that have not finished
    released_at: list[float] = field(default_factory=list)  # the last rank's
    first_at: float = math.inf  # the first rank has finished

    def __post_init__(self) -> None:
        self.released_at = [0.0] * len(self.shares)

    def release(self, now: float, seconds: float) -> None:
        """A rank begins its last slice. Backward takes about twice as long as forward."""
        for index, share in enumerate(self.shares):
            self.released_at[index] = max(self.released_at[index], now + seconds * (1 + 2 * share) / 3)

    def summed_at(self, now: float, bucket_seconds: Sequence[float], tail_seconds: float) -> float:
        """When the link has carried everything, all ranks having finished now."""
        free = 0.0
        for released, seconds in zip(self.released_at, bucket_seconds, strict=True):
            free = max(free, released) + seconds
        return max(free, now) + tail_seconds
