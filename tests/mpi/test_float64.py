"""Weights of float64 keep their precision on several ranks, whatever the delay bound.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_float64.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from loops import BOUNDS
from plain_job import Loop, Row, assert_equal, assert_used_once_an_epoch, in_a_job, in_one_process, inner
from torch import nn
from torch.nn.functional import cross_entropy
from training import CLASSES, FEATURES, Net

from hetsync.plane.base import Plane

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]

CLASS_WEIGHTS = torch.tensor([1 / 3, 1.7, 0.9], dtype=torch.float64)


class Drift(nn.Module):
    """All its gradients are the same whatever its weights are, so at any delay bound they come to where one process has
    them; by moves of which float32 would know nothing."""

    buffer_rules: ClassVar = {"total": "sum", "mean": "mean"}

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))
        self.pair = nn.Parameter(torch.ones(2, FEATURES, dtype=torch.complex128))
        self.single = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float32))
        self.register_buffer("total", torch.ones(FEATURES, dtype=torch.float64))
        self.register_buffer("mean", torch.ones(FEATURES, dtype=torch.float64))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total += 1e-11 * len(points)
            self.mean += 1e-10
        slopes = torch.linspace(0.1, 1, FEATURES).double()
        score = (
            (slopes * self.real).sum()
            + (slopes * self.single).sum()
            + (slopes * (self.pair.real + 2 * self.pair.imag)).sum()
        )
        return score.expand(len(points), CLASSES)


def drift(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loop.model(points).mean().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def descend(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    scores = loop.model(points.to(next(loop.model.parameters()).dtype))
    cross_entropy(scores, labels).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def descend_by_class(loop: Loop, points: torch.Tensor, labels: torch.Tensor) -> None:
    loss = cross_entropy(loop.model(points.double()), labels, weight=CLASS_WEIGHTS)
    loop.job.backward(loss, weight=CLASS_WEIGHTS[labels].sum())
    loop.optimizer.step()
    loop.optimizer.zero_grad()


class Mixed(nn.Module):
    """Its first layer is of float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES).double()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(torch.tanh(self.first(points)).to(self.last.weight))
        return scores


class Large(nn.Module):
    """Of weights that take several segments of a sum, on every plane."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(FEATURES, 40_000), nn.Tanh(), nn.Linear(40_000, CLASSES)).double()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(points)
        return scores


DRIFT = Row(body=drift, model=Drift, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9))
ROWS = {
    "double": Row(body=descend, model=lambda: Net().double()),
    "adamw": Row(body=descend, model=lambda: Net().double(), optimizer=lambda m: torch.optim.AdamW(m.parameters())),
    "a loss weighted by class": Row(body=descend_by_class, model=lambda: Net().double()),
    "slices": Row(body=descend, model=lambda: Net().double(), accumulation=2),
    "large": Row(body=descend, model=Large, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4)),
}


@pytest.mark.parametrize("name", ROWS)
def test_synchronous_loops_are_one_process(plane: Plane, name: str) -> None:
    row = ROWS[name]
    loop = in_a_job(plane, row, 0)
    assert_equal(plane, loop, in_one_process(row), 1e-12)
    assert_used_once_an_epoch(plane, loop)


@pytest.mark.usefixtures("float64_by_default")
def test_float64_by_default(plane: Plane) -> None:
    row = Row(body=descend)
    assert_equal(plane, in_a_job(plane, row, 0), in_one_process(row), 1e-12)


def test_beside_float32_layers(plane: Plane) -> None:
    row = Row(body=descend, model=Mixed)
    assert_equal(plane, in_a_job(plane, row, 0), in_one_process(row), 1e-5)


@pytest.mark.parametrize("bound", BOUNDS)
def test_small_moves_survive_merging(plane: Plane, bound: int) -> None:
    loop, plain = in_a_job(plane, DRIFT, bound), in_one_process(DRIFT)
    mine, theirs = (inner(each.model).state_dict() for each in (loop, plain))
    torch.testing.assert_close(mine["single"], theirs["single"], rtol=1e-5, atol=0)
    for name in ("real", "pair", "total", "mean"):
        moved = (theirs[name] - 1).abs().max()
        assert 1e-10 < moved < 1e-7, "float32 would not know of it"
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=2e-14)
    assert_used_once_an_epoch(plane, loop)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "slices"])  # of which each has its step
def test_one_rank_in_delayed_mode_is_one_process(plane: Plane, name: str) -> None:
    row = ROWS[name]
    assert_equal(plane, in_a_job(plane, row, 4), in_one_process(row), 1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
def test_checkpoints_hold_all_of_it(plane: Plane, folder: Path, bound: int) -> None:
    whole = in_a_job(plane, DRIFT, bound)
    in_a_job(plane, DRIFT, bound, epochs=1, run=folder / "run")
    resumed = in_a_job(plane, DRIFT, bound, run=folder / "run", resume=True)
    mine, theirs = (inner(each.model).state_dict()["real"] for each in (resumed, whole))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-14)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_wires_round_what_goes_over_them(plane: Plane, wire: str, bound: int) -> None:
    loop = in_a_job(plane, replace(ROWS["double"], settings={"wire": wire}), bound)
    assert loop.losses[-1] < 0.6 * loop.losses[0]
    assert_used_once_an_epoch(plane, loop)
