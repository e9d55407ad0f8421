"""When delay has lost training."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from hetsync.sync.delay_guard import CLIMBED, LOST_WINDOWS, WINDOW_BATCHES, DelayGuard, Lost

BATCH = 10
WINDOW = BATCH * WINDOW_BATCHES
FALLING = [2.3 * 0.8**window for window in range(20)]


def told(losses, delayed=True):
    """By the guard, over windows with these mean losses: the first of them by which training is lost."""
    guard = DelayGuard(BATCH)
    for place, loss in enumerate(losses):
        if guard.observe(loss * WINDOW, WINDOW, delayed, place) is not None:
            return place
    return None


def test_losses_that_climb_back_are_lost():
    climbed = 2.3 * (CLIMBED + 0.1)
    assert told([*FALLING, climbed, climbed]) == len(FALLING) + LOST_WINDOWS - 1
    assert told([*FALLING, climbed, 0.1, climbed, 0.1]) is None


def test_what_is_not_finite_is_lost_at_once():
    assert told([math.nan]) == 0
    assert told([*FALLING, math.inf]) == len(FALLING)


@given(st.lists(st.floats(allow_nan=True), max_size=40))
def test_synchronous_training_is_not_judged(losses):
    assert told(losses, delayed=False) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_losses_that_never_climb_half_of_the_way_are_well(falls, zero, scale):
    """Whatever their sign and scale."""
    losses = sorted(falls, reverse=True)
    assert told([zero + scale * loss for loss in losses]) is None
    halves = [loss + 0.4 * (losses[0] - loss) if place % 2 else loss for place, loss in enumerate(losses)]
    assert told(halves) is None


def test_losses_without_a_trend_are_not_judged():
    """As those of a GAN, or of the last epochs of a long training."""
    draw = random.Random(0)
    assert told([draw.gauss(1.0, 0.3) for _ in range(400)]) is None


def test_tasks_of_any_size_add_up():
    guard = DelayGuard(BATCH)
    losses = [loss for mean in [*FALLING, 2.0, 2.0] for loss in [mean] * WINDOW]
    found = [guard.observe(loss, 1, True, 0) for loss in losses]
    assert [place for place, loss in enumerate(found) if loss is not None] == [len(losses) - 1]


def test_it_knows_when_losses_were_good():
    guard = DelayGuard(BATCH)
    for place, loss in enumerate([*FALLING, 0.5, 1.0, 2.0, 2.0]):  # from a fifth of the way up on
        guard.observe(loss * WINDOW, WINDOW, True, 100 * place)
    assert guard.good == 100 * (len(FALLING) - 1)


def test_the_sentence():
    assert str(Lost(3, 7, 2.3, 0.0512, 0)) == "delay has lost training: the loss is 2.3, and was 0.0512"
    assert "on rank 3" in str(Lost(3, 7, math.nan, 0.1, 0))
