"""What differs between ranks, or between a job and who joins it, is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from hetsync.data.loader import Source
from hetsync.errors import UserError
from hetsync.train.alike import data_described, require_as_told
from hetsync.train.evaluation import EvaluationLoader, RankParts
from hetsync.train.prepared import TrainingLoader

JOB = {"optimizer.lr": 0.1, "resume": False, "fault.inject": [{"kind": "die"}], "data": "48 samples"}


def test_who_joins_has_what_the_job_has() -> None:
    require_as_told(JOB, dict(JOB))
    require_as_told(JOB, {**JOB, "resume": True, "fault.inject": []})


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        ({**JOB, "optimizer.lr": 0.2}, "optimizer.lr is 0.2 in the process that joins, but 0.1 in the job"),
        ({**JOB, "more": 1}, "more is 1 in the process that joins, but missing in the job"),
        ({"optimizer.lr": 0.1}, "data is missing in the process that joins, but 48 samples in the job"),
    ],
)
def test_what_differs_is_named(mine: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        require_as_told(JOB, mine)


def split(seed: int, length: int = 40) -> Subset[Any]:
    return random_split(TensorDataset(torch.arange(50.0)), [length, 50 - length], torch.Generator().manual_seed(seed))[
        0
    ]


def described(train: Any, test: Any) -> dict[str, Any]:
    loader = TrainingLoader(Source(train), 8, lambda: iter(()))
    tests = [EvaluationLoader(DataLoader(test), RankParts(0, 2), torch.device("cpu"))]
    return dict(data_described(loader, tests, 80))


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if one[name] != other[name]]


def test_ranks_that_split_data_alike_are_alike() -> None:
    assert described(split(1), split(2)) == described(split(1), split(2))


@pytest.mark.parametrize("around", [lambda part: part, lambda part: ConcatDataset([part, part])])
def test_ranks_that_split_data_by_chance_differ(around: Callable[[Any], Any]) -> None:
    found = differences(described(around(split(1)), split(3)), described(around(split(2)), split(4)))
    assert [name.split(" (")[0] for name in found] == ["the choice of training samples", "the choice of test data 0"]


@pytest.mark.parametrize("kind", ["costs", "weights"])
def test_ranks_with_other_costs_or_weights_differ(kind: str) -> None:
    def told(last: float) -> dict[str, Any]:
        source = Source(TensorDataset(torch.arange(2.0)), **{kind: torch.tensor([1.0, last])})
        return dict(data_described(TrainingLoader(source, 2, lambda: iter(())), [], 2))

    assert told(1) == told(1)
    assert [name.split(" (")[0] for name in differences(told(1), told(2))] == [f"the digest of {kind}"]


@pytest.mark.parametrize("indices", [["a", "b"], range(2), torch.tensor([0, 1])])
def test_subsets_may_be_chosen_by_anything(indices: Any) -> None:
    one, other = (described(Subset(TensorDataset(torch.arange(2.0)), indices), split(3)) for _ in range(2))
    assert one == other
