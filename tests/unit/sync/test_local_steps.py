"""How far ranks step on slices of their own, and what that does to the anchor. Imports no MPI."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync.sync.deltas import Deltas
from hetsync.sync.messages import Task
from hetsync.sync.rates import ScheduleRates
from hetsync.sync.steps import LocalSteps, Steps

BATCHES = st.integers(1, 512)
RANKS = st.integers(1, 64)


def task_of(share: int, slices: int = 1, synchronous: bool = False) -> Task:
    spans = tuple(((0, share),) for _ in range(slices))
    return Task(0, spans, 4, 0, 0, share=share, synchronous_round=0 if synchronous else None)


@given(BATCHES, RANKS, st.data())
def test_what_a_sample_does_to_the_anchor_is_that_of_the_batch(batch: int, ranks: int, data: st.DataObject) -> None:
    task = task_of(data.draw(st.integers(1, batch)))
    for adaptive in (False, True):
        local = LocalSteps(batch, ranks, adaptive)
        for kind, total in ((False, 1.0), (True, math.sqrt(batch / task.share))):
            assert local.rate(task, kind) * local.lift(task) == pytest.approx(total)
        assert local.lift(task) >= 1
        assert local.rate(task, adaptive) <= 1


@given(BATCHES, RANKS)
def test_equal_ranks_and_one_alone_take_whole_steps(share: int, ranks: int) -> None:
    equal = LocalSteps(share * ranks, ranks, adaptive=False)
    assert equal.rate(task_of(share), False) == pytest.approx(1)
    for adaptive in (False, True):
        alone = LocalSteps(share, 1, adaptive)
        assert alone.rate(task_of(share), adaptive) == alone.lift(task_of(share)) == 1


@given(BATCHES, RANKS, st.booleans(), st.data())
def test_synchronous_steps_are_the_optimizers_own(batch: int, ranks: int, adaptive: bool, data: st.DataObject) -> None:
    task = task_of(data.draw(st.integers(1, batch)), synchronous=True)
    local = LocalSteps(batch, ranks, adaptive)
    assert local.rate(task, adaptive) == local.lift(task) == local.noise(task) == 1


def test_one_optimizer_that_is_not_adaptive_rules_the_merging() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    adam, plain = torch.optim.AdamW(weights), torch.optim.SGD(weights, lr=0.1)
    both, one = (LocalSteps.of(optimizers, 32, 4) for optimizers in ([adam, plain], [adam]))
    assert (both.lift(task_of(8)), both.rate(task_of(8), True)) == (1, 2)
    assert (one.lift(task_of(8)), one.rate(task_of(8), True)) == (2, 1)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=8),  # slices, and: merged after it?
    st.integers(1, 16),
)
def test_each_sample_moves_the_anchor_once_however_tasks_merge(tasks: list[tuple[int, bool]], share: int) -> None:
    """Plain SGD along a constant gradient of 1: the anchor moves by the rate for each B samples."""
    batch, ranks, rate = 64, 8, 0.5
    weight, average = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32)), torch.zeros(2)
    optimizer = torch.optim.SGD([weight], lr=rate)
    local = LocalSteps.of([optimizer], batch, ranks)
    steps = Steps(optimizer, ScheduleRates(optimizer), local)
    deltas = Deltas([weight], buffers=[average])
    deltas.tail.travel = [0]
    for slices, merged in [*tasks, (1, True)]:
        task = task_of(share, slices)
        steps.begin_task(task)
        for _ in range(slices):
            weight.grad = torch.ones_like(weight)
            steps.step()
            average += 1
        deltas.finish(task.samples, slices, local.lift(task))
        if merged:
            deltas.pack(True, batch, "float32")
            deltas.apply_sum()
            deltas.apply()
    made = share * sum(slices for slices, _ in [*tasks, (1, True)])
    anchor = deltas.anchor
    torch.testing.assert_close(anchor[:3], torch.full((3,), -rate * made / batch), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(anchor[3:], torch.full((2,), made / batch), rtol=1e-4, atol=1e-6)  # not lifted
