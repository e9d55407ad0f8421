"""What a script gives or calls otherwise on one rank than on the others: one sentence on all ranks, and no hang.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_wrong_use.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler
from training import BATCH, FEATURES, Blobs, Net

from hetsync.config.parser import recipe_of
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.train.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(2)]
Prepare = Callable[[Job, bool], Any]  # the flag: on the odd rank


def make_job(plane: Plane, keep: bool = False, seeded: bool = True, resume: Any = False, **keys: Any) -> Job:
    """Of keys of the recipe's `run` and `sync`."""
    sync = {name: keys.pop(name) for name in list(keys) if name in ("delay_bound", "accumulation", "rebalance")}
    return Job(recipe_of({"run": keys, "sync": sync}), plane, keep=keep, seeded=seeded, resume=resume, show="nothing")


def is_odd(plane: Plane) -> bool:
    return plane.rank == plane.size - 1


def training_data(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or Blobs(), **{"batch_size": BATCH, "shuffle": True, **options})


def prepared(job: Job, model: nn.Module, optimizer: Optimizer | None = None, data: Any = None) -> Any:
    return job.prepare(model, optimizer or SGD(model.parameters(), 0.1), data or training_data())


def of_model(model: Callable[[bool], nn.Module]) -> Prepare:
    return lambda job, odd: prepared(job, model(odd))


def of_optimizer(optimizer: Callable[[nn.Module, bool], Optimizer]) -> Prepare:
    def prepare(job: Job, odd: bool) -> None:
        model = Net()
        prepared(job, model, optimizer(model, odd))

    return prepare


def of_data(data: Callable[[bool], Any]) -> Prepare:
    return lambda job, odd: prepared(job, Net(), data=data(odd))


def frozen(odd: bool) -> nn.Module:
    model = Net()
    model.body[0].requires_grad_(not odd)
    return model


def more(thing: Callable[[nn.Module, Optimizer], Any]) -> Prepare:
    """The odd rank prepares one thing more."""

    def prepare(job: Job, odd: bool) -> None:
        model, optimizer, _ = prepared(job, Net())
        if odd:
            job.prepare(thing(model, optimizer))

    return prepare


def registered(job: Job, odd: bool) -> None:
    model, *_ = prepared(job, Net())
    if odd:
        job.register("mine", model)


