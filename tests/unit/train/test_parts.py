"""What a checkpoint keeps of optimizers' groups comes back."""

from __future__ import annotations

import torch

from hetsync.train.parts import Parts


def parts_with(rate: float | torch.Tensor) -> Parts:
    parts = Parts()
    parts.models.append(torch.nn.Linear(2, 1))
    parts.optimizers.append(torch.optim.SGD(parts.model.parameters(), lr=rate, momentum=0.5))
    parts.make_rates(4, None)
    return parts


def test_a_rate_that_is_a_tensor_comes_back_as_one() -> None:
    first, second = parts_with(torch.tensor(0.1)), parts_with(torch.tensor(1.0))
    first.optimizers[0].param_groups[0]["momentum"] = 0.9
    second.restore(first.state(frozen=()))
    (group,) = second.optimizers[0].param_groups
    assert torch.equal(group["lr"], torch.tensor(0.1))
    assert group["momentum"] == 0.9
    assert second.rates[0].at(0) == [group["lr"].item()]
