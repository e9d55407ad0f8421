"""A rank's books: how long it trains, what of that goes into its tasks, and the task that it computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hetsync.data.ledger import Span
from hetsync.errors import UserError
from hetsync.sync.deltas import Stepped
from hetsync.sync.messages import Task
from hetsync.sync.undo import Tensors
from hetsync.sync.units import Count


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


class Unstepped(NamedTuple):
    """Slices of delayed mode whose gradients wait for a step of the loop."""

    samples: int = 0
    slices: int = 0

    @property
    def mean(self) -> float:
        return self.samples / self.slices


@dataclass(eq=False)
class TaskInWork:
    """A task that this rank computes, slice by slice.

    `stepped` are the optimizers that have made their step in the slice that is out, by number, `collected` those whose
    gradients are ready for it. `spoiled` are spans of slices whose gradients were not finite, and have moved nothing.
    `steps` is what the steps so far stand for, in delayed mode.
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
    losses: list[tuple[int, torch.Tensor | float, int]] = field(default_factory=list)  # by slice: means, samples
    spoiled: list[Span] = field(default_factory=list)
    told: int = 0  # backward calls of the job in the slice that is out
    idle: int = 0  # those of them that had nothing to learn
    skipped: bool = False  # the loop has left the slice that is out as it came
    clips: list[Callable[[], object]] = field(default_factory=list)  # in that slice
    before_step: dict[int, Tensors] = field(default_factory=dict)  # by optimizer: gradients, as the loop has got them
    after_step: Tensors | None = None  # what steps have made, where another rank has made them alone
    weighted: int = 0  # those of them with a weight
    units: list[Count] = field(default_factory=list)  # by weighted call, with the samples that had them
    steps: Stepped = field(default_factory=lambda: Stepped(0.0, 0))
    synchronous: bool = field(init=False)

    def __post_init__(self) -> None:
        self.synchronous = self.task.synchronous_round is not None

    def open_slice(self, samples: int) -> None:
        self.slice_samples, self.out, self.last = samples, True, self.slices_left == 1
        self.stepped, self.collected = set(), set()
        self.told = self.weighted = self.idle = 0
        self.skipped, self.clips = False, []
        self.before_step, self.after_step = {}, None

    def close_slice(self, unstepped: Unstepped) -> Unstepped:
        """What waits for the loop's next step, where `unstepped` did before this slice. A step counts for the mean of
        the slices that it has added up, in whatever tasks, and not for the one that it falls into."""
        if not (self.synchronous or self.skipped):
            unstepped = Unstepped(unstepped.samples + self.slice_samples, unstepped.slices + 1)
        if not self.stepped:
            return unstepped
        if unstepped.slices:
            self.steps = Stepped(self.steps.samples + unstepped.mean, self.steps.steps + 1)
        return Unstepped()

    def add_loss(self, mean: torch.Tensor | float) -> None:
        """Of the slice that is out. UserError unless it is one number."""
        self.losses.append((self.slices_left, one_number(mean), self.slice_samples))

    def count_units(self, units: float) -> None:
        """Of a weighted backward call in the slice that is out."""
        place, self.weighted = self.weighted, self.weighted + 1
        self._add_units(place, units)

    def miss_units(self, calls: int) -> None:
        """The slice that is out has made none of so many such calls, as it has nothing to learn."""
        for place in range(calls):
            self._add_units(place, 0.0)

    def _add_units(self, place: int, units: float) -> None:
        self.units += [(0.0, 0)] * (place + 1 - len(self.units))
        before, samples = self.units[place]
        self.units[place] = before + units, samples + self.slice_samples

    def take_losses(self) -> tuple[float, int]:
        """Their sum over samples, and the samples that are in it. What is no number is a mean over nothing. Waits for
        the device."""
        total, by_slice = 0.0, {}
        for slice_left, mean, samples in self.losses:
            if not math.isnan(loss := float(mean)):
                total += loss * samples
                by_slice[slice_left] = samples
        return total, sum(by_slice.values())


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
