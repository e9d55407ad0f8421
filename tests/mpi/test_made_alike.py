"""What would make ranks differ at D = 0 is made alike: weights of two optimizers, weights that the first batch makes,
averages of statistics of slices.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_made_alike.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_job import EPOCHS, PlainJob
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from training import BATCH, CLASSES, FEATURES, SEED, Blobs, Net, unequal_shares

import hetsync
from hetsync.config.parser import recipe_of
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256
from hetsync.train.job import Job
from hetsync.train.rest import CommonState

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]


def join(plane: Plane, **more: Any) -> Any:
    pins = unequal_shares(plane.size)
    options = {
        "delay_bound": 0,
        "seed": SEED,
        "pins": pins,
        "least_slice": 1,
        "rebalance": False,
        "progress": False,
        **more,
    }
    return hetsync.join(plane=plane, **options)


def alike(plane: Plane, *modules: nn.Module) -> bool:
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return len(set(plane.gather_objects(weights_sha256(tensors)))) == 1


def two_steps(job: Any) -> nn.Module:
    """Of the first layer, with rates of their own."""
    model = Net()
    first, last = model.body[0], model.body[-1]
    optimizers = [
        torch.optim.SGD([*first.parameters(), *last.parameters()], 0.05),
        torch.optim.Adam(first.parameters(), 0.01),
    ]
    job.prepare(model, *optimizers)
    loader = job.prepare(DataLoader(Blobs(), BATCH, shuffle=True))
    for _ in job.epochs(EPOCHS):
        for points, labels, *_ in loader:
            job.backward(nn.functional.cross_entropy(model(points), labels))
            job.step(*optimizers)
    return model


def test_a_weight_of_two_optimizers_takes_both_steps(plane: Plane) -> None:
    with join(plane) as job:
        model = two_steps(job)
    for mine, theirs in zip(model.parameters(), two_steps(PlainJob()).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def clamped(job: Any, samples: int) -> nn.Module:
    """As a WGAN's critic is, after each step."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.prepare(model, optimizer)
    loader = job.prepare(DataLoader(Blobs(samples), BATCH, shuffle=True))
    for _ in job.epochs(EPOCHS):
        for points, labels, *_ in loader:
            job.backward(nn.functional.cross_entropy(model(points), labels))
            job.step(optimizer)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.clamp_(-0.2, 0.2)
    return model


@pytest.mark.parametrize("samples", [4 * BATCH, 4 * BATCH + 1])  # of an epoch's last batch only one rank has a part
def test_what_a_loop_does_after_its_step_is_had_by_all(plane: Plane, samples: int) -> None:
    with join(plane, least_slice=2) as job:
        model = clamped(job, samples)
    assert alike(plane, model)
    for mine, theirs in zip(model.parameters(), clamped(PlainJob(), samples).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class FromTheFirstBatch(nn.Module):
    """As actnorm: weights are what normalises the first batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shift, self.scale = nn.Parameter(torch.zeros(FEATURES)), nn.Parameter(torch.ones(FEATURES))
        self.body = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(points.mean(0))
                self.scale.copy_(1 / (points - self.shift).abs().mean(0).clamp_min(0.1))
            self.ready.fill_(True)
        scores: torch.Tensor = self.body((points - self.shift) * self.scale)
        return scores


@pytest.mark.parametrize("bound", [0, 2])
def test_weights_that_the_first_batch_makes_are_shared(
    plane: Plane, bound: int, capfd: pytest.CaptureFixture[str]
) -> None:
    model, first = FromTheFirstBatch(), torch.zeros(0)
    optimizer = torch.optim.SGD([*model.body.parameters(), model.shift, model.scale], 1e-3)
    with join(plane, delay_bound=bound) as job:
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Blobs(), BATCH, shuffle=True))
        for _ in job.epochs(1):
            for points, labels, *_ in loader:
                job.backward(nn.functional.cross_entropy(model(points), labels))
                first = first if len(first) else points.mean(0)
                job.step(optimizer)
    assert alike(plane, model)
    if bound == 0:  # rank 0's, and a few small steps
        torch.testing.assert_close(model.shift.detach(), plane.gather_objects(first)[0], rtol=0, atol=0.05)
        err = capfd.readouterr().err
        told = err.count("scale, shift were written in the first batch")
        assert told == (plane.size > 1 and plane.rank == 0), err


def test_averages_of_statistics_of_slices_are_evened_out(plane: Plane) -> None:
    model = Net(batch_norm=True)
    average = AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with join(plane) as job:
        job.prepare(model, average, optimizer)
        loader = job.prepare(DataLoader(Blobs(), BATCH, shuffle=True))
        for _ in job.epochs(EPOCHS):
            for points, labels, *_ in loader:
                loss = nn.functional.cross_entropy(model(points), labels)
                average.update_parameters(model)  # before the step, which makes statistics those of all ranks
                job.backward(loss)
                job.step(optimizer)
    assert alike(plane, model, average)


class ByHand:
    """An average of weights that a script makes by itself: a copy of the model, or tensors."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        copies = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.kept: Any = {
            "copy": copy.deepcopy(model),
            "list": list(copies.values()),
            "dictionary, replaced": copies,
            "AveragedModel": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            "AveragedModel, of all": AveragedModel(model),
        }[kind]

    @property
    def tensors(self) -> list[torch.Tensor]:
        kept = self.kept.state_dict() if isinstance(self.kept, nn.Module) else self.kept
        return list(kept.values() if isinstance(kept, dict) else kept)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        if isinstance(self.kept, AveragedModel):
            self.kept.update_parameters(model)
        elif isinstance(self.kept, dict):
            for name, weight in model.named_parameters():
                self.kept[name] = 0.9 * self.kept[name] + 0.1 * weight
        else:
            for average, weight in zip(self.tensors, model.parameters(), strict=True):
                average.mul_(0.9).add_(weight, alpha=0.1)


