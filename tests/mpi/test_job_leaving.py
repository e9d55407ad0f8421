"""Loops of a script that end early, on all ranks or on some: counted exactly, at rest with the same weights.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_job_leaving.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from training import BATCH, SAMPLES, Blobs, Net, local_tensors, unequal_shares

from hetsync.config.parser import recipe_of
from hetsync.data.loader import Loader
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.plane.local import LocalPlane
from hetsync.sync.digests import weights_sha256
from hetsync.train.job import Job
from hetsync.train.loop import Loop

pytestmark = [pytest.mark.mpi, pytest.mark.each_value]
BOUNDS = pytest.mark.parametrize("bound", [0, 4])
EPOCHS = 4


class Trial:
    """A job of a small net; `used` are the samples that this rank has stepped on, by epoch."""

    def __init__(self, plane: Plane, bound: int, batch_norm: bool = False, **sync: Any) -> None:
        recipe = recipe_of({"sync": {"delay_bound": bound, "rebalance": False, **sync}})
        self.job = Job(recipe, plane, keep=False, show="nothing")
        self.model = Net(batch_norm)
        self.optimizer = SGD(self.model.parameters(), 0.05, momentum=0.9)
        loader = DataLoader(Blobs(), batch_size=BATCH, shuffle=True)
        self.loader = self.job.prepare(self.model, self.optimizer, loader)[2]
        self.used: dict[int, list[int]] = {}

    def step(self, batch: Any) -> None:
        points, labels, indices = batch
        self.job.backward(cross_entropy(self.model(points), labels))
        self.job.step(self.optimizer)
        self.used.setdefault(self.job.epoch, []).extend(indices.tolist())

    @property
    def applied(self) -> int:
        return self.job.session.applied

    def close(self) -> None:
        self.job.close()
        plane = self.job.plane
        assert len(set(plane.gather_objects(weights_sha256(local_tensors(self.model))))) == 1
        assert len(set(plane.gather_objects(self.applied))) == 1

    def counts(self) -> Counter[int]:
        """Of all ranks: how often each sample was stepped on."""
        everyones = self.job.plane.gather_objects([index for mine in self.used.values() for index in mine])
        return Counter(index for theirs in everyones for index in theirs)


def is_leaver(plane: Plane, leaver: str) -> bool:
    if plane.size == 1:
        pytest.skip("needs others")
    return plane.rank == (0 if leaver == "first" else plane.size - 1)


def same_as_alone(model: Net, steps: int) -> bool:
    """At D = 0: is this what so many steps of one process make?"""
    alone = Trial(LocalPlane(), 0)
    left = steps
    for _ in alone.job.epochs(EPOCHS):
        for batch in alone.loader:
            if not left:
                break
            alone.step(batch)
            left -= 1
        if not left:
            break
    alone.job.close()
    pairs = zip(local_tensors(model), local_tensors(alone.model), strict=True)
    return all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in pairs)


@BOUNDS
@pytest.mark.parametrize("leaver", ["first", "last"])
def test_one_rank_leaves_each_epochs_loop(plane: Plane, bound: int, leaver: str) -> None:
    """What it does not do the others do; it is back for what follows each loop."""
    leaves, trial, rests = is_leaver(plane, leaver), Trial(plane, bound), []
    for _ in trial.job.epochs(EPOCHS):
        for number, batch in enumerate(trial.loader):
            trial.step(batch)
            if leaves and number == 2:
                break
        trial.job.evaluate(lambda: (1.0, 1))
        rests.append(trial.applied)
    trial.close()
    assert rests == [SAMPLES * (epoch + 1) for epoch in range(EPOCHS)]
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def test_the_others_take_over_its_samples_of_each_batch(plane: Plane) -> None:
    """At D = 0, where shares may move: as many rounds as without it, but for some with holes."""
    leaves, trial = is_leaver(plane, "last"), Trial(plane, 0, rebalance=True)
    for _ in trial.job.epochs(EPOCHS):
        for number, batch in enumerate(trial.loader):
            trial.step(batch)
            if leaves and number == 2:
                break
    trial.close()
    drains, holes = EPOCHS, 4
    assert trial.job.session.version <= EPOCHS * SAMPLES // BATCH + drains + holes
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@BOUNDS
def test_all_leave_at_the_same_batch(plane: Plane, bound: int) -> None:
    """By break: the job is over with what was done."""
    trial, epochs = Trial(plane, bound), []
    for epoch in trial.job.epochs(EPOCHS):
        for number, batch in enumerate(trial.loader):
            trial.step(batch)
            if number == 2:
                break
        trial.job.evaluate(lambda: (1.0, 1))
        epochs.append(epoch)
    trial.close()
    assert epochs == [0]
    assert trial.applied == sum(trial.counts().values()) < SAMPLES
    if bound == 0:
        assert trial.applied == 3 * BATCH
        assert same_as_alone(trial.model, 3)


@BOUNDS
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("after_step", [True, False])
def test_all_leave_before_a_step_or_after_it(plane: Plane, bound: int, accumulation: int, after_step: bool) -> None:
    """Batches that are added up for a step that does not come are not applied."""
    pins = unequal_shares(plane.size)
    trial = Trial(plane, bound, batch_norm=True, accumulation=accumulation, pins=pins)
    for _ in trial.job.epochs(EPOCHS):
        for number, batch in enumerate(trial.loader):
            if number < 4 or after_step:
                trial.step(batch)
            if number == 4:
                break
    trial.close()
    stepped = sum(trial.counts().values())
    assert 0 < trial.applied <= stepped < SAMPLES
    assert trial.applied == stepped or accumulation > 1


@BOUNDS
def test_each_leaves_at_a_time_of_its_own(plane: Plane, bound: int) -> None:
    trial = Trial(plane, bound, batch_norm=True, pins=unequal_shares(plane.size))
    for _ in trial.job.epochs(EPOCHS):
        for number, batch in enumerate(trial.loader):
            trial.step(batch)
            if number == 1 + plane.rank:
                break
    trial.close()
    assert trial.applied == sum(trial.counts().values())


def test_a_rank_that_has_left_loads_nothing_more(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, stop = [], Loader.stop
    monkeypatch.setattr(Loader, "stop", lambda loader: (stopped.append(loader), stop(loader)))
    leaves, trial = is_leaver(plane, "last"), Trial(plane, 4)
    for _ in trial.job.epochs(1):
        for number, batch in enumerate(trial.loader):
            trial.step(batch)
            if leaves and number == 2:
                break
    trial.close()
    assert len(stopped) == leaves
    assert trial.applied == SAMPLES


def test_batches_by_next_as_often_as_the_loader_is_long(plane: Plane) -> None:
    """Nobody asks for one more than there are, and no epoch is taken for one that was left."""
    bound = 0 if plane.size > 1 else 4  # where each rank has as many
    trial = Trial(plane, bound)
    for _ in trial.job.epochs(EPOCHS):
        batches = iter(trial.loader)
        for _ in range(len(trial.loader)):
            trial.step(next(batches))
    trial.close()
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert plane.size == 1 or same_as_alone(trial.model, EPOCHS * SAMPLES // BATCH)


def test_batches_by_zip_as_often_as_the_loader_is_long(plane: Plane) -> None:
    """Nor here, where the loop is closed before another batch is asked for."""
    trial = Trial(plane, 0 if plane.size > 1 else 4)
    for _ in trial.job.epochs(EPOCHS):
        for _, batch in zip(range(len(trial.loader)), trial.loader, strict=False):
            trial.step(batch)
    trial.close()
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert plane.size == 1 or same_as_alone(trial.model, EPOCHS * SAMPLES // BATCH)


WAYS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "zip": lambda loader: (batch for _, batch in zip(range(len(loader)), loader, strict=False)),
    "islice": lambda loader: islice(loader, len(loader)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epochs", [1, EPOCHS])
def test_with_delay_who_has_more_batches_than_the_loader_is_long_is_told(plane: Plane, way: str, epochs: int) -> None:
    """Or the job would go on without it, or end early. In the last epoch there is nothing to go on with."""
    trial = Trial(plane, 4)
    slow = plane.rank == 1

    def train() -> None:
        for _ in trial.job.epochs(epochs):
            for batch in WAYS[way](trial.loader):
                time.sleep(0.02 * slow)
                trial.step(batch)

    if epochs == 1:
        train()
        trial.close()
        assert trial.applied == SAMPLES
        return
    with pytest.raises(UserError, match=r"rank 0 stopped at as many batches as len\(loader\) tells .*delay_bound=0"):
        train()
    assert SAMPLES <= trial.applied < 2 * SAMPLES
    trial.job.session.release()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("epochs", [1, EPOCHS])
def test_where_all_stop_so_the_job_does_not_end_as_if_it_were_done(
    plane: Plane, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where slices before an epoch's end are short, and the loader's length comes before it on all ranks."""
    monkeypatch.setattr(Loop, "_took_all", lambda loop: True)
    trial = Trial(plane, 4)

    def train() -> None:
        for _ in trial.job.epochs(epochs):
            for batch in islice(trial.loader, 2):
                trial.step(batch)

    if epochs == 1:
        train()
        trial.close()
    else:
        with pytest.raises(UserError, match=f"rank {plane.rank} stopped at as many batches"):
            train()
        trial.job.session.release()
    assert trial.applied < SAMPLES


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ends", ["break", "stop"])
def test_a_script_that_ends_after_its_own_number_of_batches_may(plane: Plane, ends: str) -> None:
    """Though one rank comes there with more than an epoch's on one device."""
    trial, taken = Trial(plane, 4), 0
    most = len(trial.loader) + 1
    for _ in trial.job.epochs(EPOCHS):
        for batch in trial.loader:
            time.sleep(0.02 * plane.rank)
            trial.step(batch)
            taken += 1
            if taken == most:
                break
        if ends == "stop":
            trial.job.stop()
        elif taken == most:
            break
    trial.close()
    assert trial.applied == sum(trial.counts().values()) < EPOCHS * SAMPLES


