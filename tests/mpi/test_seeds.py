"""Ranks draw by the seed of rank 0's script, whatever the others have set.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_seeds.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from training import BATCH, CLASSES, FEATURES, Blobs

import hetsync
from hetsync.plane.base import Plane

pytestmark = pytest.mark.mpi


def trained(plane: Plane, seed: int, before: bool) -> tuple[float, list[int]]:
    """The first weight, and the samples of all ranks in the order of rank, of a script that seeds by rank."""
    used: list[int] = []
    if before:
        torch.manual_seed(seed + plane.rank)
    with hetsync.join(plane=plane, delay_bound=0, rebalance=False, progress=False) as job:
        if not before:
            torch.manual_seed(seed + plane.rank)
        model = torch.nn.Linear(FEATURES, CLASSES)
        loader: Any = DataLoader(Blobs(), BATCH, shuffle=True)
        _, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
        for _ in job.epochs(1):
            first = next(model.parameters()).flatten()[0].item()
            for points, labels, indices in loader:
                used += indices.tolist()
                job.backward(torch.nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
        everyones = job.gather((first, used))
    return everyones[0][0], [index for _, theirs in everyones for index in theirs]


@pytest.mark.parametrize("before", [True, False])
def test_seeds_by_rank_are_rank_0s(plane: Plane, before: bool) -> None:
    one, other, again = (trained(plane, seed, before) for seed in (1, 2, 1))
    assert one == again
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert set(Counter(one[1]).values()) == {1}
