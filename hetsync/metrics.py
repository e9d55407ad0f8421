"""Metrics of test data that are right on any number of ranks: each is a sum and a count, and a rank's are added to
another's before anything is divided or rooted.

    def validate():
        found = {"mae": MAE(missing=0.0), "rmse": RMSE(missing=0.0)}
        for inputs, actual in test_loader:
            for metric in found.values():
                metric.update(model(inputs), actual)
        return found

    job.evaluate(validate)  # {"mae": ..., "rmse": ...}

Verbs are torchmetrics', whose metrics `job.evaluate` takes as well. These need no other package, and know missing
values and horizons.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from hetsync.doubles import doubled
from hetsync.errors import UserError

Value = float | torch.Tensor


def _nothing() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass(eq=False)
class Metric:
    """A record, as only such travel between any ranks.

    Attributes:
        total, count: Of what `update` has got, in float64: of one number, or of one for each of what is told apart.
    """

    total: torch.Tensor = field(default_factory=_nothing, init=False)
    count: torch.Tensor = field(default_factory=_nothing, init=False)

    def reset(self) -> None:
        self.total, self.count = _nothing(), _nothing()

    def compute(self) -> Value:
        """The metric of all that `update` has got: a number, or a tensor where some are told apart; nan of nothing."""
        found = self.total / self.count
        return found.cpu() if found.ndim else found.item()

    def merge_state(self, other: Metric) -> None:
        """Add what another has got."""
        self._add(other.total, other.count)

    def to(self, device: str | torch.device) -> Metric:
        self.total, self.count = self.total.to(device), self.count.to(device)
        return self

    def _add(self, total: torch.Tensor, count: torch.Tensor) -> None:
        self.total = self.total.to(total.device) + total
        self.count = self.count.to(count.device) + count


class Mean(Metric):
    """The mean of values, each with its weight: of batches' mean losses with the numbers of their samples, say."""

    @torch.no_grad()
    def update(self, value: Any, weight: Any = 1.0) -> None:
        """`value` and `weight`: numbers or tensors, of shapes that broadcast."""
        values, weights = (doubled(torch.as_tensor(each).detach()) for each in (value, weight))
        values, weights = torch.broadcast_tensors(values, weights.to(values.device))
        self._add((values * weights).sum(), weights.sum())


@dataclass(eq=False)
class Accuracy(Metric):
    """The part of the labels that are among the `top` highest scores; without those that equal `ignore_index`."""

    top: int = 1
    ignore_index: int | None = None

    @torch.no_grad()
    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """`scores` (N, classes, ...) and `labels` (N, ...), as `cross_entropy` takes them; or, with top=1, classes in
        place of scores, of the labels' shape."""
        if scores.shape == labels.shape and not scores.is_floating_point() and self.top == 1:
            found = scores.unsqueeze(1)
        elif scores.ndim == labels.ndim + 1 and scores.shape[:1] + scores.shape[2:] == labels.shape:
            found = scores.topk(min(self.top, scores.shape[1]), dim=1).indices
        else:
            raise UserError(
                f"Accuracy got scores of shape {tuple(scores.shape)} and labels of shape {tuple(labels.shape)}: give"
                " scores (N, classes, ...) and labels (N, ...)"
            )
        counted = torch.ones_like(labels, dtype=torch.bool)
        if self.ignore_index is not None:
            counted = labels != self.ignore_index
        right = (found == labels.unsqueeze(1)).any(1) & counted
        self._add(doubled(right.sum()), doubled(counted.sum()))


@dataclass(eq=False)
class OfErrors(Metric, ABC):
    """A mean over the values that are there.

    Args:
        missing: What stands in `actual` for a value that is not there, such as 0.0 or nan.
        by: The dimension whose places are told apart, such as that of horizons: `compute` has a number for each.
    """

    missing: float | None = None
    by: int | None = None

    @torch.no_grad()
    def update(self, predicted: torch.Tensor, actual: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Of equal shapes. `mask` (of a shape that broadcasts): where it is 0 or False, values do not count."""
        if predicted.shape != actual.shape:
            raise UserError(
                f"{type(self).__name__} got predictions of shape {tuple(predicted.shape)} for values of shape"
                f" {tuple(actual.shape)}: give both of one shape"
            )
        predicted, actual = doubled(predicted), doubled(actual)
        there = self._there(actual) if mask is None else self._there(actual) & (mask.to(actual.device) != 0)
        errors = torch.where(there, self._error(predicted, actual), 0.0)
        if self.by is None:
            self._add(errors.sum(), doubled(there.sum()))
        else:
            by = self.by % actual.ndim
            errors, there = (each.transpose(0, by).flatten(1) for each in (errors, there))
            self._add(errors.sum(1), doubled(there.sum(1)))

    def _there(self, actual: torch.Tensor) -> torch.Tensor:
        if self.missing is None:
            return torch.ones_like(actual, dtype=torch.bool)
        return ~actual.isnan() if math.isnan(self.missing) else actual != self.missing

    @abstractmethod
    def _error(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        """Of each value, in float64."""


class MAE(OfErrors):
    """The mean absolute error."""

    def _error(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        return (predicted - actual).abs()


class RMSE(OfErrors):
    """The root of the mean squared error."""

    def _error(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        return (predicted - actual).square()

    def compute(self) -> Value:
        mean = super().compute()
        return mean.sqrt() if isinstance(mean, torch.Tensor) else math.sqrt(mean)


class MAPE(OfErrors):
    """The mean absolute percentage error, in percent. Of an actual value of 0 there is none, so these do not count."""

    def _there(self, actual: torch.Tensor) -> torch.Tensor:
        return super()._there(actual) & (actual != 0)

    def _error(self, predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
        return 100 * ((predicted - actual) / actual).abs()
