"""The anchor is evaluated on the way: nobody rests for it, everybody does its part, and it stands for known samples."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_machine_jobs import everyday, jobs, relaxed
from virtual import VirtualCluster, make_machine

from hetsync.sync.messages import (
    AssignTask,
    Evaluated,
    RoundCompleted,
    Settings,
    StartRound,
    TaskFinished,
    TaskStarted,
)
from hetsync.sync.milestones import Rests, Snapshots, marks_every, rests_at


@relaxed
@given(jobs())
def test_an_evaluation_is_of_all_ranks_and_of_the_samples_of_its_round(job):
    machine, times = job
    cluster = VirtualCluster(machine, **times.arguments(len(machine.members)))
    cluster.run()
    asked = [start.number for start in cluster.starts if start.evaluate and not start.drain]
    assert [evaluation.round for evaluation in cluster.evaluations] == asked
    for evaluation in cluster.evaluations:
        assert evaluation.parts == tuple({"ranks": 1, str(rank): 1} for rank in sorted(machine.members))
        rounds_before = [r for number, r in cluster.round_spans.items() if number <= evaluation.round]
        assert evaluation.samples_applied == sum(stop - start for spans in rounds_before for start, stop in spans)


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 2)])
def test_each_mark_is_evaluated_once_it_is_reached(settings):
    machine = make_machine([3, 1, 2], settings, 1000, evaluate=250)
    cluster = VirtualCluster(machine, **everyday.arguments(3))
    cluster.run()
    at = [evaluation.samples_applied for evaluation in cluster.evaluations]
    assert len(at) == 3
    assert all(mark <= applied < mark + 2 * machine.full_set for mark, applied in zip((250, 500, 750), at, strict=True))
    assert [reason for _, reason in cluster.drains] == ["end"]


@pytest.mark.parametrize("spoiled", [{8}, {9}, {8, 9}, {10}])
def test_a_mark_that_a_spoiled_round_falls_short_of_is_evaluated_once_it_is_reached(spoiled):
    """Synchronous rounds are told to be evaluated before they, and those before them, have turned out to bring
    nothing."""
    machine = make_machine([1, 1], Settings(0, 1.0, 1), 60, evaluate=20)
    told, evaluated = deque(machine.first_instructions()), []
    while told:
        match told.popleft():
            case AssignTask(rank=rank, task=task):
                told += machine.handle(TaskStarted(rank, task.number, task.synchronous_round))
                told += machine.handle(TaskFinished(rank, task.number, task.samples, 1.0))
            case StartRound(number=number) as start:
                told += machine.handle(RoundCompleted(number, spoiled=number in spoiled))
                for rank in (0, 1) if start.evaluate and not start.drain else ():
                    told += machine.handle(Evaluated(rank, number, rank))
                if (found := machine.snapshots.pop_complete()) is not None:
                    evaluated.append(found.samples_applied)
    assert machine.ended
    assert evaluated == sorted(evaluated)
    for mark in (20, 40):  # and what was handed out meanwhile
        assert any(mark <= applied <= mark + 4 * machine.full_set for applied in evaluated), evaluated


def test_nobody_waits_for_an_evaluation():
    """Neither the moments nor the make-up of rounds differ from those of a run without."""
    stories = []
    for evaluate in (None, 100):
        machine = make_machine([4, 2, 2], Settings(4, 0.25, 1), 1000, evaluate=evaluate)
        cluster = VirtualCluster(machine, lambda rank, samples: (1.0, 1.3, 1.7)[rank] * samples / 4)
        cluster.run()
        stories.append((cluster.now, [start._replace(evaluate=False) for start in cluster.starts]))
    assert stories[0] == stories[1]
    assert len(cluster.evaluations) >= 8


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 1)])
def test_where_all_rest_they_evaluate_there(settings):
    """A checkpoint at an evaluation's mark is a checkpoint of what was evaluated."""
    machine = make_machine([3, 1, 2], settings, 900, 300, evaluate=300)
    cluster = VirtualCluster(machine, **everyday.arguments(3))
    cluster.run()
    resting = [start.applied for start in cluster.starts if start.drain and start.evaluate]
    on_the_way = [evaluation.samples_applied for evaluation in cluster.evaluations]
    assert len(resting) + len(on_the_way) == 2
    assert set(on_the_way) <= {300, 600}


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 1)])
def test_the_end_waits_for_the_slowest_evaluation_and_says_whose_it_is(settings):
    machine = make_machine([4, 2], settings, 60, evaluate=40)
    waited_for = []

    def look(cluster, step):
        if cluster.now > 500 and not machine.ended:
            waited_for.append(machine.waited_for())
        return []

    seconds = {0: 1000.0, 1: 1.0}
    cluster = VirtualCluster(machine, lambda rank, samples: 1.0, before=look, evaluate=seconds.__getitem__)
    cluster.run()
    assert len(cluster.evaluations) == 1
    assert cluster.now > 1000
    # In lock-step the other rank has begun on what comes next, as far as rank 0 knows.
    assert waited_for[0] == ([0, 1] if settings.synchronous else [0])


