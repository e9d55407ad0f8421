"""What works in a loop: schedules of learning rates, averages of weights, and all of it over a resume.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_loops_schedules.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import (
    BATCH,
    BATCHES,
    BOUNDS,
    EPOCH_AND_MORE,
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
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from training import Blobs, Net

from hetsync.plane.base import Plane

# Four ranks show nothing that two do not: sums and staleness are test_engine.py's, loops of four test_job_leaving.py's.
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.each_value,
    pytest.mark.ranks(1, 2),
    pytest.mark.parametrize("bound", BOUNDS),
]

Schedulers = Callable[[Optimizer], list[LRScheduler]]
STEPS = EPOCHS * BATCHES


def loss_on_all(model: nn.Module) -> float:
    data = Blobs(SAMPLES)
    with settled(model):
        return cross_entropy(model(data.points), data.labels).item()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02)


def sgd(model: nn.Module) -> Optimizer:
    return SGD([{"params": [weight], "lr": 0.04} for weight in model.parameters()], momentum=0.9)


def scheduled(
    schedulers_of: Schedulers,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer] = adamw,
    by: str = "step",
    every: int = 1,
    warm: int = 0,
    epochs: int = EPOCHS,
    prepared: bool = True,
    last: bool = False,
    change: Callable[[Any], None] = lambda scheduler: None,
    change_after: Sequence[int] = (),
) -> Script:
    """Steps schedulers after each batch (or each `every`, or from the epoch `warm` on), each epoch or evaluation; with
    `last` also after the last batch of an epoch, where that is none of the `every`. Has them changed after some epochs
    (-1: before all)."""

    def script(job: Any, seen: Seen) -> Result:
        model = Net()
        optimizer = make_optimizer(model)
        first = loss_on_all(model)
        schedulers = schedulers_of(optimizer)
        _, _, batches, *mine = job.prepare(model, optimizer, loader(), *(schedulers if prepared else []))
        schedulers = mine if prepared else schedulers
        for scheduler in schedulers if -1 in change_after else []:
            change(scheduler)
        for epoch in job.epochs(epochs):
            for number, (points, labels, indices) in enumerate(batches):
                seen.indices[epoch] += indices.tolist()
                job.backward(cross_entropy(model(points), labels))
                job.step(optimizer)
                for scheduler in schedulers if by == "step" and epoch >= warm else []:
                    if (number + 1) % every == 0:
                        scheduler.step()
            loss = job.evaluate(lambda: {"loss": (loss_on_all(model), 1)})["loss"]
            for scheduler in schedulers:
                if by == "epoch" or (last and BATCHES % every):
                    scheduler.step()
                elif by == "metric":
                    scheduler.step(loss)
                if epoch in change_after:
                    change(scheduler)
            seen.at_rest(model, optimizers=(optimizer,))
            seen.values.append([_momentum(group) for group in optimizer.param_groups])
        return Result(model, loss_on_all(model), first)

    return script


def _momentum(group: dict[str, Any]) -> float:
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


def warmed_up(optimizer: Optimizer) -> list[LRScheduler]:
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=BATCHES - 2)
    return [SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=STEPS)], milestones=[BATCHES - 2])]


def plateau(optimizer: Optimizer) -> list[LRScheduler]:
    return [ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)]


BY_STEP: dict[str, Schedulers] = {
    "cosine": lambda optimizer: [CosineAnnealingLR(optimizer, T_max=STEPS + 2)],
    "one cycle": lambda optimizer: [OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)],
    "sequential": warmed_up,
    "lambda": lambda optimizer: [LambdaLR(optimizer, lambda step: 1 / (1 + step))],
    "chained": lambda optimizer: [
        ChainedScheduler([ExponentialLR(optimizer, 0.97), LinearLR(optimizer, 0.1, total_iters=5)])
    ],
    "two": lambda optimizer: [ExponentialLR(optimizer, 0.97), LinearLR(optimizer, 0.1, total_iters=5)],
}


@pytest.mark.parametrize("name", BY_STEP)
def test_by_step(plane: Plane, bound: int, name: str) -> None:
    check(plane, scheduled(BY_STEP[name], make_optimizer=sgd), bound)


def test_a_cycle_of_rates_and_betas(plane: Plane, bound: int) -> None:
    check(plane, scheduled(BY_STEP["one cycle"]), bound)


@pytest.mark.parametrize("every", [2, 3])
def test_each_nth_batch(plane: Plane, bound: int, every: int) -> None:
    check(plane, scheduled(BY_STEP["cosine"], every=every), bound)


@pytest.mark.parametrize("every", [2, 3])
def test_each_nth_batch_and_the_last(plane: Plane, bound: int, every: int) -> None:
    """The last one's step after the loop over batches, where all ranks are at rest."""
    check(plane, scheduled(BY_STEP["cosine"], every=every, last=True), bound)


