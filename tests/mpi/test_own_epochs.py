"""Loops over epochs that a script counts by itself: each loop over batches is one, and ends with all ranks at rest.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_own_epochs.py
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_job import EPOCHS, PlainJob, assert_alike
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader
from training import BATCH, SAMPLES, SEED, Blobs, Net, local_tensors, unequal_shares

import hetsync
from hetsync.config.parser import recipe_of
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.train.job import Job
from hetsync.train.run_folder import Resume

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Script:
    """As it is for one device; `used` are the samples of each loop over batches, by their index."""

    def __init__(self, job: Any) -> None:
        self.job = job
        torch.manual_seed(SEED)
        self.model = Net()
        self.optimizer = SGD(self.model.parameters(), 0.05, momentum=0.9)
        in_loop, after = ExponentialLR(self.optimizer, 0.99), ExponentialLR(self.optimizer, 0.8)
        loader = DataLoader(Blobs(), BATCH, shuffle=True)
        prepared = job.prepare(self.model, self.optimizer, in_loop, after, loader)
        self.in_loop, self.after, self.loader = prepared[2:]
        self.used: list[list[int]] = []
        self.metrics: list[float] = []

    def step(self, points: torch.Tensor, labels: torch.Tensor, indices: torch.Tensor) -> None:
        self.used[-1] += indices.tolist()
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(points), labels)
        self.job.backward(loss)
        self.optimizer.step()
        self.in_loop.step()

    def epoch(self, batches: Iterator[Any] | None = None) -> None:
        self.used.append([])
        for batch in self.loader if batches is None else batches:
            self.step(*batch)
        self.after.step()

    def evaluate(self) -> None:
        points, labels = Blobs().points, Blobs().labels
        with torch.no_grad():
            self.metrics.append(cross_entropy(self.model(points), labels).item())


def by_range(script: Script) -> None:
    for epoch in range(EPOCHS):
        script.job.epoch = epoch  # of the plain job
        script.epoch()
        script.evaluate()


def after_a_look(script: Script) -> None:
    points, *_ = next(iter(script.loader))
    assert points.shape[1:] == Blobs().points.shape[1:]
    by_range(script)


def after_a_look_that_is_held(script: Script) -> None:
    batches = iter(script.loader)
    next(batches)
    by_range(script)
    assert batches is not None


def after_two_looks(script: Script) -> None:
    for _ in script.loader:
        break
    after_a_look(script)


def by_next(script: Script) -> None:
    """With an iterator that is begun anew where it ends, and all of whose epochs one loop counts."""
    script.job.epoch, batches = 0, iter(script.loader)
    script.used.append([])
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            script.after.step()
            script.evaluate()
            script.job.epoch += 1
            if script.job.epoch == EPOCHS:
                return
            batches = iter(script.loader)
            script.used.append([])
            continue
        script.step(*batch)


def by_length(script: Script) -> None:
    for epoch in range(EPOCHS):
        script.job.epoch, batches = epoch, iter(script.loader)
        script.epoch(next(batches) for _ in range(len(script.loader)))
        script.evaluate()


def looking_between(script: Script) -> None:
    """At a batch after each epoch, and before its scheduler's step; also after the last."""
    for epoch in range(EPOCHS):
        script.job.epoch = epoch
        script.used.append([])
        for batch in script.loader:
            script.step(*batch)
        script.evaluate()
        with torch.no_grad():
            script.model(next(iter(script.loader))[0])
        script.after.step()


def by_job_after_a_look(script: Script) -> None:
    batches = iter(script.loader)
    next(batches)
    for _ in script.job.epochs(EPOCHS):
        script.epoch()
        script.evaluate()


LOOPS = [
    by_range,
    after_a_look,
    after_a_look_that_is_held,
    after_two_looks,
    by_next,
    looking_between,
    by_job_after_a_look,
]


def joined(plane: Plane, bound: int, **settings: Any) -> Job:
    pins = unequal_shares(plane.size)
    told = {"progress": False, "seed": SEED, "delay_bound": bound, "rebalance": False, "pins": pins} | settings
    return hetsync.join(plane=plane, timeout_seconds=30.0, **told)