def averaged_by_hand(job: Any, kind: str, samples: int) -> list[torch.Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = ByHand(model, kind)
    job.prepare(model, optimizer)
    if isinstance(average.kept, AveragedModel):
        job.prepare(average.kept)
    else:
        job.keep_average(average.kept)
    loader = job.prepare(DataLoader(Blobs(samples), BATCH, shuffle=True))
    for _ in job.epochs(EPOCHS):
        for points, labels, *_ in loader:
            job.backward(nn.functional.cross_entropy(model(points), labels))
            job.step(optimizer)
            average.update(model)
    return average.tensors


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("samples", [4 * BATCH, 4 * BATCH + 1])  # of an epoch's last batch only one rank has a part
@pytest.mark.parametrize("kind", ["copy", "list", "dictionary, replaced", "AveragedModel", "AveragedModel, of all"])
def test_averages_by_hand(plane: Plane, kind: str, samples: int, bound: int) -> None:
    with join(plane, least_slice=2, delay_bound=bound) as job:
        mine = averaged_by_hand(job, kind, samples)
    assert len(set(plane.gather_objects(weights_sha256(mine)))) == 1
    for average, theirs in zip(mine, averaged_by_hand(PlainJob(), kind, samples), strict=True):
        if bound == 0:
            torch.testing.assert_close(average, theirs, rtol=1e-4, atol=1e-5)


def test_max_norm_is_refused_where_ranks_would_differ(plane: Plane) -> None:
    job = Job(recipe_of({}), plane, keep=False, show="nothing")
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0))
    if plane.size == 1:
        assert job.prepare(model) is model
        return
    with pytest.raises(UserError, match="0 has max_norm, by which forward shortens the rows"):
        job.prepare(model)


def test_only_what_differs_is_sent_at_the_start(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read a large base from a file of its own is not sent it."""
    sent: list[list[str]] = []
    given_by_first = CommonState._given_by_first

    def watched(self: CommonState, state: Any, names: Any) -> Any:
        sent.append(list(names))
        return given_by_first(self, state, names)

    monkeypatch.setattr(CommonState, "_given_by_first", watched)
    model = Net()
    if plane.rank:
        with torch.no_grad():
            model.body[-1].bias += plane.rank
    with hetsync.join(plane=plane, delay_bound=0, progress=False) as job:
        loader = job.loader(Blobs(), BATCH, epochs=1)
        job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for points, labels, _ in loader:
            if not job.samples:
                torch.testing.assert_close(model.body[-1].bias, Net().body[-1].bias)
            job.backward(nn.functional.cross_entropy(model(points), labels))
            job.step()
    assert sent == ([["body.3.bias"]] if plane.size > 1 else [])
    digests = plane.gather_objects(weights_sha256(model.parameters()))
    assert len(set(digests)) == 1