def test_one_that_is_not_prepared_between_epochs(plane: Plane, bound: int) -> None:
    _, seen = check(plane, scheduled(lambda optimizer: [StepLR(optimizer, 2, 0.1)], by="epoch", prepared=False), bound)
    assert seen.rates == [[0.02], [pytest.approx(0.002)], [pytest.approx(0.002)]]


def test_from_the_second_epoch_on(plane: Plane, bound: int) -> None:
    check(plane, scheduled(BY_STEP["cosine"], warm=1), bound)


def test_by_epoch(plane: Plane, bound: int) -> None:
    _, seen = check(plane, scheduled(lambda optimizer: [StepLR(optimizer, 2, 0.1)], by="epoch"), bound)
    assert seen.rates == [[0.02], [pytest.approx(0.002)], [pytest.approx(0.002)]]


def test_by_metric(plane: Plane, bound: int) -> None:
    """A threshold that no loss reaches."""
    _, seen = check(plane, scheduled(plateau, by="metric"), bound)
    assert seen.rates[-1][0] < 0.02


def goes_back(scheduler: Any) -> None:
    scheduler.last_epoch = 3


def set_anew(scheduler: Any) -> None:
    scheduler.base_lrs, scheduler.T_max, scheduler.eta_min = [0.1], 7, 0.01


def forgets_the_best(scheduler: Any) -> None:
    scheduler.best, scheduler.num_bad_epochs, scheduler.patience = float("inf"), 0, 1


COSINE = BY_STEP["cosine"]
LAMBDA = BY_STEP["lambda"]
SETS: dict[str, tuple[Schedulers, str, Callable[[Any], None]]] = {
    "last_epoch, by step": (COSINE, "step", goes_back),
    "last_epoch, by epoch": (LAMBDA, "epoch", goes_back),
    "rates and T_max": (LAMBDA, "epoch", set_anew),
    "rates and T_max, by step": (COSINE, "step", set_anew),
    "patience": (plateau, "metric", forgets_the_best),
}


@pytest.mark.parametrize("name", SETS)
def test_what_is_set_on_a_scheduler(plane: Plane, bound: int, name: str) -> None:
    """Before the loop, and at rest after the second epoch."""
    schedulers, by, change = SETS[name]
    check(plane, scheduled(schedulers, by=by, epochs=4, change=change, change_after=[-1, 1]), bound, epochs=4)


# Over a resume: in the middle of the second epoch, and at its end.


@pytest.mark.parametrize("name", BY_STEP)
def test_by_step_over_a_resume(plane: Plane, folder: Path, bound: int, name: str) -> None:
    check_resumed(plane, folder, scheduled(BY_STEP[name], make_optimizer=sgd), bound, EPOCH_AND_MORE)


@pytest.mark.parametrize("at", RESUMED_AT)
def test_each_second_batch_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    check_resumed(plane, folder, scheduled(BY_STEP["cosine"], every=2), bound, at)


@pytest.mark.parametrize("at", RESUMED_AT)
def test_by_epoch_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    check_resumed(plane, folder, scheduled(lambda optimizer: [StepLR(optimizer, 2, 0.1)], by="epoch"), bound, at)


