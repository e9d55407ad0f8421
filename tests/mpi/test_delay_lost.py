"""sync.delay_bound auto: where delay loses training, all go back to what they had before it, and on without."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    "ADAPTIVE_DELAY_COSTS": 0.0,
    "SETTLING_TASKS": 0,
    "OVERWHELMING": float("inf"),
    "KEPT": -1e9,
    "WINDOW_ROUNDS": 30,
    "WINDOW_TASKS": 2,
    "WINDOW_SECONDS": 0.0,
}


def examples(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(BATCH * batches, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(points, points @ torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64))


def fresh() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


Spoils = Callable[[int, bool], str | None]  # by epoch, and whether the rank is delayed: how its batch goes wrong


def trained(
    plane: Plane,
    run: Path,
    bound: int | str,
    spoils: Spoils,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    epochs: int = EPOCHS,
    batches: int = BATCHES,
    resume: bool = False,
    look: Callable[[Any], None] = lambda running: None,
    lines: Callable[[int, torch.optim.Optimizer], None] = lambda epoch, optimizer: None,
) -> tuple[list[torch.Tensor], dict[str, Any], bool]:
    """Weights in the end, the summary, and whether any rank was delayed."""
    kind = None  # of this batch
    was_delayed = False

    def turned(gradient: torch.Tensor) -> torch.Tensor:
        return -10 * gradient if kind == "away" else gradient

    with hetsync.join(plane=plane, run=run, resume=resume, delay_bound=bound, seed=3, progress=False) as job:
        model = fresh()
        for weight in model.parameters():
            weight.register_hook(turned)
        optimizer = optimizer_class(model.parameters(), lr=RATES[optimizer_class])
        data = examples(batches)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        for epoch in job.epochs(epochs):
            look(job._running)
            for points, targets in loader:
                time.sleep(0.001 * (job.rank + 1))
                delayed = job._running.session.tasks.work.task.synchronous_round is None
                was_delayed |= delayed
                kind = spoils(epoch, delayed)
                loss = nn.functional.mse_loss(model(points), targets)
                job.backward(loss * float("nan") if kind == "nan" and job.rank == job.size - 1 else loss)
                job.step(optimizer)
            lines(epoch, optimizer)
    read = json.loads((run / "summary.json").read_text()) if plane.rank == 0 else None
    summary = plane.broadcast_object(read)
    assert summary["samples_applied"] == BATCH * batches * epochs
    return [weight.detach().clone() for weight in model.parameters()], summary, any(plane.gather_objects(was_delayed))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SOON.items():
        monkeypatch.setattr(rounds_rule, name, value)
    monkeypatch.setattr(delay_guard, "WINDOW_BATCHES", 1)


@pytest.mark.each_value
@pytest.mark.mpi
@pytest.mark.parametrize("optimizer_class", RATES)
@pytest.mark.parametrize("how", ["nan", "away"])
def test_a_job_goes_on_as_if_there_had_been_no_delay(
    plane: Plane, folder: Path, optimizer_class: type[torch.optim.Optimizer], how: str
) -> None:
    """Weights are those of synchronous training throughout, in a part of which ranks were delayed."""

    def spoils(epoch: int, delayed: bool) -> str | None:
        return how if delayed else None

    found, summary, delayed = trained(plane, folder / "auto", "auto", spoils, optimizer_class)
    if plane.size > 1:
        assert delayed
        assert [each["cause"] for each in summary["rollbacks"]] == ["delay"], summary["rounds_changes"]
        assert "delay has lost training" in summary["rollbacks"][0]["told"]
        assert summary["delay_bound"] == 0
    plain, *_ = trained(plane, folder / "plain", 0, spoils, optimizer_class)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_what_was_good_of_delayed_training_is_kept(plane: Plane, folder: Path) -> None:
    """All go back to the newest rest that losses were good after, and not to where delay began."""
    first, each = 4, BATCH * 24

    def spoils(epoch: int, delayed: bool) -> str | None:
        return "away" if delayed and epoch >= first else None

    positions = []
    _, summary, _ = trained(
        plane,
        folder / "run",
        "auto",
        spoils,
        epochs=first + 2,
        batches=24,
        look=lambda running: positions.append(running and running._kept.positions),
    )
    before = plane.gather_objects(positions[first])
    assert before == [before[0]] * 2
    assert before[0][0] >= (first - 2) * each, "the one beside the newest is from when losses were good, too"
    (rollback,) = summary["rollbacks"]
    assert first * each - each <= rollback["checkpoint_samples"] <= first * each
    assert rollback["samples"] <= 2 * each


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_resumed_job_that_is_delayed_has_a_way_back(plane: Plane, folder: Path) -> None:
    run, each = folder / "run", BATCH * 48
    _, before, _ = trained(plane, run, "auto", lambda epoch, delayed: None, epochs=1, batches=48)
    assert before["delay_bound"] == 4

    def spoils(epoch: int, delayed: bool) -> str | None:
        return "nan" if delayed else None

    found, summary, _ = trained(plane, run, "auto", spoils, epochs=2, batches=48, resume=True)
    (rollback,) = summary["rollbacks"]
    assert rollback["checkpoint_samples"] == each
    assert summary["delay_bound"] == 0
    assert all(weight.isfinite().all() for weight in found)


@pytest.mark.each_value(1)
@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["nan", "away"])
def test_what_the_script_does_between_epochs_is_not_undone(plane: Plane, folder: Path, how: str) -> None:
    """Training is lost in the third epoch, mostly soon after its beginning: the losses of the second were the last good
    ones. Lines between epochs are run once each, so what they have done must stand."""
    rates: list[float] = []  # with which epochs have ended

    def lines(epoch: int, optimizer: torch.optim.Optimizer) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = 0.9 * rates[-1]

    def spoils(epoch: int, delayed: bool) -> str | None:
        return how if delayed and epoch == 2 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delay_guard, "WINDOW_BATCHES", 8)  # so that the third epoch has no window yet
        *_, summary, _ = trained(plane, folder / "run", "auto", spoils, epochs=4, batches=48, lines=lines)
    (rollback,) = summary["rollbacks"]
    # Losses may climb for so long that the next epoch has begun.
    epochs_before, rest = divmod(rollback["checkpoint_samples"], 48 * BATCH)
    assert rest == 0
    assert epochs_before in ((2, 3) if how == "away" else (2,))
    everyones = plane.gather_objects(rates)
    assert everyones == [pytest.approx([0.05 * 0.9**epoch for epoch in range(4)])] * 2