# The books.


def test_a_part_that_will_not_come_makes_no_evaluation():
    snapshots = Snapshots(marks_every(10, 100), 0)
    assert not snapshots.due(9)
    assert snapshots.due(12)
    snapshots.request(3, {0, 1})
    snapshots.round_applied(3, 13)
    assert snapshots.record_part(0, 3, {"right": 1})
    snapshots.remove_rank(1)
    assert snapshots.pop_complete() is None
    assert snapshots.due(20)


def test_one_evaluation_at_a_time():
    snapshots = Snapshots(marks_every(10, 100), 0)
    assert snapshots.due(10)
    snapshots.request(0, {0, 1})
    assert not snapshots.due(40)
    assert not snapshots.record_part(0, 1, {})
    assert snapshots.record_part(1, 0, {"right": 2})
    assert not snapshots.record_part(1, 0, {"right": 2})
    assert snapshots.record_part(0, 0, {"right": 1})
    assert snapshots.pop_complete() is None  # not landed
    snapshots.round_applied(0, 10)
    done = snapshots.pop_complete()
    assert done is not None
    assert (done.round, done.samples_applied, done.parts) == (0, 10, ({"right": 1}, {"right": 2}))
    assert snapshots.pop_complete() is None
    assert snapshots.due(40)
    assert not snapshots.due(49)


@given(st.integers(1, 50), st.integers(1, 200), st.integers(0, 220))
def test_marks_are_the_multiples_below_the_end(every, total, position):
    due = marks_every(every, total)(position)
    later = [mark for mark in range(every, total, every) if mark > position]
    assert due == (later[0] if later else None)


def test_requests_are_kept_while_a_rest_is_inevitable():
    rests = Rests(rests_at(marks_every(50, 100), "checkpoint", 100), 0)
    rests.request(20, "stop")
    assert (rests.next.position, rests.next.reason) == (20, "stop")
    rests.request(20, "save")
    assert not rests.bring_forward(20, "mode change")
    rests.advance(20)
    assert (rests.next.position, rests.next.reason) == (20, "save")
    rests.advance(20)
    assert (rests.next.position, rests.next.reason) == (50, "checkpoint")
    rests.advance(50)
    assert rests.next.final


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 1)])
def test_where_an_evaluation_is_near_no_more_tasks_are_out_than_must_be(settings):
    machine = make_machine([4], settings, 1000, evaluate=100)
    machine.tasks_held = 8
    cluster = VirtualCluster(machine, lambda rank, samples: 1.0)
    cluster.run()
    at = [evaluation.samples_applied for evaluation in cluster.evaluations]
    assert all(mark <= applied < mark + 2 * 4 for mark, applied in zip(range(100, 1000, 100), at, strict=True))
