"""A rank's books: how long it trains, what of that goes into its tasks, and the task that it computes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from hetsync.data.ledger import Span
from hetsync.errors import UserError
from hetsync.sync.messages import Task


class TrainingClock:
    """Seconds of training: from the first slice on, less those at rest and in evaluations. Begins stopped."""

    def __init__(self) -> None:
        self._segment: tuple[float, float | None] = (0.0, None)  # seconds before, began; the latter None while stopped

    def seconds(self) -> float:
        """So far; from any thread."""
        before, began = self._segment  # in one step: rank 0's communication thread asks, too
        return before if began is None else before + time.monotonic() - began

    def start(self) -> float:
        """What follows is training; returns the moment."""
        now = time.monotonic()
        self._segment = (self.seconds(), now)
        return now

    def stop(self) -> float:
        """What follows is not training; returns the moment."""
        self._segment = (self.seconds(), None)
        return time.monotonic()


@dataclass
class RankTotals:
    """What a rank has done so far, in seconds of its main thread, and samples."""

    compute_seconds: float = 0.0
    data_seconds: float = 0.0
    train_seconds: float = 0.0
    tasks: int = 0
    samples: int = 0
    since_rest: int = 0
    loop_steps: int = 0  # synchronous rounds since the last rest whose step the loop has made
    anchor_sha256: str = ""


@dataclass(eq=False)
class TaskInWork:
    """A task that this rank computes, slice by slice.

    `stepped` are the optimizers that have made their step in the slice that is out, by number, `collected` those whose
    gradients are ready for it. `spoiled` are spans of slices whose gradients were not finite, and have moved nothing.
    """

    task: Task
    slices_left: int = 0
    slice_samples: int = 0  # of the slice that is out, or was last
    out: bool = False  # with the loop
    last: bool = False  # of the task's slices
    stepped: set[int] = field(default_factory=set)
    collected: set[int] = field(default_factory=set)
    going_on: bool = False  # it computes on sums that it has waited for
    void: bool = False  # a rank has died, and no step is due any more
    losses: list[tuple[torch.Tensor | float, int]] = field(default_factory=list)  # means, of so many samples
    spoiled: list[Span] = field(default_factory=list)
    synchronous: bool = field(init=False)

    def __post_init__(self) -> None:
        self.synchronous = self.task.synchronous_round is not None

    def open_slice(self, samples: int) -> None:
        self.slice_samples, self.out, self.last = samples, True, self.slices_left == 1
        self.stepped, self.collected = set(), set()

    def add_loss(self, mean: torch.Tensor | float) -> None:
        """Of the slice that is out. UserError unless it is one number."""
        self.losses.append((one_number(mean), self.slice_samples))

    @property
    def loss_sum(self) -> float:
        """Waits for the device."""
        total = 0.0
        for mean, samples in self.losses:
            total += float(mean) * samples
        return total


def one_number(loss: torch.Tensor | float) -> torch.Tensor | float:
    """A loss as a number, or as a detached copy, which stays as it is, where that would wait for the device. UserError
    where it is not one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.detach()
        return float(loss) if loss.is_cpu else loss.clone()
    if isinstance(loss, int | float):
        return float(loss)
    what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"that is a {type(loss).__name__}"
    raise UserError(f"step got a loss {what}: give the mean over the slice's samples, or nothing")
