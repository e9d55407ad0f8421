"""sync.delay_bound auto: where delay loses training, all go back to what they had before it, and on without."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.plane.base import Plane
from hetsync.sync import delay_guard, rounds_rule

BATCH, BATCHES, EPOCHS = 8, 144, 1  # at each rest in delayed training another copy is kept
RATES = {torch.optim.SGD: 0.05, torch.optim.AdamW: 0.2}
SOON = {  # with delay, wherever ranks wait at all
    "DELAY_COSTS": 0.0,
    "SETTLING_TASKS": 0,
    "KEPT": -1e9,
    "WINDOW_ROUNDS": 30,
    "WINDOW_TASKS": 2,
    "WINDOW_SECONDS": 0.0,
}


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(BATCH * BATCHES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(points, points @ torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64))


def fresh() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


@pytest.mark.mpi
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("how", ["nan", "away"])
def test_a_job_goes_on_as_if_there_had_been_no_delay(
    plane: Plane,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer_class: type[torch.optim.Optimizer],
    how: str,
) -> None:
    """Weights are those of synchronous training throughout, in a part of which ranks were delayed."""
    for name, value in SOON.items():
        monkeypatch.setattr(rounds_rule, name, value)
    monkeypatch.setattr(delay_guard, "WINDOW_BATCHES", 1)
    found = {}
    for bound in ("auto", 0):
        run = folder / str(bound)
        with hetsync.join(plane=plane, run=run, delay_bound=bound, seed=3, progress=False) as job:
            model = fresh()
            optimizer = optimizer_class(model.parameters(), lr=RATES[optimizer_class])
            model, optimizer, loader = job.prepare(model, optimizer, DataLoader(examples(), BATCH, shuffle=True))
            delayed = [False]
            for weight in model.parameters():
                if how == "away":
                    weight.register_hook(lambda gradient, delayed=delayed: -10 * gradient if delayed[-1] else gradient)
            for _ in job.epochs(EPOCHS):
                for points, targets in loader:
                    time.sleep(0.001 * (job.rank + 1))
                    delayed.append(job._running.session.tasks.work.task.synchronous_round is None)
                    loss = nn.functional.mse_loss(model(points), targets)
                    if how == "nan" and delayed[-1] and job.rank == job.size - 1:
                        loss = loss * float("nan")
                    job.backward(loss)
                    job.step(optimizer)
            found[bound] = [weight.detach().clone() for weight in model.parameters()]
        if bound == "auto" and plane.size > 1:
            assert any(map(any, plane.gather_objects(delayed)))
            read = json.loads((run / "summary.json").read_text()) if plane.rank == 0 else None
            summary = plane.broadcast_object(read)
            assert [each["cause"] for each in summary["rollbacks"]] == ["delay"], summary["rounds_changes"]
            assert "delay has lost training" in summary["rollbacks"][0]["told"]
            assert summary["samples_applied"] == BATCH * BATCHES * EPOCHS
            assert summary["delay_bound"] == 0
    torch.testing.assert_close(found["auto"], found[0], rtol=0, atol=1e-12)
