"""Loops that are left early: the job comes to rest with what was applied, and every sample is booked once.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_leaving.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy
from training import BATCH, SAMPLES, Blobs, Net, local_tensors, unequal_shares

import hetsync
from hetsync.data.loader import Loader
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256
from hetsync.train.session import Session

pytestmark = pytest.mark.mpi
BOUNDS = pytest.mark.parametrize("bound", [0, 1, 4])
EPOCHS = 4


def train(
    plane: Plane, bound: int, leave: Callable[[int], bool], accumulation: int = 1, after_step: bool = True
) -> tuple[Session, Net, list[int]]:
    """Leaves its loop in the slice of that number; the samples that this rank has stepped on."""
    model, used = Net(batch_norm=True), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with hetsync.join(
        model,
        optimizer,
        Blobs(),
        batch_size=BATCH,
        epochs=EPOCHS,
        plane=plane,
        delay_bound=bound,
        accumulation=accumulation,
        rebalance=False,
        pins=unequal_shares(plane.size),
    ) as session:
        for number, (points, labels, indices) in enumerate(session.slices()):
            if leave(number) and not after_step:
                break
            loss = cross_entropy(model(points), labels)
            loss.backward()
            session.step(loss)
            used += indices.tolist()
            if leave(number):
                break
    return session, model, used


def assert_at_rest(plane: Plane, session: Session, model: Net) -> None:
    assert len(set(plane.gather_objects(weights_sha256(local_tensors(model))))) == 1
    assert len(set(plane.gather_objects(session.applied))) == 1
    assert all(torch.isfinite(tensor).all() for tensor in local_tensors(model))


@BOUNDS
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("after_step", [True, False])
def test_all_leave(plane: Plane, bound: int, accumulation: int, after_step: bool) -> None:
    session, model, used = train(plane, bound, lambda number: number >= 7, accumulation, after_step)
    assert_at_rest(plane, session, model)
    stepped = sum(map(len, plane.gather_objects(used)))
    assert 0 < session.applied <= stepped < EPOCHS * SAMPLES
    if accumulation == 1:
        assert session.applied == stepped


@BOUNDS
@pytest.mark.parametrize("leaver", ["first", "last"])
def test_one_leaves_and_the_others_do_its_work(plane: Plane, bound: int, leaver: str) -> None:
    if plane.size == 1:
        pytest.skip("needs others")
    leaves = plane.rank == (0 if leaver == "first" else plane.size - 1)
    session, model, used = train(plane, bound, lambda number: leaves and number == 3)
    assert_at_rest(plane, session, model)
    assert session.applied == EPOCHS * SAMPLES
    everyones = Counter(index for theirs in plane.gather_objects(used) for index in theirs)
    assert everyones == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@BOUNDS
def test_each_leaves_at_a_time_of_its_own(plane: Plane, bound: int) -> None:
    session, model, used = train(plane, bound, lambda number: number == 2 + 3 * plane.rank)
    assert_at_rest(plane, session, model)
    assert session.applied == sum(map(len, plane.gather_objects(used)))


def test_a_synchronous_job_that_all_leave_is_the_first_steps_of_the_whole(plane: Plane) -> None:
    _, left, _ = train(plane, 0, lambda number: number == 4)
    whole = Net(batch_norm=True)
    optimizer = torch.optim.SGD(whole.parameters(), 0.05, momentum=0.9)
    pins = unequal_shares(plane.size)
    with hetsync.join(
        whole, optimizer, Blobs(), batch_size=BATCH, epochs=5 * BATCH / SAMPLES, plane=plane, delay_bound=0, pins=pins
    ) as session:
        for points, labels, _ in session.slices():
            loss = cross_entropy(whole(points), labels)
            loss.backward()
            session.step(loss)
    for mine, theirs in zip(local_tensors(left), local_tensors(whole), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(local_tensors(whole)[0], local_tensors(Net(batch_norm=True))[0])


def test_a_rank_that_has_left_loads_nothing_more(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, stop = [], Loader.stop
    monkeypatch.setattr(Loader, "stop", lambda loader: (stopped.append(loader), stop(loader)))
    leaves = plane.rank == plane.size - 1
    session, *_ = train(plane, 4, lambda number: leaves and number == 3)
    assert len(stopped) == leaves
    assert session.applied == EPOCHS * SAMPLES or plane.size == 1
