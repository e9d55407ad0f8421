"""What a script has called at rests within its loop, where a job begins in mid-order, and what the loop steps there.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_calls.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from training import BATCH, NET_SEED, SAMPLES, Blobs, Net

import hetsync
from hetsync.data.loader import EpochOrder
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.sync.digests import weights_sha256
from hetsync.train.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.each_value, pytest.mark.ranks(1, 2, 4)]
BOUNDS = pytest.mark.parametrize("bound", [0, 4])


class Script:
    def __init__(self, plane: Plane, bound: int, **settings: Any) -> None:
        self.job: Job = hetsync.join(plane=plane, delay_bound=bound, progress=False, **settings)
        self.model, self.called, self.used = Net(), [], []
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.job.prepare(self.model, self.optimizer)
        self.loader = self.job.loader(Blobs(), BATCH, epochs=2)

    def at_rest(self) -> None:
        """Ranks hold the same, and evaluate together."""
        digests = self.job.gather(weights_sha256(self.model.parameters()))
        assert len(set(digests)) == 1
        found = self.job.evaluate(lambda: {"samples": (1.0, 1)})
        assert found == {"samples": 1.0}
        self.called.append(self.job.samples)

    def train(self, each: Callable[[], None] = lambda: None) -> None:
        with self.job:
            for points, labels, numbers in self.loader:
                self.used += numbers.tolist()
                self.job.backward(nn.functional.cross_entropy(self.model(points), labels))
                self.job.step()
                each()

    def all_used(self, plane: Plane) -> Counter[int]:
        return Counter(number for each in plane.gather_objects(self.used) for number in each)


@BOUNDS
def test_a_function_is_called_with_all_at_rest(plane: Plane, bound: int) -> None:
    script = Script(plane, bound)
    script.job.call_every(100, script.at_rest)
    script.train()
    assert script.called == [120, 216, 312], "at the ends of batches"
    assert script.all_used(plane) == Counter(dict.fromkeys(range(SAMPLES), 2))


@BOUNDS
def test_at_an_epochs_end_the_scripts_own_lines_come_instead(plane: Plane, bound: int) -> None:
    job = hetsync.join(plane=plane, delay_bound=bound, progress=False)
    model, called, ends = Net(), [], []
    job.prepare(model, optimizer := torch.optim.SGD(model.parameters(), 0.05))
    loader = job.loader(Blobs(), BATCH)
    job.call_every(SAMPLES // 2, lambda: called.append(job.samples))
    with job:
        for _ in job.epochs(2):
            for points, labels, _ in loader:
                job.backward(nn.functional.cross_entropy(model(points), labels))
                job.step(optimizer)
            ends.append(job.samples)
    assert called == [SAMPLES // 2, 3 * SAMPLES // 2]
    assert ends == [SAMPLES, 2 * SAMPLES]


@pytest.mark.ranks(2, 4)
@BOUNDS
def test_a_rank_that_has_left_takes_part_in_calls(plane: Plane, bound: int) -> None:
    script = Script(plane, bound)
    script.job.call_every(100, script.at_rest)
    with script.job:
        for points, labels, numbers in script.loader:
            script.used += numbers.tolist()
            script.job.backward(nn.functional.cross_entropy(script.model(points), labels))
            script.job.step()
            if plane.rank == plane.size - 1:
                break
    assert script.called == [120, 216, 312]
    assert script.all_used(plane) == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.ranks(2, 4)  # a lone rank may be at its end before it is heard
@BOUNDS
def test_a_call_that_is_asked_for_comes_once(plane: Plane, bound: int) -> None:
    script, asked = Script(plane, bound), []

    def ask() -> None:
        if not asked and script.job.samples >= 2 * BATCH:
            asked.append(script.job.samples)
            script.job.call_soon()

    script.job.call_every(None, script.at_rest)
    script.train(ask)
    assert plane.gather_objects(script.called) == [script.called] * plane.size
    assert len(script.called) == 1 if bound == 0 else 1 <= len(script.called) <= plane.size
    assert 2 * BATCH < script.called[0] <= 2 * SAMPLES
    assert script.all_used(plane) == Counter(dict.fromkeys(range(SAMPLES), 2))


@BOUNDS
def test_a_call_may_end_training(plane: Plane, bound: int) -> None:
    script = Script(plane, bound)
    script.job.call_every(100, lambda: (script.at_rest(), script.job.stop()))  # type: ignore[arg-type]
    script.train()
    assert script.called == [120]
    assert script.all_used(plane) == Counter(EpochOrder(SAMPLES, NET_SEED).indices([(0, 120)]))


@BOUNDS
def test_a_job_begins_in_mid_order(plane: Plane, bound: int) -> None:
    script = Script(plane, bound)
    script.job.begin_at(SAMPLES + 48)
    assert script.job.samples == SAMPLES + 48
    script.train()
    assert script.all_used(plane) == Counter(EpochOrder(SAMPLES, NET_SEED).indices([(SAMPLES + 48, 2 * SAMPLES)]))


@pytest.mark.parametrize("called_every", [1, 3])
def test_schedulers_step_as_often_as_they_are_told(plane: Plane, called_every: int) -> None:
    """However often the loop calls them: three times a batch here."""
    script = Script(plane, 0)
    scheduler = script.job.prepare(ExponentialLR(script.optimizer, 0.9))
    script.job.step_schedulers_every(BATCH // 3)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count % called_every == 0:
            scheduler.step()

    script.train(step)
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9 ** (2 * SAMPLES * 3 // BATCH))


def test_plain_steps_follow_the_scale_of_losses(plane: Plane) -> None:
    """`optimizer.step()` beside a scaler: gradients are unscaled, and where they are infinite nothing is stepped."""
    outcomes = []
    for by_job in (True, False):
        script, scales = Script(plane, 0, precision="float16"), []
        with script.job:
            for points, labels, _ in script.loader:
                loss = nn.functional.cross_entropy(script.model(points), labels)
                is_spoiled, before = script.job.step_count == 3, weights_sha256(script.model.parameters())
                script.job.backward(loss * (float("inf") if is_spoiled else 1.0))
                if by_job:
                    script.job.step(script.optimizer)
                else:
                    script.optimizer.step()
                    script.optimizer.zero_grad()
                if is_spoiled:
                    assert weights_sha256(script.model.parameters()) == before
                scales.append(script.job._prepared.parts.scaler.get_scale())  # type: ignore[union-attr]
        outcomes.append((script.model, scales))
    (one, scales), (other, same) = outcomes
    assert scales[-1] == same[-1] < 65536.0
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda job: job.call_every(0, print), "job.call_every got 0 samples"),
        (lambda job: job.call_every(1, 3), "job.call_every"),
        (lambda job: job.begin_at(-1), "job.begin_at got -1 samples"),
        (lambda job: job.step_schedulers_every(0.5), "job.step_schedulers_every got 0.5 samples"),
    ],
)
def test_what_cannot_be_is_one_sentence(plane: Plane, call: Callable[[Job], Any], sentence: str) -> None:
    script = Script(plane, 0)
    with pytest.raises(UserError, match=sentence):
        call(script.job)
