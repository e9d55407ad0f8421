"""Evaluation: metrics of any kind of number, nothing drawn from chance, no trace left; and a first look at it all."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hetsync.data import Data, evaluation, on_part
from hetsync.data.evaluation import alike, check_evaluation, evaluate_range, metrics_of
from hetsync.data.random_state import seed_all
from hetsync.errors import UserError


def some_data(**changes: Any) -> Data:
    points, labels = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2
    return replace(Data(TensorDataset(points, labels), TensorDataset(points, labels)), **changes)


def some_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


NUMBERS = {
    "tensor": torch.tensor(2.5),
    "tensor of one": torch.tensor([2.5], dtype=torch.float64),
    "numpy": np.float32(2.5),
    "array": np.array(2.5),
    "array of one": np.array([[2.5]]),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_any_kind_are_metrics(kind: str) -> None:
    data = some_data(metrics=lambda model, batch: {"x": NUMBERS[kind]}, report=lambda sums: {"y": NUMBERS[kind]})
    sums = evaluate_range(some_model(), data, 0, 10)
    assert sums == {"x": 2.5}
    found = metrics_of(data, [sums], 10)
    assert found == {"y": 2.5}
    assert {type(value) for value in (*sums.values(), *found.values())} == {float}


WRONG = {
    "two numbers": (torch.zeros(2), "x as Tensor of shape (2,): give a number"),
    "list": ([1.0], "x as list: give a number"),
    "text": ("1.0", "x as str: give a number"),
    "nothing": (None, "x as NoneType: give a number"),
    "array": (np.zeros(3), "x as ndarray of shape (3,): give a number"),
    "complex": (1j, "x as complex: give a number"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("key", ["metrics", "report"])
def test_others_are_refused_before_training(kind: str, key: str) -> None:
    value, sentence = WRONG[kind]
    gives: dict[str, Callable[..., Any]] = {key: lambda *_: {"x": value}}
    with pytest.raises(UserError, match=re.escape(f"data.{key} gave {sentence}")):
        check_evaluation(some_model(), some_data(**gives))


def test_metrics_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.metrics returned Tensor: return a dictionary"):
        check_evaluation(some_model(), some_data(metrics=lambda model, batch: torch.zeros(1)))


def test_a_name_that_records_need_is_refused() -> None:
    with pytest.raises(UserError, match="a metric named train_seconds"):
        check_evaluation(some_model(), some_data(report=lambda sums: {"train_seconds": 1.0}))


# Chance.


def jittered(samples: list[Any], draw: Callable[[], float]) -> list[torch.Tensor]:
    points, labels = zip(*samples, strict=True)
    return [torch.stack(points) + draw(), torch.stack(labels)]


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(1).item(),
    "numpy": lambda: np.random.rand(),
    "python": lambda: random.random(),
    "own": iter(np.random.default_rng(0).random, None).__next__,
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("key", ["collate", "test_collate"])
def test_a_collate_that_draws_is_refused(kind: str, key: str) -> None:
    data = some_data(**{key: lambda samples: jittered(samples, DRAWS[kind])})
    with pytest.raises(UserError, match=r"differ each time .*give hetsync.data.Data a test_collate"):
        check_evaluation(some_model(), data)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4), index % 2


def test_a_test_set_that_draws_is_refused() -> None:
    with pytest.raises(UserError, match="or a test set, without random transforms"):
        check_evaluation(some_model(), some_data(test=Noisy()))


@pytest.mark.parametrize("kind", DRAWS)
def test_with_a_collate_of_its_own_the_test_set_is_as_it_is(kind: str) -> None:
    plain = some_data()
    data = some_data(
        collate=lambda samples: jittered(samples, DRAWS[kind]), test_collate=torch.utils.data.default_collate
    )
    model = some_model()
    check_evaluation(model, data)
    assert evaluate_range(model, data, 0, 40) == evaluate_range(model, plain, 0, 40)


def test_a_model_that_draws_scores_alike_each_time() -> None:
    class Drawing(nn.Linear):
        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return super().forward(points) + torch.randn(1)

    model, data = Drawing(4, 2), some_data()
    assert evaluate_range(model, data, 0, 40) == evaluate_range(model, data, 0, 40)


# Traces.


def test_nothing_of_it_stays() -> None:
    model = some_model()
    model[1].eval()  # as a user freezes statistics
    model[0].weight.grad = torch.ones(8, 4)

    def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
        model.train()(batch[0])  # changes batch norm's statistics
        return {"x": torch.rand(1).item() + np.random.rand() + random.random()}

    data = some_data(metrics=metrics)
    seed_all(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    check_evaluation(model, data)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4))


def test_no_test_data_is_no_mistake() -> None:
    nothing = TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    check_evaluation(some_model(), some_data(test=nothing))


class Thing:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.me = self


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([x, float("nan")]),
        lambda x: np.array([x, float("nan")]),
        lambda x: {"a": (1, [x, "b", None])},
        lambda x: Thing(torch.tensor(x)),
        lambda x: x,
    ],
)
def test_batches_are_compared_in_depth(make: Callable[[float], Any]) -> None:
    assert alike(make(1.0), make(1.0))
    assert not alike(make(1.0), make(2.0))


def test_batches_of_other_sizes_differ() -> None:
    assert not alike([torch.zeros(2)], [torch.zeros(3)])
    assert not alike([1, 2], [1])
    assert not alike([1], (1,))


def test_a_part_is_looked_at_as_it_is_loaded() -> None:
    """What only training samples need, theirs have; while training, evaluations look at the validation part."""
    parts = [TensorDataset(torch.full((count, 1), float(count))) for count in (3, 4, 5)]

    def as_trained(items: list[Any]) -> tuple[str, int]:
        return "trained", len(items)

    def as_tested(items: list[Any]) -> tuple[str, int]:
        return "tested", len(items)

    data = Data(parts[0], parts[2], collate=as_trained, test_collate=as_tested, validation=parts[1])
    assert data.evaluated is parts[1]
    for part, kind, count in (("train", "trained", 3), ("validation", "tested", 4), ("test", "tested", 5)):
        ((batch, samples),) = evaluation.test_batches(on_part(data, part), 0, count, torch.device("cpu"), 9)  # type: ignore[arg-type]
        assert batch == (kind, count)
        assert samples == range(count)
    with pytest.raises(UserError, match="--part is validation, which the data does not have: give test or train"):
        on_part(replace(data, validation=None), "validation")
