"""The gradient noise scale from addends of known signal and noise. Imports no MPI."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.sync.noise_scale import Addend, NoiseScale, noise_of_steps

DIMENSIONS = 400


def rounds(estimate, number, sizes, scale, dice, present=None):
    """Rounds in which ranks of these slice sizes contribute single plain steps; signal of norm 1, variance `scale`."""
    signal = np.ones(DIMENSIONS) / np.sqrt(DIMENSIONS)
    for round_number in range(number):
        ranks = sizes if present is None else present(round_number)
        addends = [n * signal + np.sqrt(n * scale / DIMENSIONS) * dice.standard_normal(DIMENSIONS) for n in ranks]
        told = [Addend(n, 1, float(a @ a)) for n, a in zip(ranks, addends, strict=True)]
        total = sum(addends, np.zeros(DIMENSIONS))
        estimate.add(told, float(total @ total))


@pytest.mark.thorough
@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=8),
    st.floats(0.3, 3.0),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_the_scale_is_found_whatever_the_shares(sizes, factor, seed):
    scale = factor * sum(sizes)  # noise and signal of the sum are alike
    dice, found = np.random.default_rng(seed), []
    for _ in range(8):  # of shares of 1 and 50 one estimate is off by 17 % (standard deviation)
        estimate = NoiseScale()
        rounds(estimate, 300, sizes, scale, dice)
        found.append(estimate.samples)
    assert np.mean(found) == pytest.approx(scale, rel=0.35)


def test_contributors_may_come_and_go():
    dice, estimate = np.random.default_rng(1), NoiseScale()
    sizes = [4, 4, 2, 2, 1, 1, 1, 1]
    rounds(estimate, 600, sizes, 20.0, dice, lambda number: [n for n in sizes if dice.random() < 0.5])
    assert estimate.samples == pytest.approx(20.0, rel=0.3)


def test_it_follows_a_scale_that_grows():
    dice, estimate = np.random.default_rng(2), NoiseScale()
    rounds(estimate, 100, [4, 4], 2.0, dice)
    rounds(estimate, 400, [4, 4], 20.0, dice)
    assert estimate.samples == pytest.approx(20.0, rel=0.3)


def test_what_tells_nothing_is_unknown():
    estimate = NoiseScale()
    assert estimate.samples is None
    estimate.add([], 0.0)
    estimate.add([Addend(4, 1, 3.0), Addend(0, 1, 0.0)], 3.0)
    assert estimate.samples is None
    estimate.add([Addend(4, 1, 3.0), Addend(4, 1, 3.0)], 5.0)  # opposed: no signal
    assert estimate.samples is None
    known = NoiseScale()
    rounds(known, 50, [4, 4], 8.0, np.random.default_rng(3))
    before = known.samples
    for norm in (float("inf"), float("nan")):
        known.add([Addend(4, 1, 3.0), Addend(4, 1, norm)], 3.0)
        known.add([Addend(4, 1, 3.0), Addend(4, 1, 3.0)], norm)
    assert known.samples == before  # training has diverged, for a while perhaps
    alike = NoiseScale()
    alike.add([Addend(2, 1, 4.0), Addend(2, 1, 4.0)], 16.0)  # identical: no noise
    assert alike.samples is None


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_noise_of_steps_with_momentum_is_as_computed(steps, momentum):
    dice = np.random.default_rng(steps)
    gradients = dice.standard_normal((4000, 200 + steps))
    velocity, summed = np.zeros(4000), np.zeros(4000)
    for number, gradient in enumerate(gradients.T):
        velocity = momentum * velocity + gradient
        summed += velocity if number >= 200 else 0.0
    plain = steps / (1 - momentum) ** 2  # variance of k steps of the same mean, 1 / (1 − μ) each
    assert summed.var() / plain == pytest.approx(noise_of_steps(steps, momentum), rel=0.1)


def test_plain_steps_are_as_noisy_as_their_gradients():
    assert noise_of_steps(7, 0.0) == 1.0
    assert noise_of_steps(0, 0.9) == 1.0  # a gradient
    assert noise_of_steps(1, 0.9) == pytest.approx(1 / 19)
    assert noise_of_steps(2000, 0.9) == pytest.approx(1.0, rel=0.02)
