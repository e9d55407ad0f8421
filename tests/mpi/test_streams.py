"""Iterable data sets in a job: each place is used once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hetsync
from hetsync.plane.base import Plane
from hetsync.plane.local import LocalPlane
from hetsync.train.job import Job, StoppedByRequest

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2)]

BATCH, SAMPLES = 12, 450
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Numbers(IterableDataset[Any]):
    """Sample p is p; more than a job takes."""

    def __init__(self, samples: int = 10**6) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(_sample, range(self.samples))


class Addressed(Numbers):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it can be addressed")

    def read(self, start: int, stop: int) -> list[Any]:
        return [_sample(number) for number in range(start, stop)]


def _sample(number: int) -> tuple[torch.Tensor, int]:
    return torch.full((3,), number / SAMPLES), number


def step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, points: torch.Tensor) -> None:
    job.backward(model(points).square().mean())
    job.step(optimizer)


def prepared(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))  # type: ignore[no-any-return]


def used_by_all(plane: Plane, mine: list[int]) -> Counter[int]:
    return Counter(number for numbers in plane.gather_objects(mine) for number in numbers)


@pytest.mark.parametrize(
    ("bound", "kind", "workers"),
    [(0, Numbers, 0), (4, Numbers, 0), (4, Numbers, 1), (0, Addressed, 0), (4, Addressed, 0)],
)
def test_each_place_of_a_stream_is_used_once(plane: Plane, bound: int, kind: type[Numbers], workers: int) -> None:
    used = []
    with hetsync.join(plane=plane, delay_bound=bound, progress=False) as job:
        model, optimizer = prepared(job)
        for points, numbers in job.loader(kind(), BATCH, samples=SAMPLES, workers=workers):
            step(job, model, optimizer, points)
            used += numbers.tolist()
    assert used_by_all(plane, used) == Counter(range(SAMPLES))


def test_speeds_are_measured_on_the_first_samples_of_a_stream(plane: Plane) -> None:
    """And training begins with sample 0 all the same."""
    measured, used = [], []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        points, numbers = batch
        measured.extend(numbers.tolist())
        return model(points).square().mean()  # type: ignore[no-any-return]

    with hetsync.join(plane=plane, delay_bound=4, progress=False, profile_seconds=0.1) as job:
        model, optimizer = prepared(job)
        loader = job.loader(Numbers(), BATCH, samples=SAMPLES)
        job.measure(loss)
        for points, numbers in loader:
            step(job, model, optimizer, points)
            used += numbers.tolist()
    assert 0 < max(measured) < 100
    assert used_by_all(plane, used) == Counter(range(SAMPLES))


@BOUNDS
def test_epochs_of_a_stream_begin_anew(plane: Plane, bound: int) -> None:
    with hetsync.join(plane=plane, delay_bound=bound, progress=False) as job:
        model, optimizer = prepared(job)
        loader = job.loader(DataLoader(Numbers(), batch_size=BATCH), samples=SAMPLES)
        for _ in job.epochs(2):
            used = []
            for points, numbers in loader:
                step(job, model, optimizer, points)
                used += numbers.tolist()
            assert used_by_all(plane, used) == Counter(range(SAMPLES))


def test_what_a_rank_leaves_the_others_read(plane: Plane) -> None:
    """At delay bound 4, the places come back and lie before where the others stand."""
    if plane.size == 1:
        pytest.skip("a lone rank leaves to nobody")
    used: list[int] = []
    with hetsync.join(plane=plane, delay_bound=4, progress=False) as job:
        model, optimizer = prepared(job)
        for points, numbers in job.loader(Numbers(), BATCH, samples=SAMPLES):
            step(job, model, optimizer, points)
            used += numbers.tolist()
            if plane.rank == 1:
                break
    assert used_by_all(plane, used) == Counter(range(SAMPLES))


@BOUNDS
def test_a_resumed_run_goes_on_in_the_stream(plane: Plane, bound: int, folder: Path) -> None:
    used: list[int] = []

    def train(stop_after: int | None) -> None:
        with hetsync.join(plane=plane, run=folder / "run", resume="auto", delay_bound=bound, progress=False) as job:
            model, optimizer = prepared(job)
            batches = enumerate(job.loader(Numbers(), BATCH, samples=SAMPLES, epochs=1))
            for number, (points, numbers) in batches:
                step(job, model, optimizer, points)
                used.extend(numbers.tolist())
                if number == stop_after:
                    job.session.request_stop()

    with pytest.raises(StoppedByRequest):
        train(stop_after=2)
    assert 0 < used_by_all(plane, used).total() < SAMPLES
    train(stop_after=None)
    assert used_by_all(plane, used) == Counter(range(SAMPLES))


def test_a_stream_that_ends_early_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train_alone(Numbers(70))
    assert ended.value.code == 2
    assert "the training data has 70 samples, but 450 are to be read" in capsys.readouterr().err


def train_alone(data: Numbers) -> None:
    with hetsync.join(plane=LocalPlane(), progress=False) as job:
        model, optimizer = prepared(job)
        for points, _ in job.loader(data, BATCH, samples=SAMPLES):
            step(job, model, optimizer, points)
