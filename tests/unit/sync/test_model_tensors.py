"""Tensors that a model puts in the place of those that ranks share. Imports no MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn

from hetsync.errors import UserError
from hetsync.sync.model_tensors import ModelTensors


class Net(nn.Module):
    buffer_rules: ClassVar = {"mean": "mean"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)
        self.first.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def tensors(model: Net) -> ModelTensors:
    return ModelTensors(model, [torch.optim.SGD(model.parameters(), 0.1)])


def test_what_is_as_it_was_is_left_alone(model: Net, tensors: ModelTensors) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors.check()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_buffer_assigned_anew_keeps_its_memory_and_takes_the_value(model: Net, tensors: ModelTensors) -> None:
    old = model.mean
    model.mean = 0.5 * model.mean + 1
    tensors.restore()
    assert model.mean is old
    assert old.tolist() == [1, 1]


def test_a_buffer_without_a_rule_stays_as_it_was_where_several_ranks_hold_it(model: Net) -> None:
    model.buffer_rules = {}
    alone, several = (ModelTensors(model, [torch.optim.SGD(model.parameters(), 0.1)], each) for each in (True, False))
    model.mean = model.mean.clone()  # to the same value
    several.restore()
    model.mean += 1
    alone.restore()
    with pytest.raises(UserError, match="mean changed while training runs"):
        several.restore()
    several.begin()  # it has been at a rest
    several.restore()


def test_memory_put_behind_a_weight_is_put_back(model: Net, tensors: ModelTensors) -> None:
    shared = model.second.weight.detach()
    model.second.weight.data = torch.full((2, 3), 7.0)
    tensors.restore()
    assert model.second.weight.data_ptr() == shared.data_ptr()
    assert shared.unique().tolist() == [7]


def test_memory_put_behind_a_buffer_is_put_back(model: Net, tensors: ModelTensors) -> None:
    shared = model.mean.detach()
    model.mean.data = 0.5 * model.mean + 1
    tensors.restore()
    assert model.mean.data_ptr() == shared.data_ptr()
    assert shared.tolist() == [1, 1]


def test_caches_may_do_as_they_like(model: Net, tensors: ModelTensors) -> None:
    model.cache = torch.ones(9)
    tensors.check()
    assert len(model.cache) == 9


def test_freezing_is_allowed_and_undone(model: Net, tensors: ModelTensors) -> None:
    for frozen in (True, False):
        model.second.requires_grad_(not frozen)
        tensors.check()


REFUSED: dict[str, tuple[Callable[[Net], object], str]] = {
    "unfrozen": (lambda model: model.first.requires_grad_(True), "weight first.weight was unfrozen"),
    "another shape": (lambda model: setattr(model, "mean", torch.zeros(3)), r"buffer mean has become .*\(3,\)"),
    "another type": (lambda model: setattr(model, "mean", torch.zeros(2).double()), "mean has become torch.float64"),
    "half": (lambda model: model.half(), "weight first.weight has become torch.float16"),
    "no buffer": (lambda model: setattr(model, "mean", None), "buffer mean is gone"),
    "a new buffer": (lambda model: setattr(model, "nothing", torch.zeros(1)), "are others than .*nothing"),
    "a new layer": (lambda model: model.add_module("third", nn.Linear(2, 2)), "are others than .*third"),
    "a new weight in place": (
        lambda model: setattr(model.second, "bias", nn.Parameter(torch.zeros(2))),
        "weight second.bias is another one",
    ),
}


def test_what_ranks_do_not_share_must_stay(model: Net, tensors: ModelTensors) -> None:
    """A frozen average of weights would differ on each rank."""
    tensors.check()
    with torch.no_grad():
        model.first.weight.fill_(1.0)
    with pytest.raises(
        UserError, match=r"first\.weight was changed .*buffers=\{'first.weight': 'mean'\}.*keep_average"
    ):
        tensors.restore()


SENTENCES = {
    None: "highest changed while training runs.*'min'",
    "mean": "highest was changed .* had infinities.*'min'",
    "sum": "highest was changed .* had infinities.*'min'",
    "min": "",
    "max": "",
    "rows": "",
}


@pytest.mark.parametrize("rule", SENTENCES)
def test_a_range_that_begins_at_infinity_has_a_rule_without_sums(model: Net, rule: str | None) -> None:
    model.register_buffer("highest", torch.full((2,), -torch.inf))
    model.buffer_rules = {} if rule is None else {"highest": rule}
    alone, several = (ModelTensors(model, [torch.optim.SGD(model.parameters(), 0.1)], each) for each in (True, False))
    model.highest = torch.ones(2)
    alone.restore()
    if not SENTENCES[rule]:
        return several.restore()
    with pytest.raises(UserError, match=SENTENCES[rule]):
        several.restore()
    several.begin()  # it has been at a rest
    several.restore()


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused(name: str, model: Net, tensors: ModelTensors) -> None:
    change, sentence = REFUSED[name]
    change(model)
    with pytest.raises(UserError, match=sentence):
        tensors.check()


def test_weights_of_the_optimizer_must_be_the_models(model: Net) -> None:
    optimizer = torch.optim.SGD(model.second.parameters(), 0.1)
    tensors = ModelTensors(model, [optimizer])
    optimizer.add_param_group({"params": list(model.norm.parameters())})
    tensors.restore()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UserError, match="1 weights that the model has not"):
        tensors.restore()
