"""The virtual cluster's clock: closed forms, draws, books, scripts, stepping. No MPI, no gradients."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig, WireFormat
from hetsync.emulation.cluster import Cluster, DeviceGroup, Link, LognormalJitter, Slowdown
from hetsync.emulation.device import EmulatedDevice, emulated_device
from hetsync.errors import UserError
from hetsync.simulate import Change, Runtime, Scenario, Simulation, Traffic
from hetsync.simulate.clock import Clock
from hetsync.simulate.learner import Learner
from hetsync.simulate.polling import Polling
from hetsync.simulate.recipe import scaled
from hetsync.simulate.router import Router
from hetsync.simulate.virtual_rank import VirtualDevice, VirtualRanks
from hetsync.sync.messages import Settings
from hetsync.sync.milestones import marks_every, rests_at

FREE = Runtime(0.0, 0.0, 0.0, 0.0)
POLLS = 1e-3  # what polls may cost where they come at once: they are never closer than 50 µs


def scenario(
    rates: list[float],
    total: int = 4000,
    batch: int = 80,
    jitter: float = 0.0,
    link: Link | None = None,
    runtime: Runtime = FREE,
    every: int | None = None,
    seed: int = 0,
    events: tuple[Slowdown, ...] = (),
    **sync,
) -> Scenario:
    devices = tuple(DeviceGroup(f"device {rate}", 1, rate) for rate in rates)
    cluster = Cluster("test", "made up", devices, link, LognormalJitter(jitter) if jitter else None, events)
    ranks = [RankProfile("device", "", StepTime(0.0, 1 / rate), True) for rate in rates]

    marks = marks_every(every, total)
    return Scenario(cluster, ranks, SyncConfig(**sync), batch, total, None, seed, Traffic(), runtime, marks)


def finished(*arguments, script=(), **keywords) -> Simulation:
    simulation = Simulation(scenario(*arguments, **keywords), script=script)
    simulation.advance()
    assert simulation.ended
    assert simulation.machine.ledger.applied == simulation.scenario.total_samples
    return simulation


# Closed forms.


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_one_rank_takes_what_its_device_takes(delay_bound: int) -> None:
    simulation = finished([100.0], delay_bound=delay_bound)
    assert simulation.now == pytest.approx(4000 / 100, abs=50 * POLLS)
    assert simulation.observe().efficiency == pytest.approx(1.0, rel=0.01)


def test_equal_shares_in_synchronous_mode_go_at_the_slowest_devices_pace() -> None:
    simulation = finished([40.0, 20.0, 10.0, 10.0], delay_bound=0, shares="equal", rebalance=False)
    assert simulation.now == pytest.approx(50 * 20 / 10, rel=0.01)
    assert simulation.machine.version == 51  # 50 steps and the drain
    assert set(simulation.machine.staleness) == {0}
    fastest = simulation.ranks[0]
    assert fastest.wait_seconds == pytest.approx(0.75 * simulation.now, rel=0.01)


def test_delayed_mode_does_not_wait_for_the_link_where_synchronous_mode_does() -> None:
    half = Link(compute_fraction=0.5)
    synchronous = finished([40.0, 20.0, 10.0, 10.0], link=half, delay_bound=0)
    delayed = finished([40.0, 20.0, 10.0, 10.0], link=half, delay_bound=4)
    assert synchronous.now == pytest.approx(50 * 1.5, rel=0.01)  # of seconds a slice; one bucket, after the slice
    assert delayed.observe().efficiency > 0.93
    assert delayed.observe().communication_share == 0.0  # nothing since the last call


def test_buckets_travel_while_backward_runs() -> None:
    one = scenario([10.0, 10.0], delay_bound=0, link=Link(bytes_per_second=1e3))
    whole = dataclasses.replace(one, traffic=Traffic(1000, (1000,)))
    parts = dataclasses.replace(one, traffic=Traffic(1000, (900, 100)))
    after = dataclasses.replace(parts, sync=dataclasses.replace(parts.sync, overlap=False))
    assert whole.link_seconds(1000) == pytest.approx(4.0)  # 4,000 bytes, each rank carries them once
    ends = []
    for each in (whole, parts, after):
        simulation = Simulation(each)
        simulation.advance()
        ends.append(simulation.now)
    # A slice takes 4 s. The first bucket is full after (1 + 2 · 0.9) / 3 of it and takes 3.6 s, the second 0.4 s.
    assert ends[0] == pytest.approx(50 * (4 + 4), rel=0.01)
    assert ends[1] == pytest.approx(50 * (4 * 2.8 / 3 + 3.6 + 0.4), rel=0.01)
    assert ends[2] == pytest.approx(ends[0], rel=0.01)  # without overlap


@pytest.mark.parametrize(("wire", "of_float32"), [("float32", 1.0), ("int8", 0.75 * 1028 / 4096 + 0.25)])
def test_rounds_take_what_their_wire_sends(wire: WireFormat, of_float32: float) -> None:
    """Buffers, a quarter of it here, are float32 on each; and so is the drain."""
    one = scenario([10.0, 10.0], delay_bound=4, wire=wire, link=Link(bytes_per_second=1e6), fragments=1)
    simulation = Simulation(dataclasses.replace(one, traffic=Traffic(4096 * 16, (1,), 0, 4096 * 4)))
    simulation.advance()
    rounds, seconds = simulation.machine.version, simulation.totals.communication_seconds
    assert seconds == pytest.approx(4 * 4096 * 16 / 1e6 * ((rounds - 1) * of_float32 + 1), rel=0.01)


def test_what_the_runtime_takes_is_taken() -> None:
    plain = finished([10.0, 10.0], delay_bound=0).now
    dear = finished([10.0, 10.0], delay_bound=0, runtime=dataclasses.replace(FREE, slice_seconds=0.5)).now
    assert dear == pytest.approx(plain + 50 * 0.5, rel=0.01)


def test_a_synchronous_step_costs_what_the_clusters_hosts_take_and_by_default_nothing() -> None:
    def seconds(**keys) -> float:
        one = scenario([10.0, 10.0], delay_bound=keys.pop("delay_bound", 0))
        simulation = Simulation(dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, **keys)))
        simulation.advance()
        return simulation.now

    assert seconds() == pytest.approx(50 * 4.0, abs=50 * POLLS)
    assert seconds(step_seconds=0.25) == pytest.approx(seconds() + 50 * 0.25, rel=0.001)
    assert seconds(step_seconds=0.25, delay_bound=4) == seconds(delay_bound=4)


def test_equal_devices_gain_nothing_from_delay_in_the_default_simulator() -> None:
    """No constant of some machine's own stands between the two modes."""
    synchronous = finished([100.0] * 4, delay_bound=0, runtime=Runtime()).now
    delayed = finished([100.0] * 4, delay_bound=4, runtime=Runtime()).now
    assert synchronous == pytest.approx(delayed, rel=0.02)