CASES: dict[str, tuple[str, Prepare]] = {
    "wider": ("tensor 0.weight of model 0", of_model(lambda odd: nn.Sequential(nn.Linear(6, 4 if odd else 3)))),
    "deeper": (
        "the tensors of model 0",
        of_model(lambda odd: nn.Sequential(nn.Linear(6, 3), *[nn.Linear(3, 3)] * odd)),
    ),
    "other names": ("tensor", of_model(lambda odd: nn.Sequential(*[nn.Identity()] * odd, nn.Linear(6, 3)))),
    "other numbers": ("torch.float64", of_model(lambda odd: Net().double() if odd else Net())),
    "frozen": ("frozen", of_model(frozen)),
    "a buffer": ("tensor.* of model 0", of_model(lambda odd: Net(batch_norm=odd))),
    "a model": ("the number of models", more(lambda *_: Net())),
    "an optimizer": ("the number of optimizers", more(lambda model, _: SGD(model.parameters(), 0.1))),
    "a scheduler": ("the schedulers", more(lambda _, optimizer: StepLR(optimizer, 3))),
    "a scaler": ("the GradScaler", more(lambda *_: torch.amp.GradScaler("cpu"))),
    "test data": ("the number of test loaders", more(lambda *_: training_data(shuffle=False))),
    "state": ("what was registered", registered),
    "other optimizer": (
        "optimizer 0 is Adam on rank",
        of_optimizer(lambda model, odd: (Adam if odd else SGD)(model.parameters(), 0.1)),
    ),
    "rate": ("lr of group 0", of_optimizer(lambda model, odd: SGD(model.parameters(), 0.2 if odd else 0.1))),
    "momentum": ("momentum", of_optimizer(lambda model, odd: SGD(model.parameters(), 0.1, momentum=0.9 * odd))),
    "groups": (
        "of group 0 of optimizer 0",
        of_optimizer(
            lambda model, odd: SGD([{"params": [w]} for w in model.parameters()] if odd else model.parameters())
        ),
    ),
    "length": ("training data's length", of_data(lambda odd: training_data(Subset(Blobs(), range(190 + odd))))),
    "batch": ("batch_size is 12", of_data(lambda odd: training_data(batch_size=12 if odd else BATCH))),
    "weights": (
        "the digest of weights .drawn before hetsync.join, without a seed",
        of_data(lambda odd: training_data(shuffle=False, sampler=WeightedRandomSampler([1.0] * 191 + [1 + odd], 192))),
    ),
    "drop last": ("the length of an epoch", of_data(lambda odd: training_data(batch_size=25, drop_last=odd))),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_prepared_otherwise_is_named(plane: Plane, case: str) -> None:
    sentence, prepare = CASES[case]
    odd = is_odd(plane)
    job = make_job(plane)
    prepare(job, odd)
    with pytest.raises(UserError, match=sentence) as mistake:
        next(job.epochs(2))
    assert "give all ranks the same" in str(mistake.value)
    assert f"on rank {plane.size - 1}" in str(mistake.value)


def test_other_numbers_of_epochs_are_named(plane: Plane) -> None:
    odd = is_odd(plane)
    job = make_job(plane)
    prepared(job, Net())
    with pytest.raises(UserError, match=r"the number of samples to train on is 576"):
        next(job.epochs(2 + odd))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"delay_bound": 0}, "sync.delay_bound is 0 on rank"),
        ({"seed": 3}, "run.seed"),
        ({"seeded": False}, "run.seed is the script's on rank"),
        ({"rebalance": False}, "sync.rebalance"),
        ({"precision": "bfloat16"}, "run.precision"),
        ({"keep": True}, "the run folder is given on rank"),
        ({"resume": "auto"}, "resume is auto"),
    ],
)
def test_other_settings_are_named(plane: Plane, keys: dict[str, Any], sentence: str) -> None:
    odd = is_odd(plane)
    with pytest.raises(UserError, match=sentence):
        make_job(plane, **(keys if odd else {}))


