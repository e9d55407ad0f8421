"""By how much a slice counts: by the units that its loss is a mean over. These are its samples, unless the loop says
otherwise: labelled tokens, entries that are not masked, the sum of class weights.

Synchronous mode divides a round's sum by its units, which are known once the sum is. Delayed mode has no such moment,
since a slice is stepped on where it is computed: there its loss is multiplied by its units over those that so many
samples have on average (`README.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetsync.errors import UserError

if TYPE_CHECKING:  # the state machine knows no tensors
    import torch

KEPT = 0.98  # of what is known of units, when a batch more is: about the last fifty count


class Told:
    """Of a stage's gradients of one slice: how many units they are means over, of which losses."""

    def __init__(self, units: float) -> None:
        self.units = units
        self.losses: list[torch.Tensor] = []

    @property
    def is_void(self) -> bool:
        """Are its losses no numbers, as means over nothing? Waits for the device."""
        return bool(self.losses) and all(math.isnan(float(loss)) for loss in self.losses)


class TaskUnits:
    """Synchronous mode: of each stage's gradients of a task, slice by slice."""

    def __init__(self) -> None:
        self._samples = 0.0
        self._units = 0.0
        self._loss: torch.Tensor | None = None  # of the backward call under way
        self._slice: dict[int, Told] = {}  # by stage
        self._taken: dict[int, list[Told]] = {}
        self.sums = False  # are losses sums, which mean as much whatever other slices hold?

    def open_slice(self, samples: int) -> None:
        self._samples = self._units = float(samples)
        self._loss = None
        self._slice.clear()

    def tell(self, units: float | None, loss: torch.Tensor | None, is_sum: bool = False) -> None:
        """The backward calls from now on are of this loss, a mean over so many units (None: the slice's samples), or
        made of a sum over samples."""
        self._units = self._samples if units is None else units
        self._loss = loss
        self.sums |= is_sum

    def arrived(self, stage: int) -> None:
        """A gradient of the backward call under way."""
        told = self._slice.get(stage)
        if told is None:
            told = self._slice[stage] = Told(self._units)
        if told.units != self._units:
            raise UserError(
                f"the losses of one step are means over {told.units:g} and over {self._units:g} units in one slice, but"
                " with sync.delay_bound 0 slices add up before any number of units is known, and are divided by one:"
                " give job.backward one loss of both, such as (first.sum() + c * second.sum()) / units with"
                " weight=units, or take a delay bound of 1 or more"
            )
        if self._loss is not None and not (told.losses and told.losses[-1] is self._loss):
            told.losses.append(self._loss)

    def of_slice(self, stage: int) -> float:
        """What the stage's gradients of the slice that is out count by: nothing where none has arrived."""
        told = self._slice.get(stage)
        return 0.0 if told is None else told.units

    def take(self, stage: int) -> None:
        """They are whole."""
        if (told := self._slice.pop(stage, None)) is not None:
            self._taken.setdefault(stage, []).append(told)

    def has_any(self, stage: int) -> bool:
        """Has any gradient of the stage arrived in the task's slices that were taken?"""
        return stage in self._taken

    def given(self, stage: int) -> float:
        """By how much its gradients have counted in the task's slices that were taken."""
        return sum(told.units for told in self._taken.get(stage, ()))

    def counted(self, stage: int) -> float:
        """Of that, what has brought something to learn. Waits for the device."""
        return sum(told.units for told in self._taken.get(stage, ()) if not told.is_void)

    def clear(self) -> None:
        """Another task's follow."""
        self._slice.clear()
        self._taken.clear()
        self.sums = False


Count = tuple[float, int]  # units, and samples that have them


class AverageUnits:
    """Units a sample over about the last fifty batches, of each backward call of a slice to which the loop gives a
    weight, in their order."""

    def __init__(self) -> None:
        self.sums: tuple[tuple[float, float], ...] = ()  # of units, and of samples, fading

    def add(self, told: Sequence[Count], batch: int) -> None:
        """What a task has had, by call; `batch` is B."""
        sums = [*self.sums, *[(0.0, 0.0)] * (len(told) - len(self.sums))]
        for place, (units, samples) in enumerate(told):
            kept = KEPT ** (samples / batch)
            sums[place] = kept * sums[place][0] + units, kept * sums[place][1] + samples
        self.sums = tuple(sums)

    @property
    def per_sample(self) -> tuple[float, ...]:
        """By call; 0 where nothing is known."""
        return tuple(units / samples if samples else 0.0 for units, samples in self.sums)