# Draws.


@given(st.integers(0, 5), st.integers(0, 3), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_a_virtual_device_takes_what_the_emulated_one_takes(seed: int, rank: int, sizes: list[int]) -> None:
    events = (Slowdown(1, 2.5, 40, 200), Slowdown(1, 2.0, 100), Slowdown(2, 3.0, 0))
    cluster = Cluster("test", "", (DeviceGroup("d", 4),), None, LognormalJitter(0.5), events)
    real: EmulatedDevice = emulated_device(cluster, rank, StepTime(0.02, 0.05), seed)
    real._clock, real._sleep = (lambda: 0.0), (lambda seconds: None)
    virtual = VirtualDevice(cluster, rank, StepTime(0.02, 0.05), seed)
    for size in sizes:
        real.begin_slice(size)
        real.end_slice()
        assert virtual.seconds(size) == pytest.approx(real.take_seconds(), rel=1e-12)


def history(simulation: Simulation) -> tuple[object, ...]:
    machine = simulation.machine
    return simulation.now, machine.version, sorted(machine.staleness.items()), sorted(machine.samples_by_rank.items())


def test_a_seed_fixes_what_happens() -> None:
    def jittery(seed: int) -> tuple[object, ...]:
        return history(finished([40.0, 20.0, 10.0], jitter=0.5, runtime=Runtime(), seed=seed))

    assert jittery(1) == jittery(1)
    assert jittery(1) != jittery(2)


@settings(deadline=None, max_examples=60)
@given(
    rates=st.lists(st.floats(5.0, 80.0), min_size=1, max_size=6),
    delay_bound=st.sampled_from([0, 1, 2, 4, None]),
    quorum=st.sampled_from([0.1, 0.25, 1.0]),
    accumulation=st.integers(1, 3),
    jitter=st.sampled_from([0.0, 0.7]),
    link=st.sampled_from([None, Link(compute_fraction=0.8), Link(0.2)]),
    every=st.sampled_from([None, 130, 500]),
    runtime=st.sampled_from([FREE, Runtime(), Runtime(0.3, 0.1, 2.0, 1.0)]),
)
def test_every_sample_is_applied_once_and_within_the_bound(runtime, **job) -> None:
    """The state machine raises where it is told what cannot be; the ledger is checked at every drain."""
    simulation = finished(total=1000, batch=40, runtime=runtime, **job)
    machine = simulation.machine
    bound = job["delay_bound"]
    assert bound is None or max(machine.staleness) <= bound
    assert sum(machine.samples_by_rank.values()) == 1000 == sum(rank.samples for rank in simulation.ranks.values())
    busy = [rank.compute_seconds + rank.wait_seconds for rank in simulation.ranks.values()]
    assert max(busy) <= simulation.now * (1 + 1e-9)


def test_devices_repeat_beyond_the_profile() -> None:
    cluster = Cluster("test", "", (DeviceGroup("a", 2), DeviceGroup("b", 1)))
    assert [scaled(cluster, 7).device_of(rank).name for rank in range(7)] == [*"aab", *"aab", "a"]


# Stepping.


def test_advance_by_rounds_by_seconds_and_to_the_end() -> None:
    simulation = Simulation(scenario([40.0, 20.0, 10.0], runtime=Runtime()))
    simulation.advance(rounds=5)
    assert simulation.machine.version == 5
    before = simulation.now
    simulation.advance(seconds=1.5)
    assert simulation.now == before + 1.5
    simulation.advance()
    assert simulation.ended
    end = simulation.now
    simulation.advance(rounds=1)
    assert simulation.now == end


def test_stepping_does_not_change_what_happens() -> None:
    straight = finished([40.0, 20.0, 10.0], jitter=0.5, runtime=Runtime())
    simulation = Simulation(straight.scenario)
    dice = random.Random(0)
    while not simulation.ended:
        simulation.advance(seconds=dice.random())
        simulation.observe()
    assert history(simulation)[1:] == history(straight)[1:]


def test_windows_add_up() -> None:
    simulation = Simulation(scenario([40.0, 20.0, 10.0], jitter=0.5, runtime=Runtime()))
    windows = []
    while not simulation.ended:
        simulation.advance(rounds=10)
        windows.append(simulation.observe())
    assert sum(window.samples for window in windows) == 4000
    assert sum(window.seconds for window in windows) == pytest.approx(simulation.now)
    assert sum(window.rounds for window in windows) == simulation.machine.version
    assert windows[-1].progress == 1.0
    assert all(0 <= window.waiting_share <= 1 and window.communication_share >= 0 for window in windows)
    assert windows[0].jitter > 0.2
    assert windows[0].losses == ()  # timing only


def test_tuning_changes_what_is_handed_out() -> None:
    simulation = Simulation(scenario([40.0, 20.0, 10.0], total=8000, delay_bound=4, quorum=0.25))
    simulation.advance(rounds=20)
    simulation.tune(Settings(1, 0.5, 3))
    simulation.advance(rounds=20)
    simulation.observe()
    simulation.advance(rounds=10)
    window = simulation.observe()
    assert window.settings == Settings(1, 0.5, 3)
    assert window.staleness <= 1
    simulation.tune(Settings(0, 0.25, 1))  # drains first
    simulation.advance(rounds=20)
    assert simulation.machine.settings.synchronous
    simulation.tune(Settings(4, 0.25, 1))
    simulation.advance()
    assert simulation.machine.ledger.applied == 8000


def test_a_stop_comes_early_and_after_a_drain() -> None:
    simulation = Simulation(scenario([40.0, 20.0, 10.0]))
    simulation.advance(rounds=20)
    simulation.request_stop()
    simulation.advance()
    assert simulation.stopped
    assert simulation.ended
    assert 0 < simulation.machine.ledger.applied < 4000
    assert simulation.machine.ledger.applied == sum(simulation.machine.samples_by_rank.values())


@pytest.mark.parametrize("bound", [0, 4])
def test_the_anchor_is_evaluated_on_the_way(bound: int) -> None:
    class Counting(Learner):
        evaluations = 0

        def evaluate(self) -> dict[str, float]:
            self.evaluations += 1
            return {"evaluations": self.evaluations}

    seen = []
    simulation = Simulation(
        scenario([40.0, 20.0], every=1000, delay_bound=bound),
        Counting(),
        on_evaluation=lambda applied, seconds, metrics: seen.append((applied, seconds, metrics)),
    )
    simulation.advance()
    batch = simulation.machine.batch
    for number, (applied, seconds, metrics) in enumerate(seen, 1):
        assert 1000 * number <= applied < 1000 * number + 2 * batch
        assert seconds == pytest.approx(applied / 60, rel=0.1)
        assert metrics == {"evaluations": number}
    assert [applied for applied, _, _ in seen][3:] == [4000]
    assert simulation.machine.version > 0


@pytest.mark.parametrize("bound", [0, 4])
def test_an_evaluation_takes_no_time(bound: int) -> None:
    without, with_them = (finished([40.0, 20.0], every=every, delay_bound=bound).now for every in (None, 1000))
    assert with_them == pytest.approx(without, rel=1e-4)


def test_messages_take_a_poll_more_where_leaders_pass_them_on() -> None:
    runtime = Runtime()

    def router(ranks: int) -> Router:
        virtual_ranks = VirtualRanks.of(scenario([1.0] * ranks, batch=ranks))
        return Router(runtime, Clock(), Polling(runtime, 0), virtual_ranks, lambda events: None, lambda arrival: 0.0)

    assert router(64).message_seconds == runtime.message_seconds
    assert router(65).message_seconds == runtime.message_seconds + runtime.idle_poll_seconds / 2


# Scripts.


def test_a_slow_rank_slows_synchronous_rounds_until_it_recovers() -> None:
    plain = finished([10.0, 10.0], delay_bound=0, rebalance=False).now
    script = [Change(100.0, 1, "slow_by", 3.0), Change(140.0, 1, "recover")]
    slowed = finished([10.0, 10.0], delay_bound=0, rebalance=False, script=script).now
    # Steps take 4 s, then 12 s until the one that began before 140 s is over.
    assert slowed == pytest.approx(plain + 4 * 8, rel=0.02)


def test_a_slow_link_slows_rounds_until_it_recovers() -> None:
    link = Link(compute_fraction=0.5)
    script = [Change(61.0, None, "slow_by", 3.0), Change(121.0, None, "recover")]
    plain, slowed = (finished([10.0, 10.0], link=link, delay_bound=0, script=each) for each in ((), script))
    # Steps take 4 s and sums 2 s, then 6 s: of those that begin at 64, 74, 84, 94, 104 and 114 s.
    assert slowed.now == pytest.approx(plain.now + 6 * 4, rel=0.01)
    calm, delayed = (finished([10.0, 10.0], link=link, delay_bound=4, script=each) for each in ((), script))
    assert delayed.now < plain.now
    assert delayed.totals.communication_seconds > calm.totals.communication_seconds + 10


def test_shares_follow_a_lasting_slow_down() -> None:
    script = [Change(60.0, 1, "slow_by", 3.0)]
    fixed = finished([10.0, 10.0], total=16_000, delay_bound=0, rebalance=False, script=script)
    following = finished([10.0, 10.0], total=16_000, delay_bound=0, script=script)
    assert following.machine.members[1].share == pytest.approx(20, abs=2)
    assert following.now < 0.75 * fixed.now


def test_ranks_leave_and_come_back() -> None:
    script = [Change(10.0, 2, "leave"), Change(12.0, 1, "leave"), Change(60.0, 2, "join")]
    simulation = Simulation(scenario([40.0, 20.0, 20.0], delay_bound=4), script=script)
    simulation.advance(seconds=30)
    assert set(simulation.machine.members) == {0}
    assert set(simulation.away) == {1, 2}
    simulation.advance()
    assert set(simulation.ranks) == {0, 2}
    assert simulation.machine.ledger.applied == 4000
    assert simulation.machine.samples_by_rank[0] > 10 * 80
    assert simulation.now > finished([40.0, 20.0, 20.0], delay_bound=4).now


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([Change(1.0, 0, "leave")], "rank 0"),
        ([Change(1.0, 9, "slow_by", 2.0)], "the last is 2"),
        ([Change(1.0, 1, "join")], "which is there"),
        ([Change(1.0, 1, "leave"), Change(2.0, 1, "slow_by", 2.0)], "which is away"),
    ],
)
def test_impossible_scripts_are_refused(changes: list[Change], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Simulation(scenario([10.0, 10.0, 10.0]), script=changes)


def test_membership_is_fixed_in_synchronous_mode() -> None:
    simulation = Simulation(scenario([10.0, 10.0], delay_bound=0), script=[Change(1.0, 1, "leave")])
    with pytest.raises(UserError, match=r"sync\.delay_bound"):
        simulation.advance()


# K, q and grace by rule.

DEAR_ROUNDS = dataclasses.replace(FREE, round_seconds=0.6)  # slices take 80 / 70 s


def changes(simulation: Simulation) -> list[tuple[int, float, int]]:
    return [(change.accumulation, change.quorum, change.grace) for change in simulation.rounds_changes]


def test_rounds_become_fewer_where_their_work_is_dear() -> None:
    delayed = {"total": 16_000, "runtime": DEAR_ROUNDS, "delay_bound": 4}
    ruled = finished([40.0, 20.0, 10.0], accumulation="auto", **delayed)
    default = finished([40.0, 20.0, 10.0], **delayed)
    fixed = finished([40.0, 20.0, 10.0], quorum=0.25, grace=0, **delayed)
    in_vain = [(1, 0.5, 1), (1, 0.5, 0)]  # as the first rank's part is a quorum, a round has all of a slice already
    assert changes(ruled) == [(1, 0.5, 0), *in_vain, (2, 0.5, 0)]
    assert changes(default) == [(1, 0.5, 0), *in_vain]
    assert ruled.machine.settings.accumulation == 2
    assert ruled.now < 0.9 * default.now < 0.9 * fixed.now
    assert ruled.rounds_changes[0].work > 0.4
    again = finished([40.0, 20.0, 10.0], accumulation="auto", **delayed)
    assert again.rounds_changes == ruled.rounds_changes


@pytest.mark.parametrize("slices", [1.9, 2.1])
def test_behind_a_very_slow_link_a_job_begins_with_delay_and_with_shares_for_it(slices: float) -> None:
    """A rank that is so slow has no part of a batch that all wait for."""
    made = scenario([40.0, 20.0, 0.7], total=4000, delay_bound="auto", link=Link(compute_fraction=slices))
    delayed = scenario([40.0, 20.0, 0.7], total=4000, delay_bound=4)
    simulation = Simulation(made)
    bound, shares = simulation.machine.settings.delay_bound, list(made.shares)
    simulation.advance()
    first = simulation.rounds_changes[0]
    if slices < 2:
        assert (bound, shares[-1]) == (0, 0)
        assert first.round > 0
    else:
        assert (bound, shares) == (4, list(delayed.shares))
        assert shares[-1] > 0
        assert (first.round, first.delay_bound, first.waits) == (0, 4, pytest.approx(slices))


def test_rounds_become_fewer_behind_a_link_that_ranks_wait_for() -> None:
    slow = {"link": Link(compute_fraction=40.0), "delay_bound": 16, "quorum": 0.5, "grace": 0}
    ruled = finished([40.0, 20.0, 10.0], total=32_000, accumulation="auto", **slow)
    fixed = finished([40.0, 20.0, 10.0], total=32_000, accumulation=1, **slow)
    assert [k for k, *_ in changes(ruled)] == [2, 4]
    assert ruled.now < 0.6 * fixed.now


@pytest.mark.parametrize(
    ("runtime", "sync"),
    [
        (FREE, {"delay_bound": 4, "accumulation": "auto"}),
        (DEAR_ROUNDS, {"delay_bound": 4, "quorum": 0.25, "grace": 0}),
        (DEAR_ROUNDS, {"delay_bound": 0, "accumulation": "auto"}),
    ],
    ids=["cheap rounds", "by hand", "synchronous"],
)
def test_settings_stay_where_there_is_no_reason_for_another(runtime: Runtime, sync: dict[str, Any]) -> None:
    assert changes(finished([40.0, 20.0, 10.0], total=16_000, runtime=runtime, **sync)) == []


def test_who_sets_settings_while_training_ends_the_rule() -> None:
    simulation = Simulation(scenario([40.0, 20.0, 10.0], total=16_000, runtime=DEAR_ROUNDS, accumulation="auto"))
    simulation.tune(Settings())
    simulation.advance()
    assert changes(simulation) == []


def test_what_ranks_wait_at_a_rest_is_no_reason() -> None:
    """Tasks between two rests that are near each other, so that a third of the time goes by waiting for them."""
    made = scenario([40.0, 20.0, 10.0], total=16_000, accumulation="auto")
    simulation = Simulation(dataclasses.replace(made, milestones=rests_at(marks_every(160, 16_000), "save", 16_000)))
    simulation.advance()
    assert changes(simulation) == []
