"""What a checkpoint keeps of optimizers' groups comes back; what may be an average."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hetsync.errors import UserError
from hetsync.train.parts import Parts
from hetsync.train.prepared import as_average


def parts_with(rate: float | torch.Tensor) -> Parts:
    parts = Parts()
    parts.models.append(torch.nn.Linear(2, 1))
    parts.optimizers.append(torch.optim.SGD(parts.model.parameters(), lr=rate, momentum=0.5))
    parts.make_rates(4, None)
    return parts


def test_a_rate_that_is_a_tensor_comes_back_as_one() -> None:
    first, second = parts_with(torch.tensor(0.1)), parts_with(torch.tensor(1.0))
    first.optimizers[0].param_groups[0]["momentum"] = 0.9
    second.restore(first.state(frozen=()), 0)
    (group,) = second.optimizers[0].param_groups
    assert torch.equal(group["lr"], torch.tensor(0.1))
    assert group["momentum"] == 0.9
    assert second.rates[0].at(0) == [group["lr"].item()]


def test_what_was_frozen_comes_back_in_its_role() -> None:
    """And from a checkpoint of before it was kept what was frozen on the way."""
    first = parts_with(0.1)
    weight = next(first.model.parameters())
    first.model.requires_grad_(False)
    state = first.state(frozen={id(weight)})
    older = {name: kept for name, kept in state.items() if name != "frozen_since"}
    for kept, trained in ((state, False), (older, True)):
        second = parts_with(0.1)
        weight, bias = second.model.parameters()
        second.restore_roles(kept)
        assert (weight.requires_grad, bias.requires_grad) == (False, True)
        assert second.shared == [bias]
        second.freeze_again(kept)
        assert (weight.requires_grad, bias.requires_grad) == (False, trained)


@pytest.mark.parametrize("thing", [3, [], {}, [torch.ones(1), "mean"], torch.optim.SGD])
def test_what_is_no_average_is_refused(thing: Any) -> None:
    with pytest.raises(UserError, match=r"job\.keep_average got a"):
        as_average(thing)


def test_trained_weights_are_no_average_of_themselves() -> None:
    model = nn.Linear(2, 1)
    parts = Parts()
    parts.models, parts.optimizers = [model], [torch.optim.SGD(model.parameters(), 0.1)]
    parts.averages = [as_average(copy.deepcopy(model)), as_average([torch.zeros(3)])]
    parts.check(torch.device("cpu"))
    parts.averages.append(as_average(list(model.parameters())))
    with pytest.raises(UserError, match="an average holds a trained model's own weights"):
        parts.check(torch.device("cpu"))