@BOUNDS
def test_fewer_batches_by_next_are_a_loop_that_is_left(plane: Plane, bound: int) -> None:
    trial, epochs = Trial(plane, bound), []
    for epoch in trial.job.epochs(EPOCHS):
        batches = iter(trial.loader)
        for _ in range(3 if epoch == 0 else 0):
            trial.step(next(batches))
        epochs.append(epoch)
    trial.close()
    assert epochs == [0]
    assert trial.applied == sum(trial.counts().values()) < SAMPLES


@BOUNDS
@pytest.mark.parametrize("at_rest", [False, True])
def test_all_leave_the_epochs(plane: Plane, bound: int, at_rest: bool) -> None:
    trial = Trial(plane, bound)
    for epoch in trial.job.epochs(EPOCHS):
        for batch in trial.loader:
            trial.step(batch)
        if at_rest:
            trial.job.evaluate(lambda: (1.0, 1))
        if epoch == 1:
            break
    trial.close()
    assert trial.applied == 2 * SAMPLES
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), 2))
    assert bound or same_as_alone(trial.model, 2 * SAMPLES // BATCH)


@BOUNDS
def test_one_rank_leaves_the_epochs_and_the_others_go_on(plane: Plane, bound: int) -> None:
    leaves, trial = is_leaver(plane, "last"), Trial(plane, bound)
    for epoch in trial.job.epochs(EPOCHS):
        for batch in trial.loader:
            trial.step(batch)
        if leaves and epoch == 1:
            break
    trial.close()
    assert trial.applied == EPOCHS * SAMPLES
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@BOUNDS
@pytest.mark.parametrize("who", ["all", "last"])
def test_a_function_returns_out_of_the_loop(plane: Plane, bound: int, who: str) -> None:
    trial = Trial(plane, bound)
    leaves = who == "all" or is_leaver(plane, who)

    def train() -> None:
        with trial.job:
            for epoch in trial.job.epochs(EPOCHS):
                for number, batch in enumerate(trial.loader):
                    trial.step(batch)
                    if leaves and (epoch, number) == (1, 2):
                        return

    train()
    expected = {"all": SAMPLES + 3 * BATCH, "last": EPOCHS * SAMPLES}[who]
    assert trial.applied == sum(trial.counts().values())
    if bound == 0 or who == "last":
        assert trial.applied == expected
    if bound == 0 and who == "all":
        assert same_as_alone(trial.model, expected // BATCH)


@BOUNDS
@pytest.mark.parametrize("who", ["all", "last"])
def test_a_loop_that_a_variable_holds_is_left(plane: Plane, bound: int, who: str) -> None:
    """It is not closed by break, as one is that nothing holds."""
    trial, held = Trial(plane, bound), list[Iterator[Any]]()
    leaves = who == "all" or is_leaver(plane, who)
    for _ in trial.job.epochs(EPOCHS):
        held.append(iter(trial.loader))
        for number, batch in enumerate(held[-1]):
            trial.step(batch)
            if leaves and number == 2:
                break
    trial.close()
    assert trial.applied == sum(trial.counts().values())
    if bound == 0 or who == "last":
        assert trial.applied == (3 * BATCH if who == "all" else EPOCHS * SAMPLES)


@BOUNDS
def test_a_loop_that_a_variable_holds_at_the_end_of_the_job(plane: Plane, bound: int) -> None:
    trial = Trial(plane, bound)
    with trial.job:
        epochs = trial.job.epochs(EPOCHS)
        next(epochs)
        batches = iter(trial.loader)
        for _ in range(3):
            trial.step(next(batches))
    assert trial.applied == sum(trial.counts().values()) > 0


@BOUNDS
def test_stop_ends_the_job_at_rest(plane: Plane, bound: int) -> None:
    trial, epochs = Trial(plane, bound), []
    for epoch in trial.job.epochs(EPOCHS):
        for batch in trial.loader:
            trial.step(batch)
        epochs.append(epoch)
        if epoch == 1:
            trial.job.stop()
    trial.close()
    assert epochs == [0, 1]
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), 2))
    assert bound or same_as_alone(trial.model, 2 * SAMPLES // BATCH)


# What the engine's review of the first version found.


@BOUNDS
@pytest.mark.parametrize("leaver", ["first", "last"])
def test_a_rank_that_has_left_may_meet_a_checkpoints_rest(plane: Plane, bound: int, leaver: str) -> None:
    leaves, trial, rests = is_leaver(plane, leaver), Trial(plane, bound), []
    for _ in trial.job.epochs(EPOCHS):
        for number, batch in enumerate(trial.loader):
            trial.step(batch)
            if leaves and number == 0:
                break
            if number == 1:
                trial.job.session.request_rest("checkpoint")
        trial.job.evaluate(lambda: (1.0, 1))
        rests.append(trial.applied)
    trial.close()
    assert rests == [SAMPLES * (epoch + 1) for epoch in range(EPOCHS)]
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@BOUNDS
@pytest.mark.parametrize("leaver", ["first", "last"])
def test_a_scheduler_steps_after_a_loop_that_one_rank_has_left(plane: Plane, bound: int, leaver: str) -> None:
    leaves, trial = is_leaver(plane, leaver), Trial(plane, bound)
    scheduler = trial.job.prepare(StepLR(trial.optimizer, 1, 0.5))
    for _ in trial.job.epochs(EPOCHS):
        for batch in trial.loader:
            trial.step(batch)
            if leaves:
                break
        scheduler.step()
    trial.close()
    assert trial.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**EPOCHS)
    assert scheduler.last_epoch == EPOCHS


