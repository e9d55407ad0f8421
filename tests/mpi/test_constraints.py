"""Weights keep to what a script projects them on, after each step and where ranks merge.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_constraints.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from plain_job import EPOCHS, PlainJob, assert_alike
from torch import nn
from torch.utils.data import DataLoader
from training import BATCH, SEED, Blobs, Net, unequal_shares

import hetsync
from hetsync.plane.base import Plane
from hetsync.train.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]

ROUNDED = 1e-6


@dataclass(frozen=True)
class Kept:
    """A constraint: what projects a `Net` on it, and how far one is off."""

    project: Callable[[Net], None]
    off: Callable[[Net], float]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), 0.05)


def clamp(model: Net) -> None:
    for weight in model.parameters():
        weight.data.clamp_(-0.2, 0.2)


def shorten(model: Net) -> None:
    """Rows, and the memory behind weights is another."""
    for name, weight in model.named_parameters():
        if name.endswith("weight"):
            weight.data = weight.data.renorm(2, 0, 0.5)


def make_orthogonal(model: Net) -> None:
    weight = model.body[0].weight
    q, r = torch.linalg.qr(weight.double())
    weight.copy_(q * r.diagonal().sign())


def off_orthogonal(model: Net) -> float:
    weight = model.body[0].weight.detach().double()
    return float((weight.T @ weight - torch.eye(weight.shape[1])).abs().max())


KEPT = {
    "clamp": Kept(clamp, lambda model: max(float(weight.detach().abs().max()) for weight in model.parameters()) - 0.2),
    "norm": Kept(
        shorten,
        lambda model: max(float(weight.detach().norm(dim=-1).max()) for weight in weights_of(model)) - 0.5,
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    ),
    "orthogonal": Kept(make_orthogonal, off_orthogonal),
}


def weights_of(model: Net) -> list[torch.Tensor]:
    return [weight for name, weight in model.named_parameters() if name.endswith("weight")]


def join(plane: Plane, **settings: Any) -> AbstractContextManager[Any]:
    pins = unequal_shares(plane.size)
    told = {"seed": SEED, "pins": pins, "least_slice": 1, "rebalance": False, "progress": False, **settings}
    return hetsync.join(plane=plane, **told)


def train(job: Any, kept: Kept, told: bool = True, see: Callable[[Net], None] = lambda model: None) -> Net:
    """`see` is given the model at each batch, in evaluations, and at rests. Not `told`, the loop projects by itself."""
    model = Net()
    optimizer = kept.optimizer(model)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Blobs(4 * BATCH + 1), BATCH, shuffle=True))

    def score() -> tuple[float, int]:
        see(model)
        return 0.0, 1

    if isinstance(job, Job):
        job.evaluate_every(2 * BATCH, score)
        if told:
            job.constrain(model, kept.project)
    for _ in job.epochs(EPOCHS):
        for number, (points, labels, _) in enumerate(loader):
            if number:
                see(model)
            job.backward(nn.functional.cross_entropy(model(points), labels))
            job.step(optimizer)
            if not told or isinstance(job, PlainJob):
                with torch.no_grad():
                    kept.project(model)
        see(model)
    return model


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_at_bound_0_it_is_one_process(plane: Plane, kept: Kept) -> None:
    with join(plane, delay_bound=0) as job:
        model = train(job, kept)
    assert_alike(plane, model)
    for mine, theirs in zip(model.parameters(), train(PlainJob(), kept).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_it_holds_wherever_weights_are_seen(plane: Plane, folder: Path, kept: Kept, fragments: int) -> None:
    off: list[float] = []
    with join(plane, delay_bound=4, fragments=fragments, run=str(folder / "run"), checkpoint_every=BATCH) as job:
        model = train(job, kept, see=lambda model: off.append(kept.off(model)))
    off.append(kept.off(model))
    assert_alike(plane, model)
    saved = sorted((folder / "run" / "checkpoints").glob("*/model.safetensors"))
    assert saved
    for path in saved:
        model.load_state_dict(safetensors.torch.load_file(path))
        off.append(kept.off(model))
    assert max(off) <= ROUNDED, off


def test_a_loop_that_projects_by_itself_is_told_once(plane: Plane, capfd: pytest.CaptureFixture[str]) -> None:
    for bound, told in ((4, False), (4, True), (0, False)):
        with join(plane, delay_bound=bound) as job:
            train(job, KEPT["clamp"], told)
        said = sum(plane.gather_objects(capfd.readouterr().err.count("give job.constrain")))
        assert said == (plane.size > 1 and bound > 0 and not told), (bound, told)


class Masked(Net):
    """A pruned layer, which a schedule prunes on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(16) % 2).float()[:, None])


def prune(model: Masked) -> None:
    model.body[0].weight *= model.mask


@pytest.mark.parametrize("bound", [0, 4])
def test_masks_may_change_at_rests_and_weights_be_set_out_of_bounds(plane: Plane, bound: int) -> None:
    model = Masked()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    with join(plane, delay_bound=bound) as job:
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Blobs(), BATCH, shuffle=True))
        job.constrain(model, prune)
        for epoch in job.epochs(EPOCHS):
            for number, (points, labels, _) in enumerate(loader):
                pruned = model.body[0].weight[model.mask.flatten() == 0]
                as_in_one_process = bound == 0 or plane.size == 1
                assert (number == 0 and as_in_one_process) or not pruned.any()
                job.backward(nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
            assert_alike(plane, model)
            assert not model.body[0].weight[model.mask.flatten() == 0].any()
            with torch.no_grad():
                model.mask[epoch] = 0.0
                model.body[0].weight += 0.1
    assert_alike(plane, model)


@pytest.mark.parametrize("bound", [0, 4])
def test_the_critic_of_two_models_has_a_bound(plane: Plane, bound: int) -> None:
    critic, generator = nn.Linear(6, 1), nn.Linear(6, 6)
    of_critic, of_generator = (torch.optim.RMSprop(each.parameters(), 0.02) for each in (critic, generator))
    with join(plane, delay_bound=bound) as job:
        job.prepare(critic, generator, of_critic, of_generator)
        loader = job.prepare(DataLoader(Blobs(), BATCH, shuffle=True))
        job.constrain(critic, lambda it: it.weight.clamp_(-0.0625, 0.0625))
        for _ in job.epochs(EPOCHS):
            for points, *_ in loader:
                job.backward(critic(generator(points).detach()).mean() - critic(points).mean())
                job.step(of_critic)
                assert float(critic.weight.detach().abs().max()) <= 0.0625
                of_generator.zero_grad()
                job.backward(-critic(generator(points)).mean())
                job.step(of_generator)
            assert float(critic.weight.detach().abs().max()) <= 0.0625 < float(generator.weight.detach().abs().max())
            assert_alike(plane, nn.ModuleList([critic, generator]))


@pytest.fixture
def threads_by_rank(plane: Plane) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + plane.rank % 2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("threads_by_rank")
@pytest.mark.parametrize("bound", [0, 4])
def test_what_other_numbers_of_threads_round_otherwise_is_taken_over(plane: Plane, bound: int) -> None:
    """As a QR does, from some size on."""

    def project(model: Net) -> None:
        for weight in model.parameters():
            weight.clamp_(-0.2, 0.2).mul_(1 + 1e-6 * torch.get_num_threads())

    with join(plane, delay_bound=bound) as job:
        assert_alike(plane, train(job, Kept(project, lambda model: 0.0)))