def assert_each_used_once_a_loop(plane: Plane, used: list[list[int]], loops: int = EPOCHS) -> None:
    """Collective."""
    of_all = plane.gather_objects(used)
    assert {len(theirs) for theirs in of_all} == {loops}
    for loop in zip(*of_all, strict=True):
        assert Counter(itertools.chain(*loop)) == Counter(range(SAMPLES))


@pytest.mark.parametrize("loops", [*LOOPS, by_length], ids=lambda each: each.__name__)
def test_they_are_those_of_one_process_at_bound_0(plane: Plane, loops: Callable[[Script], None]) -> None:
    with joined(plane, 0) as job:
        mine = Script(job)
        loops(mine)
        assert_each_used_once_a_loop(plane, mine.used)
    plain = Script(PlainJob())
    loops(plain)
    for own, other in zip(local_tensors(mine.model), local_tensors(plain.model), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert mine.metrics == pytest.approx(plain.metrics, rel=1e-5)
    assert mine.optimizer.param_groups[0]["lr"] == pytest.approx(plain.optimizer.param_groups[0]["lr"])
    assert job.samples == EPOCHS * SAMPLES


@pytest.mark.parametrize("loops", LOOPS, ids=lambda each: each.__name__)
def test_with_delay_each_sample_counts_once_a_loop(plane: Plane, loops: Callable[[Script], None]) -> None:
    with joined(plane, 4) as job:
        script = Script(job)
        loops(script)
        assert_each_used_once_a_loop(plane, script.used)
        assert_alike(plane, script.model)
    assert job.samples == EPOCHS * SAMPLES
    assert script.metrics[-1] < 0.8 * script.metrics[0]


@BOUNDS
def test_evaluations_and_averages_of_ranks_come_between(plane: Plane, bound: int) -> None:
    with joined(plane, bound) as job:
        script = Script(job)
        test_loader = job.test_loader(DataLoader(Blobs(), BATCH))

        def accuracy() -> tuple[torch.Tensor, int]:
            found = torch.cat([script.model(points).argmax(1) == labels for points, labels, _ in test_loader])
            return found.sum(), len(found)

        before = job.evaluate(accuracy)
        for _ in range(2):
            script.epoch()
            found = job.gather(job.evaluate(accuracy))
            assert len(set(found)) == 1
        assert found[0] > before


@BOUNDS
@pytest.mark.parametrize("every", [None, 100, SAMPLES])
def test_evaluations_beside_come_at_the_end_too(plane: Plane, bound: int, every: int | None) -> None:
    """Which nobody knows before the script ends."""
    found: list[float] = []
    with joined(plane, bound) as job:
        script = Script(job)
        test_loader = job.test_loader(DataLoader(Blobs(), BATCH))

        def score() -> dict[str, tuple[torch.Tensor, int]]:
            hits = torch.cat([script.model(points).argmax(1) == labels for points, labels, _ in test_loader])
            return {"accuracy": (hits.sum(), len(hits))}

        job.evaluate_every(every, score)
        job.on("evaluation", lambda metrics: found.append(metrics["accuracy"]))
        script.epoch()
        script.epoch()
    if plane.rank == 0:
        with torch.no_grad():
            right = (script.model(Blobs().points).argmax(1) == Blobs().labels).float().mean().item()
        assert found[-1] == pytest.approx(right)
        assert len(found) == {None: 1, 100: 4, SAMPLES: 2}[every]


@BOUNDS
def test_who_breaks_is_out_and_the_others_go_on(plane: Plane, bound: int) -> None:
    with joined(plane, bound) as job:
        script = Script(job)
        script.epoch()
        if plane.rank == plane.size - 1 and plane.size > 1:
            script.epoch(itertools.islice(script.loader, 1))
            for _ in range(2):
                script.epoch()
                assert not script.used[-1]
        else:
            for _ in range(3):
                script.epoch()
    assert job.samples == 4 * SAMPLES
    assert_each_used_once_a_loop(plane, script.used, 4)


@BOUNDS
def test_where_all_break_training_is_over(plane: Plane, bound: int) -> None:
    with joined(plane, bound) as job:
        script = Script(job)
        script.epoch()
        script.epoch(itertools.islice(script.loader, 1))
    assert SAMPLES < job.samples < 2 * SAMPLES


@BOUNDS
def test_where_all_have_stopped_there_are_no_batches(plane: Plane, bound: int) -> None:
    with joined(plane, bound) as job:
        script = Script(job)
        script.epoch()
        job.stop()
        assert not list(script.loader)
    assert job.samples == SAMPLES


@BOUNDS
def test_the_summary_knows_their_number_once_they_are_over(plane: Plane, tmp_path: Path, bound: int) -> None:
    told = plane.broadcast_object(str(tmp_path / "run"))
    with joined(plane, bound, run=told) as job:
        script = Script(job)
        ends: list[dict[str, Any]] = []
        job.on("end", ends.append)
        script.epoch()
        script.epoch()
    if plane.rank == 0:
        assert ends[0]["status"] == "finished"
        assert ends[0]["samples_applied"] == ends[0]["samples_expected"] == 2 * SAMPLES
    plane.barrier()
    with joined(plane, bound, run=told, resume=True) as job:  # by the job's own count
        script = Script(job)
        epochs = list(epoch for epoch in job.epochs(3) if script.epoch() is None)
    assert epochs == [2]
    assert job.samples == 3 * SAMPLES


def accuracy_on_training_data(script: Script) -> None:
    script.epoch()
    with torch.no_grad():
        for points, labels, _ in script.loader:
            cross_entropy(script.model(points), labels)
    script.epoch()


def evaluation_after_a_look(script: Script) -> None:
    next(iter(script.loader))
    script.job.evaluate(lambda: (1, 1))


def few_batches_in_each(script: Script) -> None:
    for _ in range(2):
        script.epoch(itertools.islice(script.loader, 1))


def few_batches_and_nothing_between(script: Script) -> None:
    for _ in range(2):
        script.used.append([])
        for batch in script.loader:
            script.step(*batch)
            break


def warm_up_by_range(script: Script) -> None:
    script.epoch()
    for _ in script.job.epochs(2):
        script.epoch()


def epochs_in_a_batch(script: Script) -> None:
    batches = iter(script.loader)
    script.used.append([])
    script.step(*next(batches))
    next(script.job.epochs(2))


def two_at_once(script: Script) -> None:
    script.epoch(first for first, _ in zip(script.loader, script.loader, strict=True))


MISTAKES = {
    accuracy_on_training_data: f"no optimizer has made a step on {SAMPLES} samples of a loop over the job's batches",
    evaluation_after_a_look: "call it before the first look at a batch",
    few_batches_in_each: "all ranks have left a loop over the job's batches by break",
    few_batches_and_nothing_between: "all ranks have left a loop over the job's batches by break",
    warm_up_by_range: "job.epochs was called after a loop over the job's batches",
    epochs_in_a_batch: "job.epochs was called within a loop over the job's batches",
    two_at_once: "two loops over the job's batches at once",
}


@BOUNDS
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_what_they_may_not_be(plane: Plane, bound: int, mistake: Callable[[Script], None]) -> None:
    job = Job(recipe_of({"sync": {"delay_bound": bound}}), plane, keep=False, show="nothing")
    with pytest.raises(UserError, match=MISTAKES[mistake].replace("(", r"\(")):
        mistake(Script(job))
    job.session.release()


@pytest.mark.parametrize("resume", [True, "auto"])
def test_to_resume_the_job_counts(plane: Plane, tmp_path: Path, resume: Resume) -> None:
    told = plane.broadcast_object(str(tmp_path / "run"))
    if resume is True:
        with joined(plane, 0, run=told) as job:
            Script(job).epoch()
    job = Job(recipe_of({"run": {"dir": told}}), plane, resume=resume, show="nothing")
    with pytest.raises(UserError, match="in which epoch a run stands is not known"):
        Script(job).epoch()
