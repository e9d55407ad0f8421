"""A rank alone does without what ranks share, and ends where it would with it."""

from __future__ import annotations

import math

import pytest
import torch
from elsewhere import OnMps, on
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.sync.fragments import FragmentedDeltas
from hetsync.sync.lone import CHECKED_TASKS, FiniteCheck, LoneDeltas, LoneGradients, total_of
from hetsync.sync.messages import StartRound


def tensors():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)]
    return weights, [torch.zeros(2)]


def compute(deltas, weights, buffers, slices, number, samples=None):
    """A task: each slice moves weights and buffers."""
    deltas.open_task(slices, 8 * slices if samples is None else samples, 8)
    for step in range(slices):
        for tensor in [*weights, *buffers]:
            tensor += 0.25 * (number + 1) - step


def land(deltas):
    """The round of all that is finished."""
    (addend,) = deltas.pack(StartRound(0, frozenset({0}), 0), True, 8, "float32")
    assert torch.isfinite(addend).all()
    while deltas.tail.flat.numel() and deltas.tail.unpack():
        pass
    deltas.apply_sum()
    assert deltas.apply()


@settings(deadline=None)
@given(tasks=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), min_size=1, max_size=5), dropped=st.booleans())
def test_weights_and_anchor_are_those_of_the_general_way(tasks, dropped):
    """Whole and small slices of 8 samples, several a task."""
    found = []
    for kind in (FragmentedDeltas, LoneDeltas):
        weights, buffers = tensors()
        deltas = kind(weights, buffers=buffers)
        for number, (slices, lacking) in enumerate(tasks):
            samples = 8 * slices - lacking
            compute(deltas, weights, buffers, slices, number, samples)
            if dropped and number == len(tasks) - 1 and slices > 1:
                deltas.drop_task()  # the loop is left in the middle of a task of several slices
                continue
            assert math.isfinite(deltas.finish(samples, slices))
            land(deltas)
        deltas.reset_to_anchor()
        found.append(([tensor.clone() for tensor in [*weights, *buffers]], deltas.anchor))
    (general, anchor), (alone, lone_anchor) = found
    for one, other in zip(general, alone, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(anchor, lone_anchor)


def test_a_task_that_is_left_is_taken_back_at_once():
    """Before the drain there may be an evaluation, of the weights as they are."""
    weights, buffers = tensors()
    before = [tensor.clone() for tensor in [*weights, *buffers]]
    deltas = LoneDeltas(weights, buffers)
    compute(deltas, weights, buffers, 2, 1)
    deltas.drop_task()
    for now, then in zip([*weights, *buffers], before, strict=True):
        torch.testing.assert_close(now, then)


def test_its_snapshot_is_the_model_itself():
    weights, buffers = tensors()
    assert LoneDeltas(weights, buffers).snapshot(3).weights is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_found_soon(bad):
    weights, buffers = tensors()
    deltas = LoneDeltas(weights, buffers)
    for _ in range(CHECKED_TASKS + 3):
        assert math.isfinite(deltas.finish(8, 1))
    weights[1][2] = bad
    assert not all(math.isfinite(deltas.finish(8, 1)) for _ in range(CHECKED_TASKS))


def test_the_first_tasks_are_all_checked_and_then_one_in_so_many():
    check = FiniteCheck()
    due = [check.due() for _ in range(5 * CHECKED_TASKS)]
    assert all(due[:CHECKED_TASKS])
    assert sum(due[CHECKED_TASKS:]) == 4


def test_gradients_that_are_not_finite_are_found_soon():
    model = torch.nn.Linear(3, 2)
    gradients = LoneGradients(model, lambda: None)

    def step(factor):
        gradients.open_task()
        gradients.open_slice(4, last=True)
        model.zero_grad()
        (model(torch.ones(4, 3)).sum() * factor).backward()
        gradients.close_slice()
        total = gradients.flush(4)
        gradients.collect()
        return total

    assert all(math.isfinite(step(1.0)) for _ in range(CHECKED_TASKS + 3))
    assert not all(math.isfinite(step(math.nan)) for _ in range(CHECKED_TASKS))


def test_nothing_listens_to_gradients_for_long():
    """A hook a weight costs 2 % of a step of some milliseconds."""
    model = torch.nn.Linear(3, 2)
    gradients = LoneGradients(model, lambda: None)
    assert not model.weight._post_accumulate_grad_hooks
    gradients.open_task()
    assert model.weight._post_accumulate_grad_hooks
    gradients.close()  # delayed mode
    assert not model.weight._post_accumulate_grad_hooks


def test_a_device_without_double_precision_is_checked_as_well():
    assert total_of([on(OnMps, torch.ones(3)), torch.ones(2)]) == 5
    assert not math.isfinite(total_of([on(OnMps, torch.tensor([1.0, math.inf]))]))
