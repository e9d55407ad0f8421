"""Every model trains in both modes on unequal ranks, and its loss gives one process's gradients at any shares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import batches, step, unequal_shares
from workloads import WORKLOADS, Workload, freeze_norms

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig
from hetsync.data import Data
from hetsync.data.loader import EpochOrder, Source
from hetsync.data.workers import fetch
from hetsync.emulation.device import EmulatedDevice
from hetsync.plane.base import Plane
from hetsync.sync.milestones import Milestone
from hetsync.sync.rates import ScheduleRates
from hetsync.train.session import Session
from hetsync.train.tasks import Trained
from hetsync.train.terms import Terms

BOUND = 4

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

BATCH = 15
SEED = 2


# Larger ones of the same cells and stems as nasnet_a_large, nasnet_a_cifar and pnasnet5_cifar have.
ALIKE = ("nasnet_a_mobile", "pnasnet5_mobile", "pnasnet5_large")
MARKED = [pytest.param(each, marks=[pytest.mark.thorough] * (each.name in ALIKE), id=each.name) for each in WORKLOADS]


@pytest.fixture(params=MARKED)
def workload(request: pytest.FixtureRequest) -> Workload:
    chosen: Workload = request.param
    return chosen


@pytest.fixture
def data(plane: Plane, folder: Path, workload: Workload) -> Data:
    """The data on every rank; files and caches are written once."""
    first = workload.data(folder) if plane.rank == 0 else None
    plane.barrier()
    made = first or workload.data(folder)
    plane.barrier()
    return made


def train(
    plane: Plane,
    data: Data,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: SyncConfig,
    samples: int,
    prepare: Callable[[torch.nn.Module], object] = torch.nn.Module.train,
) -> Session:
    """Each rank is an emulated device half as fast as the one before."""
    seconds = [1e-5 * 2**rank for rank in range(plane.size)]
    profiles = [RankProfile("made up", "here", StepTime(0.0, each), emulated=True) for each in seconds]
    terms = Terms(
        batch_size=BATCH,
        total_samples=samples,
        ranks=profiles,
        milestones=lambda position: Milestone(samples, "end", True),
        seed=SEED,
    )
    source = Source(data.train, data.collate, data.costs)
    device = EmulatedDevice(StepTime(0.0, seconds[plane.rank]))
    session = Session(
        plane=plane,
        trained=Trained(model=model, optimizers=[optimizer], rates=[ScheduleRates(optimizer)]),
        source=source,
        sync=sync,
        terms=terms,
        device=device,
        timeout_seconds=30.0,
    )
    prepare(model)
    for batch in batches(session):
        loss = data.loss(model, batch)
        loss.backward()
        step(session, loss)
    session.close()
    return session


@torch.no_grad()
def loss_on_all(model: torch.nn.Module, data: Data) -> float:
    count = len(data.train)  # type: ignore[arg-type]
    return data.loss(copy.deepcopy(model), fetch(data.train, list(range(count)), data.collate)).item()


@pytest.mark.each_value(6)
def test_trains_on_unequal_ranks(plane: Plane, workload: Workload, data: Data) -> None:
    """In delayed mode: a synchronous job equals one process, which is a test of its own."""
    model = workload.model(data)
    optimizer = torch.optim.Adam(model.parameters(), workload.learning_rate)
    before = loss_on_all(model, data)
    session = train(plane, data, model, optimizer, SyncConfig(BOUND), workload.rounds * BATCH)
    assert session.applied == workload.rounds * BATCH
    assert loss_on_all(model, data) < 0.95 * before
    if session.coordinator is not None:
        assert max(session.coordinator.machine.staleness) <= BOUND


@pytest.mark.thorough
def test_gradients_are_those_of_one_process(plane: Plane, workload: Workload, data: Data) -> None:
    model = workload.model(data).double()
    freeze_norms(model)
    alone = copy.deepcopy(model)
    shares = unequal_shares(plane.size, BATCH)
    indices = EpochOrder(len(data.train), SEED, data.costs).indices([(0, BATCH)])  # type: ignore[arg-type]
    first = sum(shares[rank] for rank in range(plane.rank))
    mine = indices[first : first + shares[plane.rank]]
    if mine:
        (data.loss(model, double(fetch(data.train, mine, data.collate))) * len(mine) / BATCH).backward()
    data.loss(alone, double(fetch(data.train, indices, data.collate))).backward()
    parts = plane.gather_objects([p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
    for number, (name, parameter) in enumerate(alone.named_parameters()):
        expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        off = (sum(part[number] for part in parts) - expected).abs().max()
        assert off <= 1e-5 * expected.abs().max() + 1e-12, name


def test_a_synchronous_job_is_one_process(plane: Plane, workload: Workload, data: Data) -> None:
    model = workload.model(data)
    alone = copy.deepcopy(model)
    samples = 2 * BATCH
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(plane, data, model, sgd, SyncConfig(0), samples, prepare=freeze_norms)
    freeze_norms(alone)
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    order = EpochOrder(len(data.train), SEED, data.costs)  # type: ignore[arg-type]
    for start in range(0, samples, BATCH):
        optimizer.zero_grad()
        batch = fetch(data.train, order.indices([(start, start + BATCH)]), data.collate)
        data.loss(alone, batch).backward()
        optimizer.step()
    for (name, expected), weights in zip(alone.named_parameters(), model.parameters(), strict=True):
        moved = (weights - expected).abs().max()
        assert moved <= 1e-5 * expected.abs().max() + 1e-7, name


def double(batch: object) -> object:
    """Floating-point tensors of a nested batch in double precision."""
    if isinstance(batch, torch.Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: double(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [double(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
