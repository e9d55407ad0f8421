"""Ready-made metrics: what they count, what they leave out, and that parts are merged to the whole's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elsewhere import OnMps, on

import hetsync
from hetsync.errors import UserError
from hetsync.metrics import MAE, MAPE, RMSE, Accuracy, Mean, Metric

ROWS, STEPS, SENSORS = 7, 4, 3


def values() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    predicted, actual = torch.rand(2, ROWS, STEPS, SENSORS, generator=draw).unbind()
    return predicted, torch.where(actual > 0.3, actual, 0.0)


def scores() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, 5, generator=draw), torch.randint(5, (ROWS,), generator=draw)


@pytest.mark.parametrize("cut", [0, 1, 3, ROWS])
@pytest.mark.parametrize(
    ("make", "given"),
    [
        *(
            (make, values())
            for make in (MAE, RMSE, MAPE, lambda: MAE(0.0), lambda: RMSE(0.0, by=1), lambda: MAE(by=-1))
        ),
        *((make, scores()) for make in (Accuracy, lambda: Accuracy(2), lambda: Accuracy(ignore_index=3))),
        (Mean, (torch.arange(7.0), torch.arange(7))),
    ],
)
def test_parts_are_merged_to_the_whole(make: Callable[[], Metric], given: Any, cut: int) -> None:
    whole, *parts = make(), make(), make()
    whole.update(*given)
    for part, rows in zip(parts, (slice(0, cut), slice(cut, None)), strict=True):
        if len(given[0][rows]):
            part.update(*(each[rows] for each in given))
    parts[0].merge_state(parts[1])
    torch.testing.assert_close(parts[0].compute(), whole.compute(), rtol=1e-12, atol=0.0)


def test_errors_are_what_they_are_called() -> None:
    predicted, actual = values()
    errors, there = (predicted - actual).double().abs(), actual != 0
    assert 0 < there.sum() < there.numel()
    expected: list[tuple[Any, torch.Tensor]] = [
        (MAE(), errors.mean()),
        (MAE(0.0), errors[there].mean()),
        (RMSE(), errors.square().mean().sqrt()),
        (MAPE(), 100 * (errors / actual.double())[there].mean()),
        (MAE(by=1), errors.mean((0, 2))),
        (
            RMSE(0.0, by=2),
            torch.stack([errors[:, :, s][there[:, :, s]].square().mean().sqrt() for s in range(SENSORS)]),
        ),
    ]
    for metric, value in expected:
        metric.update(predicted, actual)
        torch.testing.assert_close(torch.as_tensor(metric.compute()).double(), value, rtol=1e-6, atol=0.0)


def test_missing_values_may_be_nan_or_masked_and_their_errors_nothing() -> None:
    predicted, actual = torch.tensor([1.0, math.nan, 3.0, 5.0]), torch.tensor([2.0, 7.0, math.nan, 8.0])
    mae = MAE(math.nan)
    mae.update(predicted, actual, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert (mae.compute(), float(mae.count)) == (2.0, 2)


def test_a_mask_is_of_a_shape_that_broadcasts() -> None:
    mae = MAE(by=1)
    mae.update(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([[True], [False]]))
    assert mae.count.tolist() == [1, 1, 1]


def test_the_metric_of_nothing_is_nan() -> None:
    assert all(math.isnan(metric.compute()) for metric in (Mean(), Accuracy(), MAE(), RMSE(), MAPE()))  # type: ignore[arg-type]


def test_accuracy_is_of_scores_of_classes_and_of_pixels() -> None:
    accuracy = Accuracy()
    accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    accuracy.update(torch.tensor([1, 0]), torch.tensor([1, 0]))
    accuracy.update(torch.rand(2, 3, 4, 4), torch.full((2, 4, 4), 9))
    assert accuracy.compute() == pytest.approx(3 / 36)
    few = Accuracy(top=5)
    few.update(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]))
    assert few.compute() == 1.0


def test_means_of_batches_are_weighted() -> None:
    mean = Mean()
    mean.update(torch.tensor(2.0, requires_grad=True), 3)
    mean.update(4.0)
    assert mean.compute() == 2.5
    mean.reset()
    mean.update(torch.tensor([1.0, 3.0]))
    assert mean.compute() == 2.0


def test_sums_of_float32_keep_their_places() -> None:
    mean = Mean()
    mean.update(torch.tensor([2.0**24, *[1.0] * 9]))
    assert mean.compute() == (2**24 + 9) / 10


@pytest.mark.parametrize(
    ("metric", "given", "sentence"),
    [
        (MAE(), (torch.ones(4, 1), torch.ones(4)), r"MAE got predictions of shape \(4, 1\) for values of shape \(4,\)"),
        (Accuracy(), (torch.ones(4, 2), torch.ones(3)), r"Accuracy got scores of shape \(4, 2\) and labels"),
        (Accuracy(), (torch.ones(4), torch.ones(4)), r"give scores \(N, classes, \.\.\.\)"),
        (Accuracy(2), (torch.ones(4).long(), torch.ones(4).long()), r"give scores \(N, classes, \.\.\.\)"),
    ],
)
def test_shapes_that_would_broadcast_to_something_else_are_refused(metric: Any, given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        metric.update(*given)


def test_they_come_with_the_package() -> None:
    assert hetsync.metrics.Accuracy is Accuracy


def test_devices_without_double_precision_have_the_same_metrics() -> None:
    predicted, actual = values()
    for make in (Mean, lambda: MAE(missing=0.0), lambda: RMSE(by=1)):
        here, there = make(), make()
        here.update(predicted, actual)
        there.update(on(OnMps, predicted), on(OnMps, actual))
        assert torch.equal(torch.as_tensor(here.compute()), torch.as_tensor(there.compute()))
    here, there = Accuracy(top=2), Accuracy(top=2)
    here.update(*scores())
    there.update(*(on(OnMps, each) for each in scores()))
    assert here.compute() == there.compute()
