"""Map-style data sets of other libraries, as they come; and those that a script changes between epochs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hetsync
from hetsync.plane.base import Plane

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

BATCH, SAMPLES = 12, 60
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class VisionSet:
    """The interface of torchvision's data sets: a picture and its class, each through a transform of its own."""

    def __init__(self, transform: Callable[[Any], Any], target_transform: Callable[[Any], Any]) -> None:
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = pytest.importorskip("PIL.Image")
        return self.transform(image.new("L", (2, 2), index)), self.target_transform(index)


def to_tensor(picture: Any) -> torch.Tensor:
    return torch.tensor(list(picture.tobytes()), dtype=torch.float32) / SAMPLES


def numbers_of_all(plane: Plane, mine: list[int]) -> Counter[int]:
    return Counter(number for numbers in plane.gather_objects(mine) for number in numbers)


@BOUNDS
def test_torchvision(plane: Plane, bound: int) -> None:
    pytest.importorskip("PIL")
    data = VisionSet(to_tensor, lambda label: label)
    used: list[int] = []
    with hetsync.join(plane=plane, delay_bound=bound, progress=False) as job:
        model = nn.Linear(4, 1)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        for _ in job.epochs(1):
            for pictures, labels in loader:
                job.backward(model(pictures).square().mean())
                job.step(optimizer)
                assert torch.equal((pictures[:, 0] * SAMPLES).round().long(), labels)
                used += labels.tolist()
    assert numbers_of_all(plane, used) == Counter(range(SAMPLES))


@BOUNDS
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "iterable"])
def test_hugging_face(plane: Plane, bound: int, streamed: bool) -> None:
    """Batches are dictionaries; the map style has `__getitems__`."""
    datasets = pytest.importorskip("datasets")
    rows = {"features": [[number / SAMPLES] * 3 for number in range(SAMPLES)], "number": list(range(SAMPLES))}
    data = datasets.Dataset.from_dict(rows)
    data = data.to_iterable_dataset().with_format("torch") if streamed else data.with_format("torch")
    used: list[int] = []
    with hetsync.join(plane=plane, delay_bound=bound, progress=False) as job:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.prepare(model, optimizer)
        for batch in job.loader(data, BATCH, **({"samples": SAMPLES} if streamed else {"epochs": 1})):
            job.backward(model(batch["features"]).square().mean())
            job.step(optimizer)
            used += batch["number"].tolist()
    assert numbers_of_all(plane, used) == Counter(range(SAMPLES))


class Scaled:
    scale = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(self.scale))


@BOUNDS
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_changed_between_epochs_counts_from_the_first_batch_on(plane: Plane, bound: int, workers: int) -> None:
    """Ranks are given their first tasks of an epoch while they rest."""
    data, found = Scaled(), [set[float]() for _ in range(3)]
    with hetsync.join(plane=plane, delay_bound=bound, progress=False) as job:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        job.prepare(model, optimizer)
        loader = job.loader(data, BATCH, workers=workers)
        for epoch in job.epochs(3):
            time.sleep(0.2)
            data.scale = epoch
            for batch in loader:
                found[epoch].update(batch.flatten().tolist())
                job.backward(model(batch).square().mean())
                job.step(optimizer)
    assert found == [{0.0}, {1.0}, {2.0}]
