"""Nested state as JSON and tensors, and back."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from hetsync.train.state_tree import flatten, unflatten


def returned(state: Mapping[str, Any]) -> Any:
    plain, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(plain)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 1, 5: 2}),
        Counter("ab"),
        OrderedDict(b=1, a=2),
        OrderedDict(items=3),
        defaultdict(int, a=1),
        defaultdict(list, {(0, 1): [2]}),
        {"Counter": 1},
        {"items": {"Counter": 1}},
        {1: 2},
    ],
)
def test_dictionaries_come_back_as_what_they_were(value: Mapping[Any, Any]) -> None:
    found = returned({"mine": value})["mine"]
    assert type(found) is type(value)
    assert list(found.items()) == list(value.items())
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)


def test_dictionaries_of_other_classes_come_back_as_dictionaries() -> None:
    class Own(dict[str, int]):
        pass

    for value in (Own(a=1), defaultdict(lambda: 7, a=1)):
        assert type(returned({"mine": value})["mine"]) is dict


def test_what_was_written_before_is_read() -> None:
    old = {"shadow": {"tensor": "state.0"}, "milestones": {"items": [[3, 1]]}, "counter": {"Counter": 2}}
    found = unflatten(old, {"state.0": torch.ones(2)})
    assert found.pop("shadow").tolist() == [1, 1]
    assert found == {"milestones": {3: 1}, "counter": {"Counter": 2}}


def schedule() -> SequentialLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=4), MultiStepLR(optimizer, [2, 3])], [4])


def rates(scheduler: SequentialLR, count: int) -> list[float]:
    found = []
    for _ in range(count):
        scheduler.optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_a_schedule_goes_on_over_its_switch() -> None:
    whole, first, second = schedule(), schedule(), schedule()
    rates(first, 2)
    second.load_state_dict(returned(first.state_dict()))
    second.optimizer.param_groups[0]["lr"] = first.get_last_lr()[0]
    assert rates(second, 7) == rates(whole, 9)[2:]
