"""Models that do not take one sample train on any ranks, with any remainder."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from training import Blobs

import hetsync
from hetsync.plane.base import Plane

BATCH, SAMPLES, EPOCHS = 8, 50, 3


class Squeezing(nn.Module):
    """Its statistics need two samples, and its squeeze takes the only one's dimension with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(2, 3), nn.BatchNorm1d(6), nn.Linear(9, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        signs = torch.squeeze(self.embedding((points[:, :1] > 0).long()))
        spread = points / points.std(0)  # of one sample it is nan
        return self.last(torch.cat([signs, self.norm(spread)], 1))


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES + 1])
def test_no_slice_is_one_sample(plane: Plane, bound: int, samples: int) -> None:
    model, sizes, used = Squeezing(), [], Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(Blobs(samples), BATCH, shuffle=True)
    with hetsync.join(plane=plane, delay_bound=bound, progress=False, seed=1) as job:
        model, optimizer, loader = job.prepare(model, optimizer, data)
        for _ in job.epochs(EPOCHS):
            for points, labels, indices in loader:
                sizes.append(len(points))
                used.update(indices.tolist())
                job.backward(mse_loss(model(points).squeeze(1), labels.float()))
                job.step(optimizer)
    everyones = plane.gather_objects((sizes, used))
    assert min(size for sizes, _ in everyones for size in sizes) >= 2
    assert sum((used for _, used in everyones), Counter()) == Counter(dict.fromkeys(range(samples), EPOCHS))
    assert all(weight.isfinite().all() for weight in model.parameters())
