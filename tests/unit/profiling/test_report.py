"""What `hetsync profile` writes is what an emulation of it does."""

from __future__ import annotations

import pytest

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.device import emulated_times
from hetsync.profiling.report import group_devices

TIMES = [StepTime(0.010, 0.001), StepTime(0.012, 0.003), StepTime(0.0, 0.010)]


def grouped(times, names, share=50):
    profiles = [RankProfile(name, "here", time) for name, time in zip(names, times, strict=True)]
    return group_devices("cnn", profiles, [time.rate(share) for time in times], [None] * len(times))


def test_slices_take_what_was_measured_whatever_their_size():
    cluster = Cluster("c", "s", grouped(TIMES, ["a", "b", "c"]))
    for emulated, measured in zip(emulated_times(cluster, 3, "cnn", None, 1.0), TIMES, strict=True):
        for samples in (1, 50, 400):
            assert emulated.seconds(samples) == pytest.approx(measured.seconds(samples), rel=1e-2)


def test_like_neighbours_are_one_group_of_their_mean_time():
    (group,) = grouped(TIMES[:2], ["a", "a"])
    assert (group.count, group.speed) == (2, 1.0)
    assert group.fixed_seconds == pytest.approx(0.011)
    assert group.samples_per_second == {"cnn": 500.0}


def test_a_fixed_part_within_the_uncertainty_is_none():
    """5 % of a slice of 50, of which the time is known to 10 %."""
    time = StepTime(0.05 / 0.95, 0.02)
    for uncertainty, fixed in ((0.1, 0.0), (None, 0.0), (0.01, time.fixed_seconds)):
        profile = RankProfile("a", "here", time, uncertainty=uncertainty)
        (group,) = group_devices("cnn", [profile], [time.rate(50)], [None])
        assert group.fixed_seconds == pytest.approx(fixed, abs=1e-6)


def test_the_slowest_group_has_speed_1():
    fast, slow = grouped([StepTime(0, 0.001), StepTime(0, 0.002), StepTime(0, 0.004)], ["a", "b", "b"])
    assert (fast.speed, slow.speed) == (pytest.approx(1000 / 375, rel=1e-3), 1.0)


def test_samples_that_seem_to_cost_nothing_still_have_a_rate():
    (group,) = grouped([StepTime(0.1, 0.0)], ["a"])
    assert (group.fixed_seconds, group.samples_per_second) == (0.0, {"cnn": 500.0})


def test_each_of_several_hosts_has_groups_of_its_own():
    profiles = [RankProfile("a", host, StepTime(0.0, 0.01)) for host in ("h0", "h0", "h1")]
    groups = group_devices("cnn", profiles, [100.0] * 3, [None] * 3)
    assert [(group.host, group.count) for group in groups] == [("h0", 2), ("h1", 1)]
