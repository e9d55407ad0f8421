"""Saved at rest, gone on with later, by as many ranks or others: the same training, no sample lost or used twice.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_resume.py
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from training import BATCH, OPTIMIZERS, SAMPLES, Net, Outcome, assert_invariants, train, unequal_shares

from hetsync.config.schema import OuterConfig, SyncConfig
from hetsync.plane.base import Plane
from hetsync.plane.local import LocalPlane
from hetsync.train import checkpoint
from hetsync.train.checkpoint import Progress
from hetsync.train.session import Session

# Two ranks show nothing that four do not: of four, some have no samples in the last batch before a rest.
pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 4)]

HALF = 100  # not where a round would end by itself


def sync_of(plane: Plane, bound: int, **changes: object) -> SyncConfig:
    pins = unequal_shares(plane.size)
    return SyncConfig(bound, 0.25, grace=0, rebalance=False, pins=pins, **changes)  # type: ignore[arg-type]


def saver(plane: Plane, folder: Path):  # type: ignore[no-untyped-def]
    """Saves whenever the job is at rest, as the trainer does."""

    def save(outcome: Outcome) -> None:
        session = outcome.session
        if plane.rank == 0:
            progress = Progress(
                samples_applied=session.applied,
                version=session.version,
                ranks=session.plane.size,
                shares=session.shares,
                delay_bound=4,
                quorum=0.25,
                accumulation=1,
                train_seconds=0.0,
            )
            velocity = session.outer.velocity if session.outer is not None else None
            checkpoint.save(folder / "checkpoints", progress, outcome.model, [outcome.optimizer], velocity, keep=9)
        plane.barrier()

    return save


def keep_only(plane: Plane, folder: Path, samples: int) -> None:
    """As if the job had died right after it saved there."""
    if plane.rank == 0:
        for path in checkpoint.complete(folder / "checkpoints"):
            if not path.name.endswith(f"{samples:012d}"):
                shutil.rmtree(path)
    plane.barrier()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "batch norm", "dropout"])
def test_synchronous_training_goes_on_bit_for_bit(plane: Plane, folder: Path, optimizer: str, kind: str) -> None:
    settings = (kind == "batch norm", False, 0.5 if kind == "dropout" else 0.0)
    sync = sync_of(plane, 0, accumulation=2)
    whole = train(plane, sync, model=Net(*settings), optimizer=optimizer, rests=[HALF], at_rest=saver(plane, folder))
    keep_only(plane, folder, HALF)
    torch.manual_seed(99)
    other = Net(*settings)
    torch.nn.init.zeros_(other.body[0].weight)  # whatever it starts with must not matter
    loaded = checkpoint.load_newest(folder)
    resumed = train(plane, sync, model=other, optimizer=optimizer, rests=[HALF], loaded=loaded)
    assert resumed.session.terms.applied == HALF
    assert resumed.rests[-1] == whole.rests[-1]
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights, whole.weights, strict=True))


@pytest.mark.parametrize("bound", [0, 4])
def test_chance_of_every_kind_goes_on(plane: Plane, folder: Path, bound: int) -> None:
    """What user code draws after a rest follows from the seed, the rank and the position alone."""
    drawn: dict[int, list[tuple[float, float, float]]] = {}

    def draw(session: Session, number: int) -> None:
        drawn.setdefault(session.applied, []).append((torch.rand(1).item(), np.random.rand(), random.random()))

    sync = sync_of(plane, bound)
    train(plane, sync, rests=[HALF], on_slice=draw, at_rest=saver(plane, folder))
    keep_only(plane, folder, HALF)
    whole, drawn = drawn, {}
    train(plane, sync, rests=[HALF], on_slice=draw, loaded=checkpoint.load_newest(folder))
    if bound:  # as many tasks as there is time for
        count = min(len(whole[HALF]), len(drawn[HALF]))
        assert whole[HALF][:count] == drawn[HALF][:count]
    else:
        assert whole[HALF] == drawn[HALF]
    firsts = plane.gather_objects(whole[HALF][:1])
    assert len({draws for first in firsts for draws in first}) == sum(map(len, firsts)), "ranks draw alike"


@pytest.mark.parametrize("outer", ["identity", "nesterov"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_delayed_training_goes_on(plane: Plane, folder: Path, optimizer: str, outer: str) -> None:
    sync = sync_of(plane, 4, outer=OuterConfig(outer, 0.7, 0.5))  # type: ignore[arg-type]

    def stop(session, number: int) -> None:  # type: ignore[no-untyped-def]
        if plane.rank == 0 and number == 4:
            session.request_stop()

    samples = 4 * SAMPLES
    first = train(plane, sync, optimizer=optimizer, samples=samples, on_slice=stop, at_rest=saver(plane, folder))
    loaded = checkpoint.load_newest(folder)
    assert loaded.progress.samples_applied == first.session.applied
    assert (loaded.outer is None) == (outer == "identity")
    then = train(plane, sync, optimizer=optimizer, samples=samples, loaded=loaded)
    assert then.first_loss == first.rests[-1].loss
    assert then.rests[-1].version > first.rests[-1].version
    assert_invariants(plane, [first, then], samples, 4)
    assert then.rests[-1].loss < 0.6 * first.first_loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("direction", ["one to many", "many to one"])
def test_another_number_of_ranks_goes_on(plane: Plane, folder: Path, optimizer: str, direction: str) -> None:
    """D = 0 does not notice."""
    alone, together = (LocalPlane(), SyncConfig(0)), (plane, sync_of(plane, 0))
    whole = train(*alone, optimizer=optimizer, rests=[HALF])
    before, after = (alone, together) if direction == "one to many" else (together, alone)
    save = saver(plane, folder)  # on rank 0, whoever trains
    train(*before, optimizer=optimizer, rests=[HALF], at_rest=save)
    plane.barrier()
    keep_only(plane, folder, HALF)
    resumed = train(*after, optimizer=optimizer, rests=[HALF], loaded=checkpoint.load_newest(folder))
    assert resumed.session.applied == SAMPLES
    assert len(resumed.slices) < SAMPLES // BATCH + 1
    for mine, theirs in zip(resumed.weights, whole.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    plane.barrier()


def test_delayed_training_goes_on_with_another_number_of_ranks(plane: Plane, folder: Path) -> None:
    first = train(LocalPlane(), SyncConfig(4), samples=HALF, at_rest=saver(plane, folder))
    plane.barrier()
    loaded = checkpoint.load_newest(folder)
    then = train(plane, sync_of(plane, 4), samples=2 * SAMPLES, loaded=loaded)
    first.rests = plane.broadcast_object(first.rests)
    if plane.rank:
        first.slices.clear()  # every rank made a first part of its own, and rank 0's was saved
    assert_invariants(plane, [first, then], 2 * SAMPLES, 4)
