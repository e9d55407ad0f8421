"""Buffers of every rule in a loop: at D = 0 as in one process, at D >= 1 no increment lost, and refused without a word.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_buffers.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_job import EPOCHS, PlainJob
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import BATCH, CLASSES, FEATURES, SAMPLES, SEED, Blobs, unequal_shares

import hetsync
from hetsync.config.parser import recipe_of
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.train.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]
RULES = {"bank": "rows", "hits": "sum", "seen": "sum", "batches": "mean", "shadow": "mean", "last": "rows"}


class Numbered(Dataset[Any]):
    """Samples with their places."""

    def __init__(self) -> None:
        self.blobs = Blobs()

    def __len__(self) -> int:
        return len(self.blobs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        point, label, _ = self.blobs[index]
        return index, point, label


class Remembering(nn.Module):
    """A memory bank that the loss reads, histograms and counts, an average of a batch's means, a shadow of a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("bank", nn.functional.normalize(torch.randn(SAMPLES, 8)))
        self.register_buffer("hits", torch.zeros(CLASSES))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("shadow", torch.zeros(8, FEATURES))
        self.register_buffer("last", torch.full((SAMPLES,), -1))
        self.register_buffer("constant", torch.ones(3))

    def loss(self, places: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = nn.functional.normalize(self.body(points))
        loss = nn.functional.cross_entropy(self.head(features), labels)
        loss = loss + 0.1 * (features @ self.bank.clone().T).logsumexp(1).mean()
        with torch.no_grad():
            self.bank[places] = features
            self.last[places] = labels
            self.hits += nn.functional.one_hot(labels, CLASSES).float().sum(0)
            self.seen += len(points)
            self.batches += 1
            self.shadow = 0.9 * self.shadow + 0.1 * self.body.weight.detach()
        return loss


def loop(job: Any, model: Any = None, **more: Any) -> Any:
    model = model or Remembering()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Numbered(), BATCH, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader, **more)
    for _ in job.epochs(EPOCHS):
        for places, points, labels in loader:
            job.backward(model.loss(places, points, labels))
            job.step(optimizer)
    return model


def join(plane: Plane, bound: int) -> Any:
    pins = unequal_shares(plane.size)
    options = {"seed": SEED, "pins": pins, "least_slice": 1, "rebalance": False, "progress": False}
    return hetsync.join(plane=plane, delay_bound=bound, **options)


def test_at_0_buffers_are_those_of_one_process(plane: Plane) -> None:
    with join(plane, 0) as job:
        model = loop(job, buffers=RULES)
    plain = loop(PlainJob())
    for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


class Centred(nn.Module):
    """Centres that forward follows, by assignment to their memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("centre", torch.zeros(FEATURES))

    def loss(self, places: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.head(points - self.centre.clone()), labels)
        self.centre.data = 0.9 * self.centre.data + 0.1 * points.mean(0)
        return loss


@pytest.mark.parametrize("bound", [0, 2])
def test_centres_that_forward_writes_are_a_buffer(plane: Plane, bound: int) -> None:
    with join(plane, bound) as job:
        mine = loop(job, Centred(), buffers={"centre": "mean"})
    theirs = loop(PlainJob(), Centred())
    near = 0.5 if bound else 1e-5
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-4, atol=near)
    assert len(set(plane.gather_objects(str(mine.state_dict())))) == 1


def with_key(job: Any) -> list[nn.Module]:
    """MoCo's key encoder, which follows the query's, beside the prepared model."""
    torch.manual_seed(5)
    query = nn.Linear(FEATURES, CLASSES)
    key = copy.deepcopy(query).requires_grad_(False)
    job.keep_average(key)
    optimizer = torch.optim.SGD(query.parameters(), 0.1)
    query, optimizer, loader = job.prepare(query, optimizer, DataLoader(Numbered(), BATCH, shuffle=True))
    for _ in job.epochs(EPOCHS):
        for _, points, labels in loader:
            job.backward(nn.functional.cross_entropy(query(points) - 0.3 * key(points), labels))
            job.step(optimizer)
            with torch.no_grad():
                for mine, theirs in zip(key.parameters(), query.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
    return [query, key]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_key_encoder_stands_beside_the_prepared_model(plane: Plane, bound: int) -> None:
    with join(plane, bound) as job:
        found = with_key(job)
    plain = with_key(PlainJob())
    near = 0.5 if bound else 1e-5
    for mine, theirs in zip(found, plain, strict=True):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-4, atol=near)
        assert len(set(plane.gather_objects(str(mine.state_dict())))) == 1


class Observing(nn.Module):
    """Ranges from infinity on, of whole numbers, of the last batch, and a running average of batches' least."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("low", torch.full((FEATURES,), torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))
        self.register_buffer("longest", torch.tensor(0))
        self.register_buffer("last", torch.tensor(0.0))
        self.register_buffer("slow", torch.tensor(0.0))

    def loss(self, places: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.low = torch.minimum(self.low, points.amin(0))
            self.high.copy_(torch.maximum(self.high, points.max()))
            self.longest = torch.maximum(self.longest, places.max())
            self.last = points.max()
            self.slow.lerp_(points.min(), 0.1)
        return nn.functional.cross_entropy(self.head(points), labels)


RANGES = {"low": "min", "high": "max", "longest": "max", "last": "max", "slow": "min"}


@pytest.mark.parametrize("bound", [0, 2])
def test_ranges_are_those_of_one_process(plane: Plane, bound: int) -> None:
    with join(plane, bound) as job:
        mine = loop(job, Observing(), buffers=RANGES).state_dict()
    theirs = loop(PlainJob(), Observing()).state_dict()
    for name in RANGES if bound == 0 else ("low", "high", "longest"):
        assert torch.equal(mine[name], theirs[name]), name
    assert len(set(plane.gather_objects(str(mine)))) == 1


def test_delayed_every_increment_counts_once_and_rows_are_whole(plane: Plane) -> None:
    with join(plane, 2) as job:
        model = loop(job, buffers=RULES)
    labels = torch.stack([label for _, _, label in Numbered()])
    assert int(model.seen) == SAMPLES * EPOCHS
    assert model.hits.tolist() == (EPOCHS * torch.bincount(labels, minlength=CLASSES)).tolist()
    torch.testing.assert_close(model.bank.norm(dim=1), torch.ones(SAMPLES))
    assert torch.equal(model.last, labels)
    assert float((model.shadow - model.body.weight).detach().abs().max()) < 0.5
    assert len(set(plane.gather_objects(float(model.shadow.sum())))) == 1


@pytest.mark.parametrize("bound", [0, 2])
def test_one_rank_needs_no_word(plane: Plane, bound: int) -> None:
    if plane.size > 1:
        pytest.skip("others would differ, and the job would end")
    with join(plane, bound) as job:
        assert int(loop(job).seen) == SAMPLES * EPOCHS


def test_a_name_that_no_model_has_is_refused(plane: Plane) -> None:
    job = Job(recipe_of({}), plane, keep=False, show="nothing")
    sentence = "buffers queue, which the models beside do not have: theirs are bank, hits"
    with pytest.raises(UserError, match=sentence):
        job.prepare(Remembering(), buffers={"queue": "rows"})
