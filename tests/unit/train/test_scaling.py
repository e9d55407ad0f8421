"""A GradScaler in batches without a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hetsync
from hetsync.plane.local import LocalPlane
from hetsync.train.prepared import PreparedScaler

Batch = Callable[[Any, nn.Module, torch.optim.Optimizer, int], None]  # after its backward pass


def skips_some(job: Any, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    job.clip_grad_norm_(model.parameters(), 100.0)
    if number == 3:
        optimizer.zero_grad()
    else:
        job.step(optimizer)


def adds_up(job: Any, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    job.clip_grad_norm_(model.parameters(), 100.0)
    if number % 2:
        job.step(optimizer)


def weights_after(batch: Batch, bound: int, precision: str) -> torch.Tensor:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    with hetsync.join(plane=LocalPlane(), delay_bound=bound, precision=precision, progress=False) as job:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        job.prepare(model, optimizer)
        loader = job.loader(data, 4)
        for _ in job.epochs(2):
            for number, (inputs, labels) in enumerate(loader):
                job.backward((model(inputs) - labels).square().mean())
                batch(job, model, optimizer, number)
    return model.weight.detach()


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("batch", [skips_some, adds_up])
def test_a_batch_without_a_step_leaves_the_scale_of_the_next_gradients_right(batch: Batch, bound: int) -> None:
    """Without autocast all is float32, and scaling by a power of 2 changes nothing."""
    assert torch.equal(weights_after(batch, bound, "float16"), weights_after(batch, bound, "float32"))


def prepared() -> PreparedScaler:
    return PreparedScaler(torch.amp.GradScaler("cpu", init_scale=1024.0), lambda optimizer: True)


def test_a_scale_that_is_set_counts() -> None:
    scaler = prepared()
    scaler.scale(torch.ones(()))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0


def test_there_is_nothing_to_find_another_scale_from() -> None:
    scaler = prepared()
    scaler.scale(torch.ones(()))
    scaler.update()
    assert scaler.get_scale() == 1024.0


def test_what_a_script_sets_is_the_scalers() -> None:
    scaler = prepared()
    scaler._growth_interval, scaler.note = 3, "mine"
    assert scaler.scaler._growth_interval == scaler._growth_interval == 3
    assert copy.deepcopy(scaler).note == "mine"
    assert scaler.scaler.note == "mine"  # type: ignore[attr-defined]
