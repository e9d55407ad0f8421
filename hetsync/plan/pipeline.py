"""One slice of a replica as discrete events: who computes what when, and when tensors come. Pure.

A worker is a rank that runs down its list of work and waits for tensors. What it has finished it sends at once: from
one worker to another goes one tensor at a time, and computing goes on meanwhile. So a link's order is that of its
sender's list, no event can overtake another, and one walk over the work finds all times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Send(NamedTuple):
    """A tensor for the same work of another worker, or for work numbered so much higher. The link is taken for
    `seconds`; it comes `latency` later."""

    target: int  # index of the worker
    seconds: float
    latency_seconds: float
    ahead: int = 0


@dataclass(frozen=True)
class Worker:
    """Work is numbered alike on all workers: forward of micro-batch m is m, backward is m + number of micro-batches.

    Attributes:
        work: Numbers, in the order in which they are run.
        seconds: Of each number; or arrays, which have the seconds of as many slices.
        sends: Of each number, once it is done.
    """

    work: Sequence[int]
    seconds: Sequence[Any]
    sends: Sequence[Sequence[Send]]


def end_times(workers: Sequence[Worker], later: Callable[[Any, Any], Any] = max) -> list[list[Any]]:
    """When each worker ends each entry of its list, in seconds after the slice's begin.

    Where seconds are arrays `later` is numpy.maximum: no time decides in which order the walk goes. ValueError where
    workers wait for each other.
    """
    numbers = range(len(workers[0].seconds))
    lacking = [[0 for _ in numbers] for _ in workers]  # tensors that have yet to come
    ready: list[list[Any]] = [[0.0 for _ in numbers] for _ in workers]  # when the last of those that came was there
    for worker in workers:
        for number, sends in enumerate(worker.sends):
            for target, _, _, ahead in sends:
                lacking[target][number + ahead] += 1
    ends: list[list[Any]] = [[] for _ in workers]
    link_free: list[list[Any]] = [[0.0] * len(workers) for _ in workers]
    active = [*range(len(workers))]
    while active:
        index = active.pop()
        worker, done = workers[index], ends[index]
        now = done[-1] if done else 0.0
        for number in worker.work[len(done) :]:
            if lacking[index][number]:
                break
            now = later(now, ready[index][number]) + worker.seconds[number]
            done.append(now)
            for target, seconds, latency, ahead in worker.sends[number]:
                free, needed = link_free[index], number + ahead
                free[target] = later(now, free[target]) + seconds
                ready[target][needed] = later(ready[target][needed], free[target] + latency)
                lacking[target][needed] -= 1
                if not lacking[target][needed]:
                    active.append(target)
    if any(len(done) < len(worker.work) for done, worker in zip(ends, workers, strict=True)):
        raise ValueError("the workers' lists wait for each other")
    return ends
