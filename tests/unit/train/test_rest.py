"""At rest: which buffers of averages have a mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from hetsync.train.rest import CommonState


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("own", torch.zeros(2), persistent=False)
        self.register_buffer("here", torch.zeros(3))
        self.register_buffer("everywhere", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def test_ranks_sum_the_same_buffers_of_an_average_where_one_is_finite_on_some_of_them_only() -> None:
    """Or their sums would not fit together."""
    module, summed = Buffered(), list[int]()
    plane = SimpleNamespace(
        gather_objects=lambda told: [told, [False, False, True] if isinstance(told, list) else told]
    )
    engine = SimpleNamespace(allreduce=lambda flat: summed.append(flat.numel()))
    common = CommonState(cast(Any, plane), nn.Linear(1, 1), [], [module], cast(Any, engine))
    common.average(8)
    assert summed == [4]
