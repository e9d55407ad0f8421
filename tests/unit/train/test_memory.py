"""A script's first slices tell how many samples fit a rank, and shares heed it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import hetsync
from hetsync.balance.speed_tracker import LEAST_OBSERVATIONS
from hetsync.plane.local import LocalPlane
from hetsync.train import running
from hetsync.train.memory import LAST_SLICE, SliceMemory


class Allocator:
    """`held` bytes, and `each` a sample within a slice."""

    def __init__(self, held: int, each: int, first_slice: int = 0) -> None:
        self.held, self.each, self.first_slice = held, each, first_slice
        self.samples = self.slices = 0

    def allocated(self) -> int:
        return self.held

    def begin_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self.held + self.each * self.samples


def caps(memory: SliceMemory, allocator: Allocator, sizes: list[int]) -> list[int | None]:
    found = []
    for size in sizes:
        memory.begin_slice()
        allocator.samples = size
        found.append(memory.end_slice(size))
    return found


def test_the_cap_is_told_once_and_leaves_a_tenth_free() -> None:
    allocator = Allocator(held=1000, each=10)
    found = caps(SliceMemory(allocator, 10_000), allocator, [4] * 10)
    assert found == [None] * (LAST_SLICE - 1) + [800] + [None] * 4
    assert LAST_SLICE < LEAST_OBSERVATIONS, "shares change after so many tasks"


def test_the_hungriest_slice_counts() -> None:
    allocator = Allocator(held=1000, each=10)
    memory = SliceMemory(allocator, 10_000)
    assert caps(memory, allocator, [4, 4, 4, 4]) == [None] * 4
    allocator.each = 20
    assert caps(memory, allocator, [4]) == [None]
    allocator.each = 10
    assert caps(memory, allocator, [4]) == [400]


def test_what_has_run_fits_however_full_the_memory_is() -> None:
    """So caps that are found never hold less than the batch."""
    allocator = Allocator(held=9_500, each=10)
    assert caps(SliceMemory(allocator, 10_000), allocator, [4] * LAST_SLICE)[-1] == 4


def test_a_script_reports_what_its_slices_take(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(held=1000, each=10)
    monkeypatch.setattr(running, "slice_memory", lambda plane, place, device: SliceMemory(allocator, 10_000))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetsync.join(plane=LocalPlane(), progress=False) as job:
        job.prepare(model, optimizer)
        for (batch,) in job.loader(TensorDataset(torch.ones(64, 3)), 4, epochs=1):
            allocator.samples = len(batch)
            job.backward(model(batch).mean())
            job.step()
    assert job.session.coordinator is not None
    assert job.session.coordinator.speeds.caps[0] == 800