@pytest.mark.parametrize("at", RESUMED_AT)
def test_by_metric_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    check_resumed(plane, folder, scheduled(plateau, by="metric"), bound, at, rates=bound == 0)


# Averages of weights.


def averaged(job: Any, seen: Seen) -> Result:
    model = Net()
    optimizer, average = adamw(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    first, shadow = loss_on_all(model), {name: weight.detach().clone() for name, weight in model.named_parameters()}
    *_, batches = job.prepare(model, optimizer, average, loader())
    job.keep_average(shadow)
    for epoch in job.epochs(EPOCHS):
        for points, labels, indices in batches:
            seen.indices[epoch] += indices.tolist()
            job.backward(cross_entropy(model(points), labels))
            job.step(optimizer)
            average.update_parameters(model)
            for name, weight in model.named_parameters():
                shadow[name] = shadow[name].lerp(weight.detach(), 0.2)
        seen.values.append(job.evaluate(lambda: {"loss": (loss_on_all(average), 1)})["loss"])
        own = nn.ParameterDict({name.replace(".", "/"): tensor for name, tensor in shadow.items()})
        seen.at_rest(model, average, own, optimizers=(optimizer,))
    return Result(nn.ModuleList([model, average, own]), loss_on_all(average), first)


def test_averages_of_weights(plane: Plane, bound: int) -> None:
    _, seen = check(plane, averaged, bound)
    assert seen.values[-1] < seen.values[0]


@pytest.mark.parametrize("at", RESUMED_AT)
def test_averages_of_weights_over_a_resume(plane: Plane, folder: Path, bound: int, at: int) -> None:
    check_resumed(plane, folder, averaged, bound, at)


# Chance, and state of the script's own.


class Noisy(Blobs):
    """Augmented: each look at a sample is another."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        points, label, _ = super().__getitem__(index)
        return points + 0.1 * torch.randn(points.shape), label, index


class Diary:
    """State of the script's own."""

    def __init__(self) -> None:
        self.batches, self.last = 0, torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.last = state["batches"], state["last"]


def by_chance(workers: int) -> Script:
    """Dropout, and augmentation by workers (a loading thread shares the model's generators); tells what was drawn."""

    def script(job: Any, seen: Seen) -> Result:
        model, diary = Net(dropout=0.2), Diary()
        optimizer = adamw(model)
        first = loss_on_all(model)
        job.register("diary", diary)
        data = Noisy(SAMPLES) if workers else Blobs(SAMPLES)
        given = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)
        *_, batches = job.prepare(model, optimizer, given)
        for epoch in job.epochs(EPOCHS):
            for points, labels, indices in batches:
                seen.indices[epoch] += indices.tolist()
                seen.values.append((epoch, torch.rand(1).item(), points.sum().item()))
                job.backward(cross_entropy(model(points), labels))
                job.step(optimizer)
                diary.batches, diary.last = diary.batches + 1, points[:1].clone()
            seen.at_rest(model)
        seen.values.append((EPOCHS, diary.batches, diary.last.sum().item()))
        return Result(model, loss_on_all(model), first)

    return script


@pytest.mark.parametrize("workers", [0, 1])
def test_chance_differs_by_rank_and_repeats_on_resume(plane: Plane, folder: Path, bound: int, workers: int) -> None:
    whole, resumed = check_resumed(plane, folder, by_chance(workers), bound, EPOCH_AND_MORE)
    draws = [value for theirs in plane.gather_objects([value[1] for value in whole[1].values[:-1]]) for value in theirs]
    assert len(set(draws)) == len(draws), "ranks drew alike"
    if bound == 0:
        told = resumed[1].values[: None if plane.rank == 0 else -1]  # a resumed diary is rank 0's
        assert told == whole[1].values[-len(resumed[1].values) :][: len(told)]
        assert_same_weights(whole[0], resumed[0])


def test_two_synchronous_runs_are_equal_bit_for_bit(plane: Plane, bound: int) -> None:
    if bound == 0:
        assert_same_weights(*(on_ranks(plane, scheduled(BY_STEP["cosine"]), bound)[0] for _ in range(2)))
