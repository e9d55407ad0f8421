"""Ranks of one process that share their memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hetsync.plane.shared_memory import Gather

Result = TypeVar("Result")


def collectively(ranks: int, call: Callable[[int, int, Gather], Result]) -> list[Result]:
    """What the call returns on each rank: it is given its number, theirs, and how they tell each other."""
    given: list[Sequence[int]] = [()] * ranks
    barrier = threading.Barrier(ranks, timeout=20)

    def on(rank: int) -> Result:
        def gather(numbers: Sequence[int]) -> Sequence[Sequence[int]]:
            given[rank] = numbers
            barrier.wait()
            told = list(given)
            barrier.wait()
            return told

        return call(rank, ranks, gather)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(on, range(ranks)))
