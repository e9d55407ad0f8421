"""Ranks whose data differ, at equal lengths, are told so before they train; those that draw at random are let be.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_same_samples.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from hetsync.config.parser import recipe_of
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.train.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]
SAMPLES, BATCH, SIDE = 40, 8, 6
IMAGES = torch.rand(SAMPLES, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
Get = Callable[[int], Any]


class Listed(Dataset[Any]):
    """What `get` makes of a file's number, in the order that this host has listed."""

    def __init__(self, get: Get, order: list[int] | None = None) -> None:
        self.get = get
        self.order = list(range(SAMPLES)) if order is None else order
        self.reads = 0

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        self.reads += 1
        return self.get(self.order[place])


class Stream(IterableDataset[Any]):
    """Of samples that are asked for by place."""

    def __init__(self, data: Listed) -> None:
        self.data = data

    def __iter__(self) -> Any:
        raise AssertionError("read is there")

    def read(self, start: int, stop: int) -> list[Any]:
        return [self.data[place] for place in range(start, stop)]


def shuffled(plane: Plane) -> list[int]:
    """Another order on each rank."""
    return random.Random(plane.rank).sample(range(SAMPLES), SAMPLES)


def job_of(plane: Plane, training: Any, test: Any = None, collate: Any = None) -> Job:
    job = Job(recipe_of({"sync": {"delay_bound": 0}}), plane, keep=False, show="nothing")
    model = torch.nn.Linear(2, 2)
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    job.loader(training, BATCH, collate_fn=collate, epochs=1, samples=None)
    if test is not None:
        job.test_loader(DataLoader(test, BATCH))
    return job


def pil(number: int) -> Any:
    image = pytest.importorskip("PIL.Image")
    return image.fromarray((IMAGES[number].numpy() * 255).astype(np.uint8)), 0


KINDS: dict[str, Get] = {
    "tensor": lambda number: (IMAGES[number], 0),
    "label alone": lambda number: (torch.zeros(3), number),
    "array": lambda number: IMAGES[number].numpy(),
    "image": pil,
    "text": lambda number: {"text": f"sentence {number}", "ids": [1, 2]},
    "path": lambda number: f"/data/{number}.png",
    "sparse": lambda number: IMAGES[number].to_sparse(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_named(plane: Plane, kind: str) -> None:
    job = job_of(plane, Listed(KINDS[kind], shuffled(plane)))
    with pytest.raises(UserError, match=r"sample \d+ of the training data is .* on rank 1 \(.*\), and another, "):
        job.ready()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_data_are_equal(plane: Plane, kind: str) -> None:
    data = Listed(KINDS[kind])
    job_of(plane, data, Listed(KINDS[kind])).ready()
    assert data.reads == 0  # a copy's were


def test_test_data_and_what_is_within_data_sets_are_compared(plane: Plane) -> None:
    within = Subset(Listed(KINDS["tensor"], shuffled(plane)), range(SAMPLES))
    job = job_of(plane, Listed(KINDS["tensor"]), within)
    with pytest.raises(UserError, match=r"sample \d+ of test data 0"):
        job.ready()


def test_a_stream_that_reads_by_place_is_compared(plane: Plane) -> None:
    job = Job(recipe_of({}), plane, keep=False, show="nothing")
    model = torch.nn.Linear(2, 2)
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    job.loader(Stream(Listed(KINDS["tensor"], shuffled(plane))), BATCH, samples=SAMPLES)
    with pytest.raises(UserError, match=r"sample \d+ of the training data"):
        job.ready()


def test_what_collate_reads_is_compared(plane: Plane) -> None:
    job = job_of(plane, Listed(lambda number: number), collate=lambda numbers: IMAGES[numbers[0]] + plane.rank)
    with pytest.raises(UserError, match="collated of sample"):
        job.ready()


def test_a_file_that_one_rank_lacks_is_named(plane: Plane) -> None:
    def read(number: int) -> Any:
        if plane.rank:
            raise FileNotFoundError(f"{number}.png")
        return IMAGES[number]

    with pytest.raises(UserError, match=r"is not to be read \(FileNotFoundError\) on rank 1"):
        job_of(plane, Listed(read)).ready()


def by_global_generators(number: int) -> Any:
    return IMAGES[number] + torch.rand(()) + random.random() + np.random.rand()


class OwnGenerator:
    """Flips one sample in three, by a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, number: int) -> Any:
        return IMAGES[number].flip(1) if self.generator.random() < 1 / 3 else IMAGES[number]


def by_own_generator(number: int) -> Any:
    return IMAGES[number] + np.random.default_rng().normal(size=(SIDE, SIDE))


def decoded_elsewhere(number: int) -> Any:
    return IMAGES[number] * (1 + 1e-4 * np.random.default_rng().random())


@pytest.mark.parametrize("get", [by_global_generators, OwnGenerator(), by_own_generator, decoded_elsewhere])
def test_augmentation_is_no_difference(plane: Plane, get: Get) -> None:
    for _ in range(5):
        job_of(plane, Listed(lambda number: (get(number), number)), Listed(get)).ready()


def test_labels_beside_what_is_augmented_are_compared(plane: Plane) -> None:
    order = shuffled(plane)
    with pytest.raises(UserError, match=r"\[1\] of sample"):
        job_of(plane, Listed(lambda number: (by_own_generator(number), number), order)).ready()


def test_tensors_of_another_content_are_named(plane: Plane) -> None:
    with pytest.raises(UserError, match=r"\[0\] of sample \d+ of the training data is 1\.\S+, .* on rank 1"):
        job_of(plane, TensorDataset(IMAGES + plane.rank)).ready()
