"""Whatever an optimizer keeps, in its groups or elsewhere, is the same on all ranks at rest, and outlives a stop.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_optimizers_own.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import (
    BATCH,
    BOUNDS,
    EPOCHS,
    RESUMED_AT,
    SAMPLES,
    Result,
    Script,
    Seen,
    assert_same_weights,
    check,
    check_resumed,
    loader,
    on_ranks,
    settled,
)
from own_state import Adapting, Averaging, Elsewhere, Listing
from plain_job import PlainJob
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from training import Blobs, Net

from hetsync.plane.base import Plane
from hetsync.sync.group_state import alike, beside, kept, settings_of

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]

KINDS = [Adapting, Averaging, Elsewhere, Listing]
Make = Callable[[Iterable[Any]], Optimizer]


def held(optimizer: Optimizer) -> Any:
    return [kept(settings_of(group)) for group in optimizer.param_groups], beside(optimizer)


def loss_on_all(model: nn.Module) -> float:
    data = Blobs(SAMPLES)
    with settled(model):
        return cross_entropy(model(data.points), data.labels).item()


def training_with(make: Make) -> Script:
    def script(job: Any, seen: Seen) -> Result:
        torch.manual_seed(0)
        model = Net()
        optimizer = make(model.parameters())
        first = loss_on_all(model)
        model, optimizer, batches = job.prepare(model, optimizer, loader())
        for epoch in job.epochs(EPOCHS):
            getattr(optimizer, "train", lambda: None)()
            for points, labels, indices in batches:
                seen.indices[epoch] += indices.tolist()
                job.backward(cross_entropy(model(points), labels))
                optimizer.step()
                optimizer.zero_grad()
            seen.values.append(held(optimizer))
            getattr(optimizer, "eval", lambda: None)()
            seen.at_rest(model, optimizers=(optimizer,))
        return Result(model, loss_on_all(model), first)

    return script


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_all_ranks_hold_the_same(plane: Plane, make: Make, bound: int) -> None:
    _, seen = check(plane, training_with(make), bound)
    everyones = plane.gather_objects(seen.values)
    assert all(alike(theirs, everyones[0]) for theirs in everyones)
    if bound == 0:
        plain = Seen()
        training_with(make)(PlainJob(BATCH), plain)
        torch.testing.assert_close(numbers(seen.values), numbers(plain.values), rtol=1e-4, atol=1e-6)


def numbers(value: Any) -> Any:
    """Without what is none."""
    if isinstance(value, dict):
        return {key: numbers(part) for key, part in value.items() if numbers(part) is not None}
    if isinstance(value, list | tuple):
        return [numbers(part) for part in value]
    return value if isinstance(value, int | float | torch.Tensor) else None


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("at", RESUMED_AT)
def test_it_outlives_a_stop(plane: Plane, folder: Path, make: Make, bound: int, at: int) -> None:
    whole, resumed = check_resumed(plane, folder, training_with(make), bound, at)
    if bound == 0 or plane.size == 1:  # with a delay who takes which samples is a matter of speed
        assert_same_weights(whole[0], resumed[0])
        assert alike(whole[1].values[-1], resumed[1].values[-1])


def test_weights_set_between_epochs_are_what_all_go_on_from(plane: Plane) -> None:
    """To the bit: no part of a rank's progress, which rounds would weigh and round."""

    def script(job: Any, seen: Seen) -> Result:
        model = Net()
        model, optimizer, batches = job.prepare(model, SGD(model.parameters(), lr=0.0), loader())
        for epoch in job.epochs(EPOCHS):
            for points, labels, _ in batches:
                job.backward(cross_entropy(model(points), labels))
                job.step(optimizer)
            if epoch:
                assert all(torch.equal(weight, torch.full_like(weight, epoch / 7)) for weight in model.parameters())
            for weight in model.parameters():
                weight.data.fill_((epoch + 1) / 7)
        return Result(model)

    on_ranks(plane, script, 4)
