"""What an evaluation finds is the same on any number of ranks, however unequal: that of one process on all of the data.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_metrics.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from hetsync import metrics
from hetsync.config.parser import recipe_of
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.train.job import Job
from hetsync.train.session import Session

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

SAMPLES, HORIZONS, CLASSES = 97, 3, 5
SHARES = {"equal": [1, 1, 1, 1], "unequal": [2, 5, 1, 4], "some have none": [3, 0, 2, 0], "one has all": [0, 1, 0, 0]}


def trips() -> TensorDataset:
    """Inputs, values at three horizons of which many are missing, classes, some to be ignored. The second half is
    harder."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=draw)
    actual = inputs.sum(1, keepdim=True) * torch.linspace(0, 4, SAMPLES)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    actual[:40:2] = 0
    classes = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    classes[:20] = -100
    return TensorDataset(inputs, actual, classes)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(8, HORIZONS), nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values(inputs), self.scores(inputs)


def validate(model: Both, loader: Any, *, missing: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "mae": metrics.MAE(),
        "masked_mae": metrics.MAE(missing),
        "rmse": metrics.RMSE(),
        "rmse_by_horizon": metrics.RMSE(missing, by=1),
        "mape": metrics.MAPE(),
        "torchs_rmse": torchmetrics.MeanSquaredError(squared=False),
    }
    top = metrics.Accuracy(top=2, ignore_index=-100)
    sums: dict[str, Any] = {"pair": (0.0, 0), "pairs": ((torch.zeros(()), 0),) * HORIZONS}
    for inputs, actual, classes in loader:
        values, scores = model(inputs)
        for metric in found.values():
            metric.update(values, actual)
        top.update(scores, classes)
        loss, labels = sums["pair"]
        loss += cross_entropy(scores, classes, reduction="sum").item()
        sums["pair"] = loss, labels + int((classes != -100).sum())
        errors = (values - actual).abs().sum(0)
        by_horizon = zip(errors, sums["pairs"], strict=True)
        sums["pairs"] = tuple((total + error, count + len(actual)) for error, (total, count) in by_horizon)
    return {**found, "top2": top, **sums}


@torch.no_grad()
def of_all(model: Both) -> dict[str, Any]:
    """The same in plain torch."""
    inputs, actual, classes = trips().tensors
    values, scores = model(inputs)
    errors, there, counted = (values - actual).abs(), actual != 0, classes != -100
    best = scores[counted].topk(2).indices == classes[counted, None]
    return {
        "mae": errors.mean(),
        "masked_mae": errors[there].mean(),
        "rmse": errors.square().mean().sqrt(),
        "torchs_rmse": errors.square().mean().sqrt(),
        "rmse_by_horizon": torch.stack([errors[there[:, h], h].square().mean().sqrt() for h in range(HORIZONS)]),
        "mape": 100 * (errors / actual.abs())[there].mean(),
        "top2": best.any(1).float().mean(),
        "pair": cross_entropy(scores, classes),
        "pairs": errors.mean(0),
    }


def make_job(plane: Plane, rate: float = 0.01) -> tuple[Job, Both, Any, Any]:
    job = Job(recipe_of({"run": {"epochs": 1}}), plane, keep=False, show="nothing")
    torch.manual_seed(0)
    model = Both()
    optimizer = SGD(model.parameters(), lr=rate)
    loader = DataLoader(trips(), batch_size=32, shuffle=True)
    tests = DataLoader(trips(), batch_size=16)
    _, _, loader, tests = job.prepare(model, optimizer, loader, tests)
    return job, model, loader, tests


@pytest.mark.parametrize("shares", SHARES)
def test_metrics_are_exact(plane: Plane, shares: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = SHARES[shares][: plane.size]
    if not any(given):
        pytest.skip("a rank alone has all")
    job, model, loader, tests = make_job(plane)
    with job:
        for _ in job.epochs(1):
            for inputs, actual, _ in loader:
                job.backward((model(inputs)[0] - actual).abs().mean())
                job.step()
            monkeypatch.setattr(Session, "shares_left", property(lambda self: given))
            found = job.evaluate(validate, model, tests, missing=0.0)
            expected = of_all(model)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(torch.as_tensor(found[name]).float(), value, rtol=1e-6, atol=0.0)
            assert job.metrics["masked_mae"] == found["masked_mae"]
            # Outside of an evaluation each rank sees all.
            assert sum(len(labels) for *_, labels in tests) == len(tests.dataset) == SAMPLES
            monkeypatch.undo()


def test_predictions_and_labels_are_no_sum_and_count(plane: Plane) -> None:
    job, model, loader, tests = make_job(plane)

    def validate() -> tuple[torch.Tensor, torch.Tensor]:
        found = [(model(inputs)[1].argmax(1), classes) for inputs, _, classes in tests]
        predictions, labels = map(torch.cat, zip(*found, strict=True))
        return predictions, labels

    with job:
        for _ in job.epochs(1):
            with pytest.raises(UserError, match=r"as its result, without its count, .* return a pair"):
                job.evaluate(validate)
            by_rows = job.evaluate(lambda: torch.stack(validate(), 1), combine=torch.cat)
            assert len(by_rows) == SAMPLES
            for inputs, actual, _ in loader:
                job.backward((model(inputs)[0] - actual).abs().mean())
                job.step()


@pytest.mark.parametrize("every", [32, None])
def test_so_are_those_of_evaluations_beside_training(
    plane: Plane, every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "shares_left", property(lambda self: SHARES["some have none"][: plane.size]))
    job, model, loader, tests = make_job(plane, rate=0.0)
    expected, found = of_all(model), []
    job.on("evaluation", found.append)
    with job:
        job.evaluate_every(every, lambda: validate(model, tests, missing=0.0))
        for _ in job.epochs(1):
            for inputs, actual, _ in loader:
                job.backward((model(inputs)[0] - actual).abs().mean())
                job.step()
    if plane.rank == 0:
        assert len(found) >= 1 + bool(every)
        for metrics_ in found:
            numbers = {name: value for name, value in expected.items() if not value.ndim}
            assert metrics_ == pytest.approx({name: float(value) for name, value in numbers.items()}, rel=1e-6)
