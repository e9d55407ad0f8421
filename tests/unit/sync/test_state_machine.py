"""Laws of the state machine under arbitrary speeds, delays and event orders.

`virtual.py` checks most of them at every step: staleness, exactly once, rounds in order, finished work only,
nobody at work at a drain, an end.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_machine_jobs import (
    Times,
    any_settings,
    arguments,
    everyday,
    jobs,
    relaxed,
    script,
    share_lists,
    synchronous,
)
from virtual import VirtualCluster, make_machine

from hetsync.balance.shares import apportion
from hetsync.data.ledger import length, split
from hetsync.sync.members import Activity
from hetsync.sync.messages import NO_BOUND, AssignTask, RankWithdrew, Settings

# Small clusters, where hypothesis chooses every single delay and can shrink it.


@relaxed
@given(share_lists(4), any_settings, st.integers(1, 80), *[st.none() | st.integers(1, 60)] * 2, st.data())
def test_any_order_of_events(shares, settings, total, every, evaluate, data):
    seconds = st.sampled_from([0.0, 1.0, 3.0, 20.0])
    machine = make_machine(shares, settings, total, every, evaluate)
    VirtualCluster(machine, **arguments(lambda: data.draw(seconds))).run()


# Larger ones, where a seed does.


@relaxed
@given(jobs())
def test_the_laws_hold_and_every_run_ends(job):
    machine, times = job
    cluster = VirtualCluster(machine, **times.arguments(len(machine.members)))
    cluster.run()
    assert cluster.starts[-1].final
    assert max(machine.staleness) <= machine.settings.delay_bound
    assert sum(machine.samples_by_rank.values()) == machine.ledger.total


@st.composite
def least_slices(draw):
    """(least, shares): none of fewer samples, and some of none."""
    least = draw(st.integers(1, 6))
    share = st.integers(least, least + 9)
    return least, [draw(share), *draw(st.lists(share | share | st.just(0), max_size=5))]


@relaxed
@given(least_slices(), any_settings, st.integers(1, 300), st.none() | st.integers(1, 100), st.integers(0, 2**16))
def test_no_slice_is_smaller_than_the_least(problem, settings, total, every, seed):
    """But where no more is left: before a rest, or at D = 0 of a batch, which is what one process would have had."""
    least, shares = problem
    machine = make_machine(shares, settings, total, every, least_slice=least)
    dice, tasks, ranks = random.Random(seed), [], range(1, len(shares))
    assign = machine._assign

    def watched(*arguments):
        instruction = assign(*arguments)
        tasks.append(instruction.task)
        return instruction

    machine._assign = watched
    planned = [(dice.randrange(200), RankWithdrew(rank)) for rank in ranks if not dice.randrange(4)]
    times = arguments(lambda: dice.choice([0.0, 1.0, 3.0, 20.0]))
    VirtualCluster(machine, **times, before=script(sorted(planned, key=lambda pair: pair[0]))).run()
    between = min(min(every or total, total), total % (every or total) or total)
    for task in tasks:
        left = task.round_samples if task.synchronous_round is not None else between
        sizes = [length(spans) for spans in task.slices]
        assert all(min(least, left) <= size <= max(task.share, 2 * least - 1) for size in sizes)
        assert len(sizes) <= settings.accumulation


def test_memory_makes_slices_smaller_before_it_makes_them_larger():
    machine = make_machine([2], Settings(4), 5, least_slice=2)
    assert [length(spans) for spans in machine.first_instructions()[1].task.slices] == [3]
    machine = make_machine([2], Settings(4), 5, least_slice=2)
    machine.caps = {0: 2}
    assert [length(spans) for spans in machine.first_instructions()[1].task.slices] == [2, 1]


def test_every_milestone_is_a_drain_with_its_reason():
    machine = make_machine([3, 1, 2], Settings(4, 0.25, 2), 1000, 250)
    cluster = VirtualCluster(machine, **everyday.arguments(3))
    cluster.run()
    assert cluster.drains == [(250, "checkpoint"), (500, "checkpoint"), (750, "checkpoint"), (1000, "end")]


def test_a_run_of_nothing_ends_at_once():
    for settings in (Settings(0), Settings(4)):
        cluster = VirtualCluster(make_machine([2, 2], settings, 10, applied=10, version=7), lambda rank, n: 1.0)
        cluster.run()
        assert [(start.number, start.final) for start in cluster.starts] == [(7, True)]


@relaxed
@given(any_settings, st.integers(0, 100), st.integers(0, 9))
def test_a_resumed_run_goes_on_from_its_books(settings, applied, version):
    machine = make_machine([3, 1], settings, 100, 30, applied=applied, version=version)
    cluster = VirtualCluster(machine, **everyday.arguments(2))
    cluster.run()
    assert cluster.starts[0].number == version
    assert sum(machine.samples_by_rank.values()) == 100 - applied


# Synchronous mode.


@relaxed
@given(jobs(synchronous))
def test_synchronous_rounds_are_the_stream_cut_into_batches(job):
    """Round r holds positions [r·K·B, (r+1)·K·B), less where a milestone cuts it short."""
    machine, times = job
    stops, position, full = [], 0, machine.full_set
    while position < machine.ledger.total:
        position = min(position + full, machine.rests._milestones(position).position)
        stops.append(position)
    cluster = VirtualCluster(machine, **times.arguments(len(machine.members)))
    cluster.run()
    rounds = [cluster.round_spans[s.number] for s in cluster.starts if not s.drain]
    assert [(spans[0][0], spans[-1][1]) for spans in rounds] == list(zip([0, *stops], stops, strict=False))
    assert [length(spans) for spans in rounds] == [b - a for a, b in zip([0, *stops], stops, strict=False)]
    assert set(machine.staleness) == {0}


def batches(shares, accumulation, total, every):
    cluster = VirtualCluster(make_machine(shares, Settings(0, 1.0, accumulation), total, every), lambda rank, n: n)
    cluster.run()
    spans = (cluster.round_spans[s.number] for s in cluster.starts if not s.drain)
    return [(min(a for a, _ in s), max(b for _, b in s), length(s)) for s in spans]


def test_synchronous_batches_do_not_depend_on_the_ranks():
    expected = batches([24], 2, 1000, 300)
    for shares in ([12, 12], [23, 1], [8, 0, 16], [1] * 24, [5, 7, 12]):
        assert batches(shares, 2, 1000, 300) == expected


def test_synchronous_work_is_handed_out_two_rounds_ahead():
    given = [
        i for i in make_machine([2, 3], Settings(0, 1.0, 2), 1000).first_instructions() if isinstance(i, AssignTask)
    ]
    assert [(g.rank, g.task.samples, g.task.synchronous_round, g.task.round_samples) for g in given] == [
        (rank, samples, number, 10) for number in (0, 1) for rank, samples in ((0, 4), (1, 6))
    ]
    assert [length(spans) for spans in given[1].task.slices] == [3, 3]


def test_what_is_left_before_a_milestone_is_split_by_the_shares_too():
    given = [i for i in make_machine([4, 8], Settings(0), 100, 15).first_instructions() if isinstance(i, AssignTask)]
    assert [(g.task.synchronous_round, g.task.samples) for g in given] == [(0, 4), (0, 8), (1, 0), (1, 3)]


# Delayed mode.


@relaxed
@given(jobs(st.builds(Settings, st.integers(1, 8), st.just(1.0), st.integers(1, 3)), most_ranks=16))
def test_a_quorum_of_one_is_stale_synchronous_parallel(job):
    """Ho et al. 2013, with the task as the clock: away from a milestone nobody has finished more than D + 1
    tasks more than the slowest (D ahead of it, and the one that the slowest is on)."""
    machine, times = job
    bound = machine.settings.delay_bound
    sharing = {rank for rank, member in machine.members.items() if member.share}

    def look(cluster, step):
        unapplied = [stub.worker.unapplied for stub in cluster.stubs.values()]
        assert max(unapplied) <= bound + 1
        if cluster.machine.ledger.available(cluster.machine.rests.next.position) >= cluster.machine.full_set:
            assert all(start.drain or start.contributors == sharing for start in cluster.starts[look.seen :])
            if len(cluster.drains) == 0:
                counts = [cluster.finished[rank] for rank in sharing]
                assert max(counts) <= min(counts) + bound + 1
        look.seen = len(cluster.starts)
        return []

    look.seen = 0
    VirtualCluster(machine, **times.arguments(len(machine.members)), before=look).run()


def activities(job):
    machine, times = job
    seen = set()

    def look(cluster, step):
        seen.update(member.activity for member in cluster.machine.members.values())
        return []

    VirtualCluster(machine, **times.arguments(len(machine.members)), before=look).run()
    return seen


@relaxed
@given(jobs(st.builds(Settings, st.just(NO_BOUND), st.floats(0.01, 1.0)), most_ranks=8))
def test_without_a_bound_nobody_is_blocked(job):
    assert Activity.BLOCKED not in activities(job)


def test_with_a_bound_somebody_is():
    slow = Times(1, 4, 0.5, 0.01, 50, 0.01)
    assert Activity.BLOCKED in activities((make_machine([4, 4], Settings(1, 0.1), 1000), slow))


def test_a_larger_bound_and_a_smaller_quorum_never_cost_much_time():
    """Delay hides jitter and communication: that is what it is for."""

    def seconds(settings):
        machine = make_machine([4] * 8, settings, 4 * 8 * 100)
        cluster = VirtualCluster(machine, **Times(3, 1, 0.5, 0.01, 1, 0.01).arguments(8))
        cluster.run()
        return cluster.now

    synchronous, one, eight = (seconds(s) for s in (Settings(0), Settings(1, 0.5), Settings(8, 0.25)))
    assert synchronous > 1.2 * one > 1.2 * eight


@pytest.mark.parametrize(("left", "held"), [(8 * 9, 9), (8 * 9 - 1, 2)])
def test_nobody_takes_all_that_is_left_before_a_rest(left: int, held: int) -> None:
    """However short tasks are: the others would have none, and wait."""
    machine = make_machine([4, 4], Settings(4, 0.25), 1000, every=left)
    machine.tasks_held = 9
    given = Counter(i.rank for i in machine.first_instructions() if isinstance(i, AssignTask))
    assert given == {0: held, 1: held}


def test_ranks_of_unequal_speed_come_to_rest_together():
    """Near a milestone tasks shrink with what is left, so that a drain costs less than a slice of waiting."""
    shares, speeds = [16, 16, 8, 4], [1, 1, 2, 4]
    machine = make_machine(shares, Settings(8, 0.25, 4), 44 * 4 * 20)
    ends = {}

    def compute(rank, samples):
        ends[rank] = cluster.now + samples * speeds[rank] * (1.4 if rank == 3 else 1)
        return ends[rank] - cluster.now

    cluster = VirtualCluster(machine, compute)
    cluster.run()
    assert max(ends.values()) - min(ends.values()) <= 16 * 1.4


# Small parts.


@given(st.integers(0, 500), st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
def test_apportion_gives_everything_in_proportion(total, shares):
    parts = apportion(total, dict(enumerate(shares)))
    assert sum(parts.values()) == total
    assert all(abs(parts[r] - total * n / sum(shares)) < 1 for r, n in enumerate(shares))


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 6))
def test_split_keeps_the_order_and_equal_sizes(lengths, slices):
    spans = tuple((100 * i, 100 * i + n) for i, n in enumerate(lengths))
    parts = split(spans, length(spans), slices)
    positions = [p for part in parts for start, stop in part for p in range(start, stop)]
    assert positions == [p for start, stop in spans for p in range(start, stop)]
    sizes = [length(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(parts) == min(slices, length(spans))
