"""Ranks draw by the seed of rank 0's script, whatever the others have set.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_seeds.py
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from training import BATCH, CLASSES, FEATURES, Blobs

import hetsync
from hetsync.plane.base import Plane

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]


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


def draws(plane: Plane, bound: int, seeds: bool = False) -> tuple[list[tuple[float, ...]], list[float]]:
    """What a script draws at each rest, and torch's first draw within each loop over batches."""
    at_rest, in_loop = [], []
    torch.manual_seed(1)
    with hetsync.join(plane=plane, delay_bound=bound, rebalance=False, progress=False) as job:
        model = torch.nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader: Any = DataLoader(Blobs(), BATCH, shuffle=True)
        _, optimizer, loader = job.prepare(model, optimizer, loader)
        for epoch in job.epochs(3):
            if seeds and epoch:
                torch.manual_seed(7)
            for number, (points, labels, _) in enumerate(loader):
                if number == 0:
                    in_loop.append(float(torch.rand(())))
                job.backward(torch.nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
            at_rest.append((float(torch.rand(())), float(np.random.rand()), random.random()))
            with torch.no_grad():
                torch.nn.init.normal_(model.weight)  # a layer begun anew: the same on all ranks
    return at_rest, in_loop


@pytest.mark.parametrize("bound", [0, 4])
def test_ranks_draw_alike_at_rest_and_otherwise_in_the_loop(plane: Plane, bound: int) -> None:
    at_rest, in_loop = draws(plane, bound)
    everyones = plane.gather_objects((at_rest, in_loop))
    assert all(theirs == at_rest for theirs, _ in everyones)
    assert len(set(at_rest)) == 3
    assert len({theirs for _, each in everyones for theirs in each}) == 3 * plane.size
    assert plane.gather_objects(draws(plane, bound)) == everyones


def test_a_seed_that_the_script_sets_at_rest_counts(plane: Plane) -> None:
    plain, seeded = draws(plane, 0)[1], draws(plane, 0, seeds=True)[1]
    assert plain[0] == seeded[0]
    assert plain[1:] != seeded[1:]
    if plane.size == 1:  # as in a script without a job
        torch.manual_seed(7)
        assert seeded[1:] == [float(torch.rand(()))] * 2
