"""When the rounds of a job are announced, ready and posted, and land, on one rank."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from hetsync.plane.polled import Queue, Step, Waiting
from hetsync.plane.staging import Test
from hetsync.sync.messages import StartRound
from hetsync.sync.rounds import Rounds

STRETCHES = ("announced to ready", "ready to posted", "posted to landed")


class RoundTimes:
    """Sums of a round begin when it is announced, or when the one before has landed. They are ready once the device has
    come to what they sum, posted to the library once all have come, and landed once all sums are in."""

    def __init__(self) -> None:
        self._announced: dict[int, float] = {}
        self._ready = self._posted = self._landed = 0.0
        self.stretches: list[Sequence[float]] = []  # seconds, as `STRETCHES`

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        announce, run, complete = Rounds.announce, Queue.run, Rounds._complete_round

        def announced(rounds: Rounds, start: StartRound) -> None:
            self._announced[start.number] = time.monotonic()
            announce(rounds, start)

        def summed(queue: Queue, ticket: int, steps: Iterable[Step], *buffers: torch.Tensor) -> Waiting[None]:
            return run(queue, ticket, map(self._noted, steps), *buffers)

        def completed(rounds: Rounds, start: StartRound, *more: Any, **named: Any) -> Iterator[None]:
            self._lands(start)
            return complete(rounds, start, *more, **named)

        with (
            patch.object(Rounds, "announce", announced),
            patch.object(Queue, "run", summed),
            patch.object(Rounds, "_complete_round", completed),
        ):
            yield

    def medians(self) -> list[float]:
        """Milliseconds of each stretch; none where no round has landed."""
        return [1000 * statistics.median(some) for some in zip(*self.stretches, strict=True)]

    def _noted(self, step: Step) -> Step:
        def ready() -> bool:
            is_ready = step.ready()
            if is_ready:
                self._ready = time.monotonic()
            return is_ready

        def post() -> Test:
            self._posted = time.monotonic()
            return step.post()

        noted: tuple[Callable[[], Test], Test] = post, ready
        return Step(*noted)

    def _lands(self, start: StartRound) -> None:
        began = max(self._announced.pop(start.number, self._landed), self._landed)
        self._landed = time.monotonic()
        if began <= self._ready <= self._posted:  # else it had nothing to be summed by a library
            places = [began, self._ready, self._posted, self._landed]
            self.stretches.append([after - before for before, after in pairwise(places)])
