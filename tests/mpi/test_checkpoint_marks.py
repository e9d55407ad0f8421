"""A job that saves is trained on the same batches as one that does not, whatever `checkpoint_every` is.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_checkpoint_marks.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetsync
from hetsync.plane.base import Plane
from hetsync.train import checkpoint

pytestmark = pytest.mark.mpi

SAMPLES, BATCH, EVERY = 82, 16, 38


def trained(plane: Plane, **settings: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after two epochs of which the last batch is smaller, and this rank's batches."""
    torch.manual_seed(3)
    points = torch.randn(SAMPLES, 4)
    data = TensorDataset(points, (points[:, 0] > 0).long())
    model, batches = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), 0
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    pins = dict.fromkeys(range(plane.size), BATCH // plane.size)
    told = {"delay_bound": 0, "pins": pins, "rebalance": False, "progress": False, **settings}
    with hetsync.join(plane=plane, **told) as job:
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        for _ in job.epochs(2):
            for inputs, labels in loader:
                batches += 1
                job.backward(nn.functional.cross_entropy(model(inputs), labels))
                job.step(optimizer)
    return model.state_dict(), batches


def test_checkpoints_cut_no_batch(plane: Plane, folder: Path) -> None:
    plain, batches = trained(plane)
    saved, with_saves = trained(plane, run=folder / "run", checkpoint_every=EVERY, keep_checkpoints=9)
    assert with_saves == batches
    tolerance = 0 if plane.size == 1 else 1e-6
    torch.testing.assert_close(saved, plain, rtol=0, atol=tolerance)
    paths = checkpoint.complete(folder / "run" / "checkpoints")
    assert sorted(int(path.name[-12:]) for path in paths) == [48, 80, 114, 162, 164]
