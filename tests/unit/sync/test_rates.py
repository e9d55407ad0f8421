"""Settings of schedulers, which all ranks share."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from hetsync.errors import UserError
from hetsync.sync.rates import require_same_schedulers, scheduler_settings


def schedulers() -> list[LRScheduler]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    several = SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)], [3])
    return [CosineAnnealingLR(optimizer, 5), ReduceLROnPlateau(optimizer), several]


def test_schedulers_that_differ_by_rank_are_named() -> None:
    one, other = schedulers(), schedulers()
    told = {0: list(map(scheduler_settings, one)), 2: list(map(scheduler_settings, other))}
    require_same_schedulers(told)
    other[1].patience = 3  # type: ignore[attr-defined]
    told[2] = list(map(scheduler_settings, other))
    with pytest.raises(UserError, match="a scheduler's patience is 10 on rank 0 and 3 on rank 2"):
        require_same_schedulers(told)


def test_schedulers_within_one_are_looked_at() -> None:
    one, other = schedulers(), schedulers()
    other[2]._schedulers[1].T_max = 6  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="a scheduler's _schedulers is"):
        require_same_schedulers({0: [scheduler_settings(one[2])], 1: [scheduler_settings(other[2])]})
