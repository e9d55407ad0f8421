"""Slices count by the units that their losses are means over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.errors import UserError
from hetsync.sync.deltas import Deltas
from hetsync.sync.gradients import COUNTS, Gradients
from hetsync.sync.units import AverageUnits, TaskUnits

BATCH, RATE = 8, 0.125
SLICES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(-3, 3)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), SLICES, st.booleans()), min_size=1, max_size=12))
def test_each_unit_moves_the_anchor_once(tasks):
    """Delayed mode, SGD: with ρ units a sample on average, the anchor goes by rate · w · g / (ρ · B) for each slice
    of w units and mean gradient g, whatever is merged with what, and in however many steps. (Slices of a task are of
    one size, as a rank's are.)"""
    average = 2.5
    weights = [torch.zeros(1) for _ in range(3)]
    deltas = [Deltas([weight]) for weight in weights]
    expected = 0.0

    def merge(contributors):
        addends = [each.pack(rank in contributors, BATCH, "float32") for rank, each in enumerate(deltas)]
        total = sum(addend.clone() for addend in addends)
        for addend, each in zip(addends, deltas, strict=True):
            addend.copy_(total)
            each.apply_sum()
            each.apply()

    for rank, slices, merges in tasks:
        samples = slices[0][0]
        merge_before = deltas[rank].holds_progress  # or tasks of other sizes would be merged
        if merge_before:
            merge({rank})
        for _, units, gradient in slices:
            weights[rank] -= RATE * gradient * units / (average * samples)
            expected -= RATE * gradient * units / (average * BATCH)
        deltas[rank].finish(samples * len(slices), len(slices))
        if merges:
            merge({rank, (rank + 1) % 3})
    merge({0, 1, 2})
    for each in deltas:
        assert float(each.anchor) == pytest.approx(expected, abs=1e-5)


def test_the_average_is_that_of_about_the_last_fifty_batches():
    average = AverageUnits()
    assert average.per_sample == ()
    average.add([(6.0, 3)], BATCH)
    assert average.per_sample == (2.0,)
    for _ in range(400):
        average.add([(40.0, BATCH), (8.0, BATCH)], BATCH)
    assert average.per_sample == pytest.approx((5.0, 1.0), rel=1e-2)


def test_a_call_that_has_never_been_made_has_no_average():
    average = AverageUnits()
    average.add([(0.0, 0), (4.0, 2)], BATCH)
    assert average.per_sample == (0.0, 2.0)


def units_of_slices(*slices):
    units = TaskUnits()
    for weight, loss in slices:
        units.open_slice(4)
        units.tell(weight, loss)
        units.arrived(0)
        units.take(0)
    return units


def test_a_loss_that_is_no_number_is_a_mean_over_nothing():
    units = units_of_slices((3.0, torch.tensor(1.0)), (5.0, torch.tensor(float("nan"))), (None, None))
    assert (units.given(0), units.counted(0)) == (12.0, 7.0)
    assert (units.given(1), units.counted(1)) == (0, 0)


def test_two_weights_of_one_step_are_refused():
    units = units_of_slices()
    units.open_slice(4)
    units.tell(3.0, None)
    units.arrived(0)
    units.tell(2.0, None)
    units.arrived(1)  # another step's
    with pytest.raises(UserError, match=r"over 3 and over 2 units in one slice.* one loss of both, such as"):
        units.arrived(0)


def test_a_task_that_is_given_up_leaves_no_units_behind():
    model = torch.nn.Linear(2, 1)
    gradients = Gradients(model, 8, lambda fraction: None, lambda: None)
    for given_up, units in ((True, 7.0), (False, 3.0)):
        gradients.open_task()
        gradients.open_slice(4, last=True)
        gradients.tell_units(units, None)
        model(torch.ones(4, 2)).mean().backward()
        if given_up:
            gradients.give_up()
        else:
            gradients.close_slice()
            gradients.flush(4)
            assert gradients.tail.counts[-COUNTS:][1:3].tolist() == [3.0, 3.0]


def written_by_hand(model):
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize("backward", [True, False])
def test_gradients_written_by_hand_are_refused(backward):
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 3)
    gradients = Gradients(model, 10**6, lambda fraction: None, lambda: None)
    gradients.open_slice(4, last=True)
    if backward:
        model(torch.ones(4, 100)).square().sum().backward()
    written_by_hand(model)
    with pytest.raises(UserError, match="were written by hand"):
        gradients.take(0)


def test_gradients_of_slices_before_and_those_given_by_backward_are_a_loop_s_own():
    model = torch.nn.Linear(2, 1)
    model.bias.grad = torch.ones(1)  # a sum of slices before
    gradients = Gradients(model, 10**6, lambda fraction: None, lambda: None)
    gradients.open_slice(4, last=True)
    torch.autograd.backward([model.weight], [torch.ones(1, 2)])
    gradients.take(0)
