"""What replicas of a plan train with, whether they are in step or on their own, and where they rest."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetsync.data.loader import Loader
from hetsync.errors import UserError
from hetsync.plan.assignment import Assignment
from hetsync.plane.base import Channels
from hetsync.plane.ending import memory_lacking
from hetsync.replica.base import Replica
from hetsync.stop_signal import StopSignal
from hetsync.sync.milestones import Milestones
from hetsync.sync.rates import Rates
from hetsync.train.planned_books import Books
from hetsync.train.workplace import Workplace

WHOLE_MODEL = (
    "before it takes its part of a plan a real device times the whole model, which this one does not hold with its"
    " gradients and the optimizer's state: lower data.batch_size, or take devices of more memory"
)
STAGE = (
    "lower data.batch_size, or give this rank's stage fewer blocks, its replica a smaller share or more micro_batches"
)


@contextmanager
def memory_of_plans(remedy: str) -> Iterator[None]:
    """Inside, who lacks memory hears a remedy that plans know: they have no `sync.pins`."""
    try:
        yield
    except Exception as failure:
        if (lacking := memory_lacking(failure)) is None:
            raise
        raise UserError(f"out of {lacking}: {remedy}") from failure


@dataclass(frozen=True, kw_only=True)
class PlannedTerms:
    """Attributes:
    channels: Between all ranks; None for a rank alone.
    milestones: Of `total` samples.
    save_due: Is it time to save? Asked after each task.
    """

    at: Workplace
    assignment: Assignment
    replica: Replica
    optimizer: torch.optim.Optimizer
    rates: Rates
    loader: Loader
    channels: Channels | None
    books: Books
    milestones: Milestones
    total: int
    save_due: Callable[[], bool]


@dataclass(frozen=True)
class Rest:
    """All ranks hold the same.

    Attributes:
        before: Samples at the rest before, or where the last slice began.
        applied: Samples so far.
        reason: Of the milestone that it is; empty where it is none.
        caught: A signal that has come to any of the ranks.
        save: Is it time to?
    """

    before: int
    applied: int
    reason: str
    caught: signal.Signals | None
    save: bool


class Replicas(ABC):
    """One rank's part in them. Methods are collective."""

    @abstractmethod
    def rests(self, stop: StopSignal | None) -> Iterator[Rest]:
        """Trains up to each rest, until the last sample or a signal; all ranks stay at rest until the next is asked
        for."""

    @abstractmethod
    def close(self) -> None:
        """At rest; nothing of it runs on."""
