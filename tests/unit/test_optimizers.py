"""The optimizer's steps on slices and on batches. Imports no MPI."""

from __future__ import annotations

import pytest
import torch

from hetsync.config import ScheduleConfig
from hetsync.optimizers import Steps
from hetsync.sync.messages import Piece

BATCH = 16
SHARE = 4
DELAYED = Piece(0, (((0, SHARE),),), 4, 0, 0, share=SHARE)
SYNCHRONOUS = DELAYED._replace(synchronous_round=0, round_samples=BATCH)


@pytest.mark.parametrize(
    ("piece", "gradient", "length"),
    [
        (SYNCHRONOUS, 10.0, 1.0),
        (DELAYED, 10.0, 2.0),  # √(B / n) times as far as the bound for the batch
        (DELAYED, 1.5, 1.5),
        (SYNCHRONOUS, 0.5, 0.5),
    ],
)
def test_the_bound_of_clipping_is_meant_for_the_batch(piece: Piece, gradient: float, length: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    steps = Steps(torch.optim.SGD([weight], lr=1.0), ScheduleConfig(), 1.0, 1_000, BATCH)
    steps.begin(piece)
    weight.grad = torch.full_like(weight, gradient)
    steps.take()
    assert -weight.item() == pytest.approx(length, rel=1e-4)
    assert weight.grad is None
