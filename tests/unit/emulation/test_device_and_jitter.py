"""Emulated time on a clock of the test's own: what is slept, what is given back, and what jitter does."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import (
    Cluster,
    DeviceGroup,
    LognormalJitter,
    QuantileJitter,
    QuantileModel,
    Slowdown,
    TraceJitter,
    load_cluster,
)
from hetsync.emulation.device import EmulatedDevice, affordable_rate, emulated_device, emulated_rates, emulated_times
from hetsync.emulation.jitter import jitter_sampler, likely_factors
from hetsync.errors import UserError


class Time:
    """A clock that only moves by `work`, and by `sleep`, which ends late."""

    def __init__(self, overshoot=0.0):
        self.now = 100.0
        self.overshoot = overshoot

    def clock(self):
        return self.now

    def work(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds + self.overshoot


def device(time, seconds_per_sample=0.1, fixed_seconds=0.0, **options):
    return EmulatedDevice(StepTime(fixed_seconds, seconds_per_sample), clock=time.clock, sleep=time.sleep, **options)


def test_a_small_slice_is_not_free():
    time = Time()
    emulated = device(time, 0.1, fixed_seconds=0.5)
    for samples, seconds in ((1, 0.6), (20, 2.5), (0, 0.0)):
        emulated.begin_slice(samples)
        emulated.end_slice()
        assert emulated.take_seconds() == pytest.approx(seconds)


def test_a_profiles_fixed_seconds_are_each_ranks_own():
    cluster = Cluster("c", "s", (DeviceGroup("a", fixed_seconds=0.25), DeviceGroup("b", 2)))
    times = emulated_times(cluster, 3, "cnn", 30.0, 1.0)
    assert [time.fixed_seconds for time in times] == [0.25, 0.0, 0.0]
    assert [time.seconds_per_sample for time in times] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf"), 1e9])
def test_fixed_seconds_that_no_device_takes_are_refused(seconds):
    with pytest.raises(UserError, match="fixed_seconds"):
        DeviceGroup("a", fixed_seconds=seconds)


def test_a_slice_takes_the_emulated_time():
    time = Time()
    emulated = device(time)
    emulated.begin_slice(20)
    time.work(0.5)
    emulated.end_slice()
    assert emulated.take_seconds() == pytest.approx(2.0)
    assert time.now == pytest.approx(102.0)
    assert (emulated.slices, emulated.overruns) == (1, 0)
    assert emulated.real_seconds == pytest.approx(0.5)
    assert emulated.emulated_seconds == pytest.approx(2.0)


@pytest.mark.parametrize("within", [True, False])
def test_an_update_takes_a_time_of_its_own_within_the_slice_or_after_a_wait(within):
    time = Time(overshoot=0.01)
    emulated = device(time, update_seconds=0.5, jitter_sampler=lambda: 2.0)
    for _ in range(2):
        emulated.begin_slice(5)
        time.work(0.5)
        emulated.end_slice(stepped=within)
        if not within:
            time.work(3.0)  # for the sums of others
            emulated.begin_step()
            time.work(0.25)
            emulated.end_step()
    assert emulated.take_seconds() == pytest.approx(2 * (1.0 + 1.0))
    assert time.now == pytest.approx(100 + 2 * 2.0 + (0 if within else 2 * 3.0), abs=0.02)  # one sleep ends late
    assert emulated.real_seconds == pytest.approx(2 * 0.5 + (0 if within else 2 * 0.25))
    assert (emulated.slices, emulated.overruns) == (2, 0)


def test_pace_waits_for_its_fraction_and_is_not_real_compute():
    time = Time()
    emulated = device(time)
    emulated.begin_slice(20)
    time.work(0.2)
    emulated.pace(0.5)
    assert time.now == pytest.approx(101.0)
    emulated.pace(0.25)
    assert time.now == pytest.approx(101.0)
    time.work(0.1)
    emulated.end_slice()
    assert time.now == pytest.approx(102.0)
    assert emulated.real_seconds == pytest.approx(0.3)


@given(st.floats(0, 0.05), st.lists(st.floats(0.1, 1), max_size=4), st.integers(2, 30))
def test_late_sleeps_do_not_add_up(overshoot, fractions, slices):
    time = Time(overshoot)
    emulated = device(time)
    for _ in range(slices):
        emulated.begin_slice(20)
        time.work(0.1)
        for fraction in sorted(fractions):
            emulated.pace(fraction)
        emulated.end_slice()
    # One overshoot for the sleep in `end`, and one more where it began late by that of a `pace`.
    assert 0 <= time.now - (100 + 2.0 * slices) + 1e-9 <= 2 * overshoot + 2e-9
    assert emulated.overruns == 0
    assert emulated.real_seconds == pytest.approx(0.1 * slices)


def test_host_time_between_slices_is_not_given_back():
    time = Time(overshoot=0.01)
    emulated = device(time)
    for _ in range(10):
        emulated.begin_slice(20)
        emulated.end_slice()
        time.work(0.5)
    assert time.now == pytest.approx(100 + 10 * 2.5 + 0.01)


def test_real_compute_that_takes_too_long_is_counted_and_not_given_back():
    time = Time(overshoot=0.01)
    emulated = device(time)
    for work in (3.0, 1.0):
        emulated.begin_slice(20)
        time.work(work)
        emulated.end_slice()
        assert emulated.take_seconds() == pytest.approx(2.0)
    assert time.now == pytest.approx(105.01)
    assert emulated.overruns == 1
    assert emulated.overrun_seconds == pytest.approx(1.0)
    assert emulated.real_seconds == pytest.approx(4.0)


def test_what_runs_after_the_last_pace_is_no_overrun():
    time = Time()
    emulated = device(time)
    emulated.begin_slice(20)
    emulated.pace(1.0)
    time.work(0.001)
    emulated.end_slice()
    assert emulated.overruns == 0


def test_slowdowns_and_jitter_multiply():
    time = Time()
    factors = iter([1.0, 1.0, 0.5, 1.0])
    emulated = device(time, jitter_sampler=factors.__next__, slowdowns=[Slowdown(0, 3.0, 10, 30)])
    seconds = []
    for _ in range(4):
        emulated.begin_slice(10)
        emulated.end_slice()
        seconds.append(emulated.take_seconds())
    assert seconds == pytest.approx([1.0, 3.0, 1.5, 1.0])


def test_an_emulated_device_waits_for_the_real_one_at_a_slices_end():
    time = Time()
    emulated = device(time, settle=lambda: time.work(3.0))
    emulated.begin_slice(20)
    emulated.end_slice()
    assert emulated.real_seconds == pytest.approx(3.0)
    assert emulated.overruns == 1


QUANTILES = QuantileModel((0.0, 0.5, 0.9, 1.0), (0.8, 1.0, 1.1, 3.0), autocorrelation=0.7)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = ["worker,time,batch_time", "a,1,10", "b,1,4", "a,3,40", "a,2,10", "b,2,12"]
    path.write_text("\n".join(rows))
    return TraceJitter(str(path), hold=2)


def draws(jitter, seed, rank, number):
    sampler = jitter_sampler(jitter, seed, rank)
    return [sampler() for _ in range(number)]


@pytest.mark.parametrize(
    "jitter",
    [
        LognormalJitter(0.5),
        QuantileJitter((QUANTILES,), hold=1),
        *(QuantileJitter((model,), hold=1) for model in load_cluster("alibaba-jitter").jitter.models),
    ],
)
def test_factors_have_mean_1_and_depend_on_seed_and_rank_only(jitter):
    factors = draws(jitter, 1, 0, 20_000)
    assert statistics.fmean(factors) == pytest.approx(1, abs=0.03)
    assert min(factors) > 0
    assert factors[:50] == draws(jitter, 1, 0, 50)
    assert factors[:50] != draws(jitter, 2, 0, 50)
    assert factors[:50] != draws(jitter, 1, 1, 50)


def test_quantiles_and_autocorrelation_come_out_as_fitted():
    factors = draws(QuantileJitter((QUANTILES,), hold=1), 0, 0, 20_000)
    mean = 0.5 * 0.9 + 0.4 * 1.05 + 0.1 * 2.05
    assert sum(f * mean <= 1.0 for f in factors) / 20_000 == pytest.approx(0.5, abs=0.03)
    assert sum(f * mean <= 1.1 for f in factors) / 20_000 == pytest.approx(0.9, abs=0.02)
    below = [f * mean <= 1.0 for f in factors]
    same = sum(a == b for a, b in itertools.pairwise(below)) / 20_000
    assert same == pytest.approx(0.75, abs=0.03)  # 1/2 + asin(0.7)/π for a normal AR(1) process


def test_ranks_take_turns_with_the_fitted_models():
    flat = [QuantileModel((0.0, 1.0), (1.0, 1.0)), QUANTILES]
    jitter = QuantileJitter(tuple(flat), hold=3)
    assert draws(jitter, 0, 2, 6) == [1.0] * 6
    held = draws(jitter, 0, 3, 6)
    assert held == [held[0]] * 3 + [held[3]] * 3
    assert held[0] != held[3]


def test_a_trace_is_replayed_worker_by_worker_around_its_mean(trace):
    a, b = [0.5, 0.5, 2.0], [0.5, 1.5]
    for rank, worker in ((0, a), (1, b), (2, a)):
        replayed = draws(trace, 5, rank, 4 * len(worker))
        assert replayed[::2] == replayed[1::2]
        records = replayed[::2]
        assert records[: len(worker)] == records[len(worker) :]
        starts = [worker[i:] + worker[:i] for i in range(len(worker))]
        assert records[: len(worker)] in [pytest.approx(s) for s in starts]
    assert len({tuple(draws(trace, seed, 0, 6)) for seed in range(20)}) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker,time\n1,1", "has no column 'batch_time': set jitter's"),
        ("worker,time,batch_time\n1,1,x", "holds something that is no number"),
        ("worker,time,batch_time\n1,1", "holds something that is no number"),
        ("worker,time,batch_time\n1,1,nan\n1,2,3", "holds something that is no number"),
        ("worker,time,batch_time", "needs records"),
        ("worker,time,batch_time\n1,1,0", "needs records with positive"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        jitter_sampler(TraceJitter(str(path)), 0, 0)()
    assert words in str(error.value)
    assert "bad.csv" in str(error.value)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the trace that jitter.path names: .*absent.csv"):
        jitter_sampler(TraceJitter(str(tmp_path / "absent.csv")), 0, 0)()


@pytest.mark.parametrize(
    "jitter",
    [
        *(LognormalJitter(sigma) for sigma in (0.0, 0.5)),
        *(QuantileJitter((model,), hold=1) for model in load_cluster("alibaba-jitter").jitter.models),
    ],
)
def test_likely_factors_are_spread_as_those_that_are_drawn(jitter):
    found = likely_factors(jitter, 0, 100)
    assert found == sorted(found)
    assert statistics.mean(found) == pytest.approx(1)
    drawn = sorted(draws(jitter, 1, 0, 20_000))
    for part in range(5, 95):  # the tails scatter
        assert found[part] == pytest.approx(drawn[200 * part + 100], rel=0.1)


def test_likely_factors_of_a_trace_are_its_own(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("worker,time,batch_time\n" + "".join(f"{w},{t},{t + 1}\n" for w in "ab" for t in range(4)))
    found = likely_factors(TraceJitter(str(path)), 1, 8)
    assert found == pytest.approx([factor / 2.5 for factor in (1, 1, 2, 2, 3, 3, 4, 4)])


def test_without_jitter_every_factor_is_1():
    assert draws(None, 0, 0, 3) == [1.0] * 3


def test_rates_are_the_profiles_own_where_it_has_them_all():
    gavel = load_cluster("v100-p100-k80")
    assert emulated_rates(gavel, 5, "resnet50", None, 9.0) == [281.3, 281.3, 167.6, 167.6, 39.6]
    scaled = emulated_rates(gavel, 5, "resnet50", 100.0, 9.0)
    assert sum(scaled) == pytest.approx(100.0)
    assert scaled[0] / scaled[4] == pytest.approx(281.3 / 39.6)


def test_the_machine_affords_a_fraction_of_its_cores_and_no_tiny_slices():
    assert affordable_rate(0.001, 1000, cores=2) * 0.001 == pytest.approx(0.15 * 2)
    assert affordable_rate(1e-6, 64, cores=2) == pytest.approx(640.0)


def test_relative_speeds_are_scaled_to_what_is_asked_or_affordable():
    quick = load_cluster("quickstart")
    rates = emulated_rates(quick, 8, "cnn", None, 300.0)
    assert sum(rates) == pytest.approx(300.0)
    assert [rate / rates[-1] for rate in rates] == pytest.approx([4, 4, 2, 2, 1, 1, 1, 1])
    assert sum(emulated_rates(quick, 3, "cnn", 50.0, 300.0)) == pytest.approx(50.0)
    with pytest.raises(UserError, match="none for rank 8"):
        emulated_rates(quick, 9, "cnn", 50.0, 300.0)


def test_a_rate_that_one_device_lacks_makes_speeds_count():
    cluster = Cluster("c", "s", (DeviceGroup("a", 1, 3.0, None, {"cnn": 99.0}), DeviceGroup("b")))
    assert emulated_rates(cluster, 2, "cnn", 8.0, 1.0) == pytest.approx([6.0, 2.0])
    assert emulated_rates(cluster, 1, "cnn", None, 1.0) == [99.0]


def test_a_profile_makes_a_device_with_its_events():
    cluster = Cluster(
        "c", "s", (DeviceGroup("a", 2),), jitter=LognormalJitter(0.0),
        events=(Slowdown(1, 2.0, 0), Slowdown(0, 5.0, 0)),
    )  # fmt: skip
    emulated = emulated_device(cluster, 1, StepTime(0.0, 0.001))
    emulated.begin_slice(1)
    emulated.end_slice()
    assert emulated.take_seconds() == pytest.approx(0.002)
