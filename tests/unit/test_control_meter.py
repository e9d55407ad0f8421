"""Windows of a live job, from what its coordinator hears: by hand, and of whole jobs on the virtual cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import VirtualCluster, make_policy

from hetsync.control.meter import Meter
from hetsync.control.observation import Observation
from hetsync.slicing import StepTime
from hetsync.sync.messages import Began, Completed, Event, Finished, Settings, Took, Weighed
from hetsync.sync.policy import Policy

D4 = Settings(4, 0.25, 1)
D0 = replace(D4, delay_bound=0)


def by_hand(settings: Settings = D4, shares: tuple[int, ...] = (4, 4)) -> tuple[Policy, Meter]:
    policy = make_policy(list(shares), settings, 10_000)
    policy.begin()
    times = [StepTime(0.0, 1.0)] * len(shares)
    return policy, Meter(policy, times, solo_samples_per_second=2.0, learning_rate=lambda applied: 1 / (1 + applied))


def tell(policy: Policy, meter: Meter, now: float, *events: Event) -> None:
    for event in events:
        meter.hear(event, now)
        policy.on(event)


def test_a_window_of_a_delayed_job() -> None:
    """Rank 0 computes for 4 s and waits from then on, rank 1 for 8 s; the sum of both takes 1 s."""
    policy, meter = by_hand(replace(D4, delay_bound=1, quorum=1.0))
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    tell(policy, meter, 4.0, Finished(0, 0, 4, 4.0, 8.0))
    tell(policy, meter, 8.0, Finished(1, 1, 4, 8.0, 4.0), Took(0, 0, 0), Took(1, 0, 1))
    assert meter.rounds == 0
    tell(policy, meter, 9.0, Completed(0))
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
    policy, meter = by_hand()
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    tell(policy, meter, 4.0, Finished(0, 0, 4, 4.0))  # starts round 0
    tell(policy, meter, 5.0, Completed(0), Took(0, 0, 0))
    tell(policy, meter, 6.0, Began(0, 2, 1))
    tell(policy, meter, 8.0, Finished(1, 1, 4, 8.0), Took(1, 1, 1), Completed(1))
    assert meter.observe(D4, 10.0).communication_share == 0.0


def test_what_a_synchronous_step_takes_beyond_its_slowest_rank_is_communication() -> None:
    policy, meter = by_hand(D0)
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    tell(policy, meter, 6.5, Completed(0), Finished(0, 0, 4, 2.0))
    tell(policy, meter, 7.0, Finished(1, 1, 4, 6.0))  # the step took 1 s longer
    tell(policy, meter, 7.0, Began(0, 2, 1), Began(1, 3, 1))
    tell(policy, meter, 10.0, Completed(1), Finished(0, 2, 4, 3.0), Finished(1, 3, 4, 1.0))  # and this one did not
    seen = meter.observe(D0, 10.0)
    assert seen.communication_share == pytest.approx(0.1)
    assert seen.waiting_share == pytest.approx(1 - (2 + 6 + 3 + 1) / 20)


def test_work_in_progress_is_no_waiting() -> None:
    policy, meter = by_hand()
    tell(policy, meter, 0.0, Began(0, 0, 0), Began(1, 1, 0))
    assert meter.observe(D4, 5.0).waiting_share == 0.0
    tell(policy, meter, 8.0, Finished(0, 0, 4, 8.0), Finished(1, 1, 4, 8.0))
    assert meter.observe(D4, 10.0).waiting_share == pytest.approx(2 / 5)


def test_the_noise_scale_is_that_of_rounds_of_which_all_have_told() -> None:
    policy, meter = by_hand(replace(D4, delay_bound=1, quorum=1.0))
    norms = (4**2 * 1.0 + 4 * 8.0, 8**2 * 1.0 + 8 * 8.0)  # of an addend and of the sum: |s|² is 1, v is 8
    for number in range(3):
        tell(policy, meter, number, *(Began(rank, 2 * number + rank, number) for rank in (0, 1)))
        tell(policy, meter, number, *(Finished(rank, 2 * number + rank, 4, 1.0) for rank in (0, 1)))
        tell(policy, meter, number, *(Weighed(rank, number, 4, 1, norms[0]) for rank in (0, 1)))
        tell(policy, meter, number, *(Took(rank, number, 2 * number + rank) for rank in (0, 1)))
        assert meter.observe(D4, number).noise_scale is None
        tell(policy, meter, number, Completed(number, norms[1]))
    assert meter.observe(D4, 5.0).noise_scale == pytest.approx(8.0)
    assert meter.observe(D0, 6.0).noise_scale is None  # gradients are another matter
    tell(policy, meter, 6.0, Weighed(1, 0, 4, 1, 1e9))  # far too late
    tell(policy, meter, 6.0, *(Began(rank, 6 + rank, 3) for rank in (0, 1)))
    tell(policy, meter, 6.0, *(Finished(rank, 6 + rank, 4, 1.0) for rank in (0, 1)))
    tell(policy, meter, 6.0, *(Weighed(rank, 3, 4, 1, norms[0]) for rank in (0, 1)))
    tell(policy, meter, 6.0, *(Took(rank, 3, 6 + rank) for rank in (0, 1)), Completed(3, norms[1]))
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
    policy = make_policy([4] * len(speeds), Settings(bound, 0.25, slices), 200)
    meter = Meter(policy, [StepTime(0.0, seconds) for seconds in speeds], 1.0)
    windows = []
    events, closed_at = 0, 0.0

    def metered(event: Event, on=policy.on) -> list[Any]:
        nonlocal events, closed_at
        events += 1
        meter.hear(event, cluster.now)
        out = on(event)
        if events % every == 0 and cluster.now > closed_at:
            closed_at = cluster.now
            windows.append(meter.observe(policy.settings, cluster.now))
        return out

    policy.on = metered  # type: ignore[method-assign]
    cluster = VirtualCluster(policy, lambda rank, samples: samples * speeds[rank], communicate=lambda: communication)
    cluster.run()
    seconds = cluster.now + 1.0  # nothing follows in the last one
    windows.append(meter.observe(policy.settings, seconds))
    assert sum(w.seconds for w in windows) == pytest.approx(seconds)
    assert sum(w.samples for w in windows) == 200
    assert sum(w.rounds for w in windows) == policy.version
    assert all(w.efficiency * w.seconds == pytest.approx(w.samples) for w in windows)
    assert all(0 <= share <= 1 for w in windows for share in (w.waiting_share, w.communication_share))
    assert windows[-1].progress == 1.0
    if bound:  # its pieces in progress do nothing but compute
        waited = sum(w.waiting_share * w.seconds for w in windows) * len(speeds)
        assert waited == pytest.approx(seconds * len(speeds) - sum(cluster.busy.values()), abs=1e-6)
    sums = [start for start in cluster.starts if start.contributors and not (start.synchronous and start.drain)]
    if all(w.communication_share < 1 for w in windows):  # a sum counts where it ends, and windows may be shorter
        summed = sum(w.communication_share * w.seconds for w in windows)
        assert summed == pytest.approx(len(sums) * communication, abs=1e-6)