def train(job: Job, act: Callable[[int], None], loader: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for epoch in job.epochs(2):
        for points, labels, _ in loader:
            job.backward(nn.functional.cross_entropy(model(points), labels))
            job.step(optimizer)
        act(epoch)


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("call", ["evaluate", "stop"])
def test_what_one_rank_calls_alone_is_named(plane: Plane, bound: int, last: bool, call: str) -> None:
    odd = is_odd(plane)
    job = make_job(plane, delay_bound=bound)
    model, optimizer, loader = prepared(job, Net())

    def act(epoch: int) -> None:
        if odd and epoch == last:
            job.evaluate(lambda: (1.0, 1)) if call == "evaluate" else job.stop()

    def train_and_close() -> None:
        train(job, act, loader, model, optimizer)
        job.close()

    with pytest.raises(UserError, match="all ranks must call the same") as mistake:
        train_and_close()
    assert call in str(mistake.value)
    job.session.release()


@pytest.mark.parametrize("bound", [0, 4])
def test_an_evaluation_of_one_rank_before_the_loop_is_named(plane: Plane, bound: int) -> None:
    odd = is_odd(plane)
    job = make_job(plane, delay_bound=bound)
    model = Net()
    job.prepare(model, SGD(model.parameters(), 0.1))
    loader = job.loader(Blobs(), BATCH, epochs=2)
    with pytest.raises(UserError, match=r"job\.evaluate.*all ranks must call the same"):
        job.evaluate(lambda: (1.0, 1)) if odd else next(iter(loader))
    job.session.release()


@pytest.mark.parametrize("bound", [0, 4])
def test_a_rate_that_one_rank_changes_at_rest_is_named(plane: Plane, bound: int) -> None:
    odd = is_odd(plane)
    job = make_job(plane, delay_bound=bound)
    model, optimizer, loader = prepared(job, Net())

    def act(epoch: int) -> None:
        if odd:
            optimizer.param_groups[0]["lr"] = 0.01

    with pytest.raises(UserError, match=r"learning rates are .*0.01.* on all ranks alike"):
        train(job, act, loader, model, optimizer)
    job.session.release()


@pytest.mark.parametrize("bound", [0, 4])
def test_a_setting_that_one_rank_changes_at_rest_is_named(plane: Plane, bound: int) -> None:
    odd = is_odd(plane)
    job = make_job(plane, delay_bound=bound)
    model, optimizer, loader = prepared(job, Net())

    def act(epoch: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1  # all do
        if odd:
            optimizer.param_groups[0]["momentum"] = 0.5

    with pytest.raises(UserError, match=r"momentum is 0 on rank 0 and 0\.5 on rank 1: change it on all ranks alike"):
        train(job, act, loader, model, optimizer)
    job.session.release()


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("uses", ["evaluate", "evaluate, as an argument", "keep_best"])
def test_an_average_that_is_each_ranks_own_is_named(plane: Plane, folder: Path, bound: int, uses: str) -> None:
    """At D = 0 it lacks a batch of which the rank had no part."""
    job = make_job(plane, keep=uses == "keep_best", dir=str(folder / "run"), delay_bound=bound)
    model, optimizer, loader = prepared(job, Net(), data=training_data(Blobs(4 * BATCH + 1)))
    average = copy.deepcopy(model)

    def evaluate() -> None:
        if uses == "keep_best":
            job.keep_best(1.0, model=average)
        elif uses == "evaluate":
            job.evaluate(lambda: (float(average(torch.zeros(1, FEATURES)).sum()), 1))
        else:
            job.evaluate(lambda model: (float(model(torch.zeros(1, FEATURES)).sum()), 1), average)

    def train_and_look() -> None:
        for _ in job.epochs(2):
            for points, labels, _ in loader:
                job.backward(nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
                with torch.no_grad():
                    for mine, weight in zip(average.parameters(), model.parameters(), strict=True):
                        mine.lerp_(weight, 0.1)
            evaluate()

    with pytest.raises(UserError, match=r"\(Net\), whose weights differ by rank, .* to job\.keep_average"):
        train_and_look()
    job.session.release()


def clamps_by_rank(model: nn.Module, odd: bool) -> None:
    for weight in model.parameters():
        weight.data.clamp_(-0.1 if odd else -0.2, 0.1)


def sets_statistics_by_rank(model: nn.Module, odd: bool) -> None:
    next(model.buffers()).fill_(odd)


def sets_a_frozen_weight_by_rank(model: nn.Module, odd: bool) -> None:
    """Which is hashed only where it is seen to change; `.data` counts no version."""
    model.get_parameter("body.0.bias").data.fill_(odd)


@pytest.mark.parametrize("bound", [0, 4])
@pytest.mark.parametrize("change", [clamps_by_rank, sets_statistics_by_rank, sets_a_frozen_weight_by_rank])
def test_weights_that_one_rank_changes_at_rest_are_named(
    plane: Plane, change: Callable[[nn.Module, bool], None], bound: int
) -> None:
    odd = is_odd(plane)
    job = make_job(plane, delay_bound=bound)
    net = Net(batch_norm=True)
    net.get_parameter("body.0.bias").requires_grad_(change is not sets_a_frozen_weight_by_rank)
    model, optimizer, loader = prepared(job, net)

    def act(epoch: int) -> None:
        change(model, odd)

    with pytest.raises(UserError, match=r"buffers were changed at rest, and ranks \[1\] have others than rank 0"):
        train(job, act, loader, model, optimizer)
    job.session.release()


def test_other_values_of_keep_best_are_named(plane: Plane, folder: Path) -> None:
    odd = is_odd(plane)
    job = make_job(plane, keep=True, dir=str(folder / "run"))
    model, optimizer, loader = prepared(job, Net())
    with pytest.raises(UserError, match=r"job\.keep_best got"):
        train(job, lambda epoch: job.keep_best(1.0 * odd) and None, loader, model, optimizer)
    job.session.release()
