"""Windows of a live job, from what its coordinator hears: by hand, and of whole jobs on the virtual cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import VirtualCluster, make_machine

from hetsync.balance.profile import StepTime
from hetsync.control.window_meter import WindowMeter
from hetsync.sync.messages import Contributed, Event, NormMeasured, RoundCompleted, Settings, TaskFinished, TaskStarted
from hetsync.sync.observation import Observation
from hetsync.sync.state_machine import RoundStateMachine

D4 = Settings(4, 0.25, 1)
D0 = replace(D4, delay_bound=0)


def by_hand(settings: Settings = D4, shares: tuple[int, ...] = (4, 4)) -> tuple[RoundStateMachine, WindowMeter]:
    machine = make_machine(list(shares), settings, 10_000)
    machine.first_instructions()
    times = [StepTime(0.0, 1.0)] * len(shares)
    return machine, WindowMeter(
        machine, times, solo_samples_per_second=2.0, learning_rate=lambda applied: 1 / (1 + applied)
    )


def tell(machine: RoundStateMachine, meter: WindowMeter, now: float, *events: Event) -> None:
    for event in events:
        meter.add_event(event, now)
        machine.handle(event)


def test_a_window_of_a_delayed_job() -> None:
    """Rank 0 computes for 4 s and waits from then on, rank 1 for 8 s; the sum of both takes 1 s."""
    machine, meter = by_hand(replace(D4, delay_bound=1, quorum=1.0))
    tell(machine, meter, 0.0, TaskStarted(0, 0, 0), TaskStarted(1, 1, 0))
    tell(machine, meter, 4.0, TaskFinished(0, 0, 4, 4.0, 8.0))
    tell(machine, meter, 8.0, TaskFinished(1, 1, 4, 8.0, 4.0), Contributed(0, 0, 0), Contributed(1, 0, 1))
    assert meter.rounds == 0
    tell(machine, meter, 9.0, RoundCompleted(0))
    assert meter.rounds == 1
    seen = meter.observe(D4, 10.0)
    assert seen == Observation(
        seconds=10.0,
        rounds=1,
        samples=8,
        losses=(2.0, 1.0),
        staleness=0.0,
        efficiency=8 / 10 / 2,
        communication_share=0.1,
        waiting_share=pytest.approx(1 - (4 + 8) / 20),
        jitter=pytest.approx(0.5 / 1.5),  # 1 and 2 times as long as profiled
        noise_scale=None,
        progress=8 / 10_000,
        learning_rate=1 / 9,
        settings=D4,
    )
    empty = meter.observe(D0, 12.0)
    assert (empty.seconds, empty.rounds, empty.samples, empty.losses) == (2.0, 0, 0, ())
    assert (empty.communication_share, empty.waiting_share, empty.settings) == (0.0, 1.0, D0)


def test_a_sum_that_is_faster_than_a_contributors_word_takes_no_time() -> None:
    machine, meter = by_hand()
    tell(machine, meter, 0.0, TaskStarted(0, 0, 0), TaskStarted(1, 1, 0))
    tell(machine, meter, 4.0, TaskFinished(0, 0, 4, 4.0))  # starts round 0
    tell(machine, meter, 5.0, RoundCompleted(0), Contributed(0, 0, 0))
    tell(machine, meter, 6.0, TaskStarted(0, 2, 1))
    tell(machine, meter, 8.0, TaskFinished(1, 1, 4, 8.0), Contributed(1, 1, 1), RoundCompleted(1))
    assert meter.observe(D4, 10.0).communication_share == 0.0


def test_what_a_synchronous_step_takes_beyond_its_slowest_rank_is_communication() -> None:
    machine, meter = by_hand(D0)
    tell(machine, meter, 0.0, TaskStarted(0, 0, 0), TaskStarted(1, 1, 0))
    tell(machine, meter, 6.5, RoundCompleted(0), TaskFinished(0, 0, 4, 2.0))
    tell(machine, meter, 7.0, TaskFinished(1, 1, 4, 6.0))  # the step took 1 s longer
    tell(machine, meter, 7.0, TaskStarted(0, 2, 1), TaskStarted(1, 3, 1))
    tell(
        machine, meter, 10.0, RoundCompleted(1), TaskFinished(0, 2, 4, 3.0), TaskFinished(1, 3, 4, 1.0)
    )  # and this one did not
    seen = meter.observe(D0, 10.0)
    assert seen.communication_share == pytest.approx(0.1)
    assert seen.waiting_share == pytest.approx(1 - (2 + 6 + 3 + 1) / 20)


def test_work_in_progress_is_no_waiting() -> None:
    machine, meter = by_hand()
    tell(machine, meter, 0.0, TaskStarted(0, 0, 0), TaskStarted(1, 1, 0))
    assert meter.observe(D4, 5.0).waiting_share == 0.0
    tell(machine, meter, 8.0, TaskFinished(0, 0, 4, 8.0), TaskFinished(1, 1, 4, 8.0))
    assert meter.observe(D4, 10.0).waiting_share == pytest.approx(2 / 5)


def test_the_noise_scale_is_that_of_rounds_of_which_all_have_told() -> None:
    machine, meter = by_hand(replace(D4, delay_bound=1, quorum=1.0))
    norms = (4**2 * 1.0 + 4 * 8.0, 8**2 * 1.0 + 8 * 8.0)  # of an addend and of the sum: |s|² is 1, v is 8
    for number in range(3):
        tell(machine, meter, number, *(TaskStarted(rank, 2 * number + rank, number) for rank in (0, 1)))
        tell(machine, meter, number, *(TaskFinished(rank, 2 * number + rank, 4, 1.0) for rank in (0, 1)))
        tell(machine, meter, number, *(NormMeasured(rank, number, 4, 1, norms[0]) for rank in (0, 1)))
        tell(machine, meter, number, *(Contributed(rank, number, 2 * number + rank) for rank in (0, 1)))
        assert meter.observe(D4, number).noise_scale is None
        tell(machine, meter, number, RoundCompleted(number, norms[1]))
    assert meter.observe(D4, 5.0).noise_scale == pytest.approx(8.0)
    assert meter.observe(D0, 6.0).noise_scale is None  # gradients are another matter
    tell(machine, meter, 6.0, NormMeasured(1, 0, 4, 1, 1e9))  # far too late
    tell(machine, meter, 6.0, *(TaskStarted(rank, 6 + rank, 3) for rank in (0, 1)))
    tell(machine, meter, 6.0, *(TaskFinished(rank, 6 + rank, 4, 1.0) for rank in (0, 1)))
    tell(machine, meter, 6.0, *(NormMeasured(rank, 3, 4, 1, norms[0]) for rank in (0, 1)))
    tell(machine, meter, 6.0, *(Contributed(rank, 3, 6 + rank) for rank in (0, 1)), RoundCompleted(3, norms[1]))
    assert meter.observe(D4, 7.0).noise_scale == pytest.approx(8.0)


@settings(max_examples=50, deadline=None)
@given(
    bound=st.sampled_from([0, 1, 4]),
    slices=st.integers(1, 3),
    speeds=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=4),
    communication=st.sampled_from([0.0, 0.5, 3.0]),
    every=st.integers(3, 40),
)
def test_windows_of_a_whole_job_add_up_to_what_the_virtual_cluster_has_on_its_books(
    bound: int, slices: int, speeds: list[float], communication: float, every: int
) -> None:
    machine = make_machine([4] * len(speeds), Settings(bound, 0.25, slices), 200)
    meter = WindowMeter(machine, [StepTime(0.0, seconds) for seconds in speeds], 1.0)
    windows = []
    events, closed_at = 0, 0.0

    def metered(event: Event, handle=machine.handle) -> list[Any]:
        nonlocal events, closed_at
        events += 1
        meter.add_event(event, cluster.now)
        out = handle(event)
        if events % every == 0 and cluster.now > closed_at:
            closed_at = cluster.now
            windows.append(meter.observe(machine.settings, cluster.now))
        return out

    machine.handle = metered  # type: ignore[method-assign]
    cluster = VirtualCluster(machine, lambda rank, samples: samples * speeds[rank], communicate=lambda: communication)
    cluster.run()
    seconds = cluster.now + 1.0  # nothing follows in the last one
    windows.append(meter.observe(machine.settings, seconds))
    assert sum(w.seconds for w in windows) == pytest.approx(seconds)
    assert sum(w.samples for w in windows) == 200
    assert sum(w.rounds for w in windows) == machine.version
    assert all(w.efficiency * w.seconds == pytest.approx(w.samples) for w in windows)
    assert all(0 <= share <= 1 for w in windows for share in (w.waiting_share, w.communication_share))
    assert windows[-1].progress == 1.0
    if bound:  # its tasks in progress do nothing but compute
        waited = sum(w.waiting_share * w.seconds for w in windows) * len(speeds)
        assert waited == pytest.approx(seconds * len(speeds) - sum(cluster.busy.values()), abs=1e-6)
    sums = [start for start in cluster.starts if start.contributors and not (start.synchronous and start.drain)]
    if all(w.communication_share < 1 for w in windows):  # a sum counts where it ends, and windows may be shorter
        summed = sum(w.communication_share * w.seconds for w in windows)
        assert summed == pytest.approx(len(sums) * communication, abs=1e-6)


def test_after_a_death_a_new_window_is_of_those_who_are_left() -> None:
    """Rank 1 of two dies while both compute; rank 0 goes on with its task, on twice the share from then on."""
    machine, meter = by_hand()
    tell(machine, meter, 0.0, TaskStarted(0, 0, 0), TaskStarted(1, 1, 0))
    tell(machine, meter, 4.0, TaskFinished(1, 1, 4, 4.0, 400.0))
    other = make_machine([8], D4, 10_000)
    other.first_instructions()
    meter.begin_anew(other, 6.0)
    tell(other, meter, 6.0, TaskStarted(0, 0, 0))
    tell(other, meter, 14.0, TaskFinished(0, 0, 8, 8.0, 8.0), Contributed(0, 0, 0), RoundCompleted(0))
    seen = meter.observe(D4, 14.0)
    assert (seen.seconds, seen.rounds, seen.samples, seen.losses) == (8.0, 1, 8, (1.0,))
    assert seen.efficiency == pytest.approx(1.0)  # of what rank 0 reaches alone
    assert seen.waiting_share == pytest.approx(0.0)