def test_a_batch_left_after_its_sum_counts(plane: Plane) -> None:
    """At D = 0 the others have stepped on it: between clipping and the step of the rank that leaves."""
    leaves, trial = is_leaver(plane, "last"), Trial(plane, 0)
    for _ in trial.job.epochs(1):
        for number, batch in enumerate(trial.loader):
            if leaves and number == 2:
                points, labels, indices = batch
                trial.job.backward(cross_entropy(trial.model(points), labels))
                trial.job.clip_grad_norm_(trial.model.parameters(), 1.0)
                trial.used[0].extend(indices.tolist())
                break
            trial.step(batch)
    trial.close()
    assert trial.applied == SAMPLES
    assert trial.counts() == Counter(dict.fromkeys(range(SAMPLES), 1))


def test_a_loop_left_between_two_optimizers(plane: Plane) -> None:
    leaves = is_leaver(plane, "first")
    job = Job(recipe_of({"sync": {"delay_bound": 0, "rebalance": False}}), plane, keep=False, show="nothing")
    model = Net()
    first, second = (SGD([*layer.parameters()], 0.05) for layer in (model.body[0], model.body[-1]))
    loader = job.prepare(model, first, second, DataLoader(Blobs(), batch_size=BATCH, shuffle=True))[3]
    for _ in job.epochs(2):
        for number, (points, labels, _) in enumerate(loader):
            job.backward(cross_entropy(model(points), labels))
            job.step(first)
            if leaves and number == SAMPLES // BATCH - 1:  # no later round tells it from the others
                break
            job.clip_grad_norm_(second.param_groups[0]["params"], 0.1)
            job.step(second)
    job.close()
    assert job.session.applied == 2 * SAMPLES
    assert len(set(plane.gather_objects(weights_sha256(local_tensors(model))))) == 1


def test_a_rank_may_have_no_step_of_its_own_in_an_epoch(plane: Plane) -> None:
    """It adds gradients up for longer."""
    is_leaver(plane, "last")
    trial = Trial(plane, 4)
    for epoch in trial.job.epochs(2):
        for batch in trial.loader:
            if plane.rank == 0 or epoch == 1:
                trial.step(batch)
            else:
                points, labels, _ = batch
                trial.job.backward(cross_entropy(trial.model(points), labels))
    trial.close()
    assert trial.applied == 2 * SAMPLES
