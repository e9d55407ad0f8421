"""Training data drawn by weights: at D = 0 a plain loop over the same draws, on any number of ranks; each draw once."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from training import SEED, Blobs, Net, unequal_shares

import hetsync
from hetsync.data.loader import EpochOrder
from hetsync.plane.base import Plane
from hetsync.train import checkpoint

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

BATCH, SAMPLES, EPOCHS, SAVED_AT = 32, 200, 3, 296  # the last batch of an epoch is smaller; in the second epoch
WEIGHTS = torch.tensor([1.0, 0.0, 6.0])[Blobs(SAMPLES).labels]  # of classes
COSTS = [1.0 + index % 7 for index in range(SAMPLES)]

Batches = dict[int, list[int]]  # indices, by the samples that came before the batch


def draws(costs: list[float] | None = None) -> list[int]:
    return EpochOrder(SAMPLES, SEED, costs, weights=WEIGHTS.double()).indices([(0, EPOCHS * SAMPLES)])


def train(plane: Plane, bound: int, costs: list[float] | None = None, **settings: Any) -> tuple[Net, Batches]:
    """The weights at the end, and this rank's batches."""
    used: Batches = defaultdict(list)
    pins = unequal_shares(plane.size, BATCH)
    with hetsync.join(
        plane=plane, delay_bound=bound, pins=pins, rebalance=False, seed=SEED, progress=False, **settings
    ) as job:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.prepare(model, optimizer)
        data = DataLoader(Blobs(SAMPLES), BATCH, sampler=WeightedRandomSampler(WEIGHTS, SAMPLES))  # type: ignore[arg-type]
        loader = job.loader(data, costs=costs)
        for _ in job.epochs(EPOCHS):
            for points, labels, indices in loader:
                used[job.samples] += indices.tolist()
                job.backward(nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
    return model, used


def of_all(plane: Plane, mine: Batches) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for theirs in plane.gather_objects(mine):
        for start, indices in theirs.items():
            found[start].update(indices)
    return found


def plain(indices: list[int]) -> tuple[Net, dict[int, Counter[int]]]:
    torch.manual_seed(SEED)
    model, data = Net(), Blobs(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = {}
    for epoch in range(0, EPOCHS * SAMPLES, SAMPLES):
        for start in range(epoch, epoch + SAMPLES, BATCH):
            batch = indices[start : min(start + BATCH, epoch + SAMPLES)]
            batches[start] = Counter(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.points[batch]), data.labels[batch]).backward()
            optimizer.step()
    return model, batches


@pytest.mark.parametrize("costs", [None, COSTS], ids=["", "costs"])
def test_batches_and_weights_are_those_of_one_process(plane: Plane, costs: list[float] | None) -> None:
    model, used = train(plane, 0, costs)
    alone, batches = plain(draws(costs))
    assert of_all(plane, used) == batches
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-5)


def test_each_draw_is_used_once_by_delayed_ranks(plane: Plane) -> None:
    _, used = train(plane, 4)
    assert sum(of_all(plane, used).values(), Counter()) == Counter(draws())


@pytest.mark.parametrize("bound", [0, 4])
def test_a_drawn_epoch_is_gone_on_with_in_its_middle(plane: Plane, folder: Path, bound: int) -> None:
    whole, _ = train(plane, bound, run=folder / "run", checkpoint_every=SAVED_AT, keep_checkpoints=9)
    if plane.rank == 0:
        for path in checkpoint.complete(folder / "run" / "checkpoints"):
            if not path.name.endswith(f"{SAVED_AT:012d}"):
                shutil.rmtree(path)
    plane.barrier()
    resumed, used = train(plane, bound, run=folder / "run", resume=True)
    assert sum(of_all(plane, used).values(), Counter()) == Counter(draws()[SAVED_AT:])
    if bound == 0:
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
