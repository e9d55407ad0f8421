"""How fast ranks are: the profile, smoothed observations, and jumps that are no jitter."""

from __future__ import annotations

import random

import pytest

from hetsync.balance.profile import StepTime
from hetsync.balance.speed_tracker import LEAST_OBSERVATIONS, SHIFT_TASKS, SMOOTHING, Speeds


def speeds(*seconds_per_sample, fixed=0.0):
    return Speeds({rank: StepTime(fixed, seconds) for rank, seconds in enumerate(seconds_per_sample)})


def scale(watched):
    return watched.times([0])[0].seconds_per_sample


def test_times_are_the_profile_until_something_is_seen():
    assert speeds(1.0, 2.0).times([0, 1]) == [StepTime(0, 1.0), StepTime(0, 2.0)]


def test_the_first_observations_count_alike_and_later_ones_fade():
    watched = speeds(1.0)
    ratios = [2.0, 1.0, 3.0] + [1.0] * 40
    smoothed = 0.0
    for count, ratio in enumerate(ratios, 1):
        watched.observe(0, 10, 1, 10 * ratio)
        weight = max(SMOOTHING, 1 / count)
        smoothed += weight * (ratio - smoothed)
        (time,) = watched.times([0])
        assert time.seconds_per_sample == pytest.approx(smoothed)
    assert smoothed == pytest.approx(1.0, abs=0.05)


def test_a_single_outlier_moves_a_settled_speed_by_a_tenth_of_it():
    watched = speeds(1.0)
    for _ in range(50):
        watched.observe(0, 10, 1, 10.0)
    watched.observe(0, 10, 1, 20.0)
    assert watched.times([0])[0].seconds_per_sample == pytest.approx(1.1)


def test_at_best_a_rank_is_as_quick_as_in_any_of_its_last_tasks():
    watched = speeds(1.0)
    assert watched.at_best([0]) == [StepTime(0, 1.0)]
    for ratio in [50.0] * 20 + [2.0] + [50.0] * (LEAST_OBSERVATIONS - 1):
        watched.observe(0, 10, 1, 10 * ratio)
    assert watched.at_best([0]) == [StepTime(0, 2.0)]
    watched.observe(0, 10, 1, 500.0)
    assert watched.at_best([0])[0].seconds_per_sample > 40


def test_a_newcomer_may_be_of_any_speed_until_it_was_seen_often_enough():
    watched = speeds(1.0, 1.0)
    watched.join(1, StepTime(0, 3.0), None)
    for _ in range(LEAST_OBSERVATIONS):
        assert watched.at_best([1]) == [StepTime(0, 0)]
        watched.observe(1, 10, 1, 60.0)
    assert watched.at_best([1]) == watched.times([1]) == [StepTime(0, 6.0)]


def test_both_parts_of_a_step_time_scale_together():
    watched = speeds(0.5, fixed=2.0)
    watched.observe(0, 8, 2, 16.0)  # two slices of four: profiled 2·2 + 8·0.5 = 8 s
    assert watched.times([0]) == [StepTime(4.0, 1.0)]


def test_tasks_without_samples_or_time_teach_nothing():
    watched = speeds(1.0)
    watched.observe(0, 0, 0, 5.0)
    watched.observe(0, 5, 1, 0.0)
    assert watched.times([0]) == [StepTime(0, 1.0)]
    assert not watched.settled([0])


def test_speeds_settle_once_every_rank_was_seen_often_enough():
    watched = speeds(1.0, 1.0)
    for count in range(LEAST_OBSERVATIONS):
        assert not watched.settled([0, 1])
        watched.observe(0, 1, 1, 1.0)
        if count:
            watched.observe(1, 1, 1, 1.0)
    assert not watched.settled([0, 1])
    watched.observe(1, 1, 1, 1.0)
    assert watched.settled([0, 1])
    assert not watched.settled([0, 2]), "rank 1 has left, and nobody knows rank 2"


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.3, 3.0, 10.0])
def test_a_lasting_change_is_believed_after_three_tasks(factor):
    watched = speeds(1.0)
    for _ in range(40):
        assert not watched.observe(0, 10, 1, 10.0)
    jumps = [watched.observe(0, 10, 1, 10 * factor) for _ in range(20)]
    assert jumps == [number == SHIFT_TASKS for number in range(1, 21)]
    assert scale(watched) == pytest.approx(factor)


def test_outliers_and_small_changes_are_no_jump():
    watched = speeds(1.0)
    for number in range(200):
        outlier = number % 7 in (0, 1)  # two in a row
        assert not watched.observe(0, 10, 1, 50.0 if outlier else 10.0)
    steady = speeds(1.0)
    for number in range(200):
        assert not steady.observe(0, 10, 1, 10.0 if number < 100 else 10.9)
    assert scale(steady) == pytest.approx(1.09, rel=1e-3)


@pytest.mark.parametrize("sigma", [0.1, 0.5])
def test_jitter_is_hardly_ever_taken_for_a_jump(sigma):
    draw, watched = random.Random(3), speeds(1.0)
    jumps = [watched.observe(0, 10, 1, 10 * draw.lognormvariate(0, sigma)) for _ in range(20_000)]
    assert sum(jumps) <= 20


def test_a_change_three_times_over_is_seen_through_jitter():
    draw, watched = random.Random(4), speeds(1.0)
    for _ in range(100):
        watched.observe(0, 10, 1, 10 * draw.lognormvariate(0, 0.3))
    for _ in range(15):
        watched.observe(0, 10, 1, 30 * draw.lognormvariate(0, 0.3))
    assert 2.5 < scale(watched) < 3.8


def test_what_comes_first_is_no_jump():
    watched = speeds(1.0)
    assert not any(watched.observe(0, 10, 1, 30.0) for _ in range(LEAST_OBSERVATIONS))


def test_the_slowest_rank_is_the_one_furthest_below_its_profile() -> None:
    speeds = Speeds({rank: StepTime(0.0, 0.1) for rank in range(3)})
    assert speeds.slowest() is None
    for rank, seconds in enumerate((1.0, 2.0, 1.25)):
        speeds.observe(rank, 10, 1, seconds)
    assert speeds.slowest() == (1, 0.5)


def test_another_process_in_a_ranks_place_is_taken_to_be_off_its_profile_as_the_others_are():
    """Where nothing was measured profiles are of 1 s a sample, whatever the device takes."""
    watched = speeds(1.0, 1.0, 1.0)
    for _ in range(LEAST_OBSERVATIONS):
        for rank, seconds in enumerate((0.02, 0.04, 0.09)):
            watched.observe(rank, 10, 1, 10 * seconds)
    watched.forget(2)
    watched.join(2, StepTime(0, 1.0), cap=7)
    assert watched.times([2])[0].seconds_per_sample == pytest.approx(0.03)
    assert watched.limits([2]) == ([7], {})
    assert not watched.settled([0, 1, 2])
    watched.observe(2, 10, 1, 5.0)
    assert watched.times([2])[0].seconds_per_sample == pytest.approx(0.5), "what it does itself counts from then on"
