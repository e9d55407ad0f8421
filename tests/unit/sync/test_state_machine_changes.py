"""The state machine while settings, shares and members change under it."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from state_machine_jobs import (
    any_settings,
    arguments,
    everyday,
    interventions,
    jobs,
    numbers,
    relaxed,
    rounds,
    script,
    share_lists,
)
from virtual import VirtualCluster, make_machine

from hetsync.data.ledger import length
from hetsync.sync.members import Activity
from hetsync.sync.messages import (
    AssignTask,
    Contributed,
    DrainRequested,
    RankJoined,
    RankLeft,
    RankWithdrew,
    RoundCompleted,
    Settings,
    SettingsChanged,
    SharesChanged,
    TaskFinished,
    TaskStarted,
)


@hypothesis_settings(relaxed, max_examples=60)
@given(st.data())
def test_settings_shares_and_drains_change_at_any_moment(data):
    machine, times = data.draw(jobs(most_ranks=8))
    planned = data.draw(interventions(len(machine.members), machine.batch))
    cluster = VirtualCluster(machine, **times.arguments(len(machine.members)), before=script(planned))
    cluster.run()


@hypothesis_settings(relaxed, max_examples=60)
@given(share_lists(3, 4), any_settings, st.integers(10, 60), st.data())
def test_interventions_in_any_order_of_events(shares, settings, total, data):
    machine = make_machine(shares, settings, total, 25)
    planned = [(step // 3, event) for step, event in data.draw(interventions(len(shares), sum(shares)))]
    seconds = st.sampled_from([0.0, 1.0, 3.0, 20.0])
    VirtualCluster(machine, **arguments(lambda: data.draw(seconds)), before=script(planned)).run()


@pytest.mark.parametrize("first", [Settings(0, 1.0, 2), Settings(4, 0.25, 1)])
def test_the_two_modes_never_overlap(first):
    second = Settings(4, 0.25, 1) if first.synchronous else Settings(0, 1.0, 2)
    machine = make_machine([4, 2, 2], first, 800)
    before = script([(60, SettingsChanged(second)), (300, SettingsChanged(first))])
    cluster = VirtualCluster(machine, **everyday.arguments(3), before=before)
    cluster.run()
    modes = [start.synchronous for start in cluster.starts]
    switches = [i for i in range(1, len(modes)) if modes[i] != modes[i - 1]]
    assert len(switches) == 2
    assert all(cluster.starts[i - 1].drain == "mode change" for i in switches)
    assert machine.settings == first


def test_taking_a_mode_change_back_leaves_the_mode():
    machine = make_machine([4, 2], Settings(4), 400)
    before = script([(30, SettingsChanged(Settings(0))), (31, SettingsChanged(Settings(2)))])
    cluster = VirtualCluster(machine, **everyday.arguments(2), before=before)
    cluster.run()
    assert machine.settings == Settings(2)
    assert not any(start.synchronous for start in cluster.starts)


@relaxed
@given(any_settings, st.integers(0, 400), st.integers(0, 2))
def test_no_drain_request_is_forgotten(settings, step, also):
    """Pre-emption asks once: also while all ranks are coming to rest for another reason."""
    machine = make_machine([4, 2, 2], settings, 200, 60)
    requests = [(step, DrainRequested("stop")), (step, DrainRequested("save")), (step, SettingsChanged(Settings(3)))]
    planned = script(requests[: also + 1])
    asked = []

    def before(cluster, now):
        due = planned(cluster, now)
        if not machine.rests.next.final or machine.ledger.frontier < 200:  # the end answers for any
            asked.extend(event.reason for event in due if isinstance(event, DrainRequested))
        return due

    cluster = VirtualCluster(machine, **everyday.arguments(3), before=before)
    cluster.run()
    assert [reason for _, reason in cluster.drains if reason in ("stop", "save")] == asked


def test_a_lowered_bound_holds_for_work_that_may_have_begun_unheard():
    """A rank computes a task with bound 8 and holds one with bound 1. It may have begun that one from version 1,
    with the word of it still on its way: version 1 + 2 rounds would be too late for it."""
    machine = make_machine([4, 4], Settings(8, 0.25), 400)
    first = machine.first_instructions()
    (a, a2), (b, b2) = numbers(first, 0), numbers(first, 1)
    machine.handle(SettingsChanged(Settings(1, 0.25)))
    machine.handle(TaskStarted(1, b, 0))
    out = machine.handle(TaskFinished(1, b, 4))
    (tight,) = numbers(out, 1)  # the task with bound 1
    assert rounds(out) == [0]
    machine.handle(TaskStarted(1, b2, 0))
    machine.handle(Contributed(1, 0, b))
    machine.handle(RoundCompleted(0))
    machine.handle(TaskStarted(0, a, 1))
    assert rounds(machine.handle(TaskFinished(0, a, 4))) == []
    machine.handle(TaskStarted(0, a2, 1))
    out = machine.handle(TaskFinished(1, b2, 4)) + machine.handle(TaskStarted(1, tight, 1))  # what was on its way
    assert rounds(out) == [1]


def test_a_rank_that_gets_a_share_again_is_not_expected_to_work_beyond_its_bound():
    """It rests with D + 1 contributions that wait; the quorum is out of its reach; nobody else works either."""
    machine = make_machine([7, 1], Settings(1, 1.0), 400)

    def before(cluster, step):
        resting = cluster.machine.members[1].activity is Activity.RESTING
        if not before.taken:
            before.taken = True
            return [SharesChanged({0: 8, 1: 0})]
        if resting and not before.given:
            before.given = True
            assert len(cluster.machine.members[1].ready) == 2
            return [SharesChanged({0: 2, 1: 6})]
        return []

    before.taken = before.given = False
    VirtualCluster(machine, lambda rank, n: 1.0 if rank else 30.0, before=before).run()
    assert before.given


# Membership.


def test_a_rank_that_leaves_between_a_synchronous_sum_and_its_word_gives_nothing_back_twice():
    machine = make_machine([4, 4], Settings(0, 1.0), 400)
    first = machine.first_instructions()
    for rank in (0, 1):
        machine.handle(TaskStarted(rank, numbers(first, rank)[0], 0))
    machine.handle(RoundCompleted(0))
    machine.handle(RankLeft(1))  # its task of round 0 is applied; it holds one of round 1 and one of round 2
    assert machine.ledger.applied == 8
    assert machine.ledger.applied + machine.ledger.outstanding() + machine.ledger.available(400) == 400


@hypothesis_settings(relaxed, max_examples=60)
@given(st.data())
def test_ranks_leave_and_join_between_rounds(data):
    machine, times = data.draw(jobs(most_ranks=8))
    ranks = len(machine.members)
    changes = data.draw(st.lists(st.tuples(st.integers(0, 300), st.none() | st.integers(0, 7)), max_size=10))
    planned = sorted(changes, key=lambda pair: pair[0])
    tuned = script(
        data.draw(
            interventions(ranks, machine.batch).map(
                lambda events: [(s, e) for s, e in events if not isinstance(e, SharesChanged)]
            )
        )
    )
    fresh = iter(range(ranks, 1000))
    living = set(machine.members)

    def before(cluster, step):
        if planned and planned[0][0] <= step and cluster.between_rounds and not machine.ended:
            _, leaver = planned.pop(0)
            if leaver is None:
                living.add(rank := next(fresh))
                return [RankJoined(rank, machine.version, 3)]
            if others := sorted(living - {0}):
                living.discard(rank := others[leaver % len(others)])
                return [RankLeft(rank)]
        return tuned(cluster, step)

    cluster = VirtualCluster(machine, **times.arguments(ranks), before=before)
    cluster.run()
    assert set(machine.members) == living == set(cluster.stubs)


def test_a_round_does_not_wait_for_the_word_of_the_dead():
    machine = make_machine([4, 4], Settings(4, 1.0), 400)
    first = machine.first_instructions()
    for rank in (0, 1):
        machine.handle(TaskStarted(rank, numbers(first, rank)[0], 0))
        out = machine.handle(TaskFinished(rank, numbers(first, rank)[0], 4))
    assert rounds(out) == [0]
    machine.handle(Contributed(0, 0, numbers(first, 0)[0]))
    machine.handle(RankLeft(1))
    machine.handle(RoundCompleted(0))
    assert (machine.version, machine.ledger.applied) == (1, 4)


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 1)])
def test_what_the_dead_held_goes_out_again(settings):
    machine = make_machine([4, 4], settings, 80)
    lost = [i.task for i in machine.first_instructions() if isinstance(i, AssignTask) and i.rank == 1]
    assert length(span for task in lost for spans in task.slices for span in spans) == 8
    given = machine.handle(RankLeft(1))
    assert machine.ledger.available(80) + machine.ledger.outstanding() == 80
    assert machine.ledger.outstanding() == 8 + length(
        span for i in given if isinstance(i, AssignTask) for spans in i.task.slices for span in spans
    )


# Ranks that leave their loops early.


@hypothesis_settings(relaxed, max_examples=60, phases=[Phase.generate])
@given(st.data())
def test_ranks_leave_their_loops_at_any_moment(data):
    """Those that stay do the work; where none does, the job ends with what was applied. Nothing counts twice."""
    machine, times = data.draw(jobs(most_ranks=8))
    ranks = len(machine.members)
    leaving = data.draw(st.lists(st.integers(0, ranks - 1), max_size=ranks, unique=True))
    steps = [data.draw(st.integers(0, 60) | st.integers(0, 600)) for _ in leaving]
    planned = [*data.draw(interventions(ranks, machine.batch)), *zip(steps, map(RankWithdrew, leaving), strict=True)]
    planned.sort(key=lambda pair: pair[0])
    planned_events = script(planned)

    def before(cluster, step):
        """Once all with a share have left the job ends: nobody is given one any more."""
        due = planned_events(cluster, step)
        return [event for event in due if machine.batch or not isinstance(event, SharesChanged)]

    cluster = VirtualCluster(machine, **times.arguments(ranks), before=before)
    cluster.run()
    assert machine.ended
    assert machine.ledger.outstanding() == 0


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 2), Settings(4, 0.25, 1), Settings(1, 1.0, 1)])
def test_all_leave_and_the_job_ends_at_rest(settings):
    machine = make_machine([4, 2, 2], settings, 800)
    cluster = VirtualCluster(
        machine, **everyday.arguments(3), before=script([(60 + rank, RankWithdrew(rank)) for rank in range(3)])
    )
    cluster.run()
    assert 0 < machine.ledger.applied < 800
    last = cluster.starts[-1]
    assert (last.final, last.drain) == (True, "all ranks have left their loops")


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 2), Settings(4, 0.25, 1), Settings(1, 1.0, 1)])
def test_one_leaves_and_the_others_do_its_work(settings):
    machine = make_machine([4, 2, 2], settings, 400)
    cluster = VirtualCluster(machine, **everyday.arguments(3), before=script([(60, RankWithdrew(0))]))
    cluster.run()
    assert machine.ledger.applied == 400
    assert machine.samples_by_rank[0] < machine.samples_by_rank[1]


def test_a_rank_leaves_its_loop_while_its_part_of_a_complete_round_had_no_samples():
    """A sum lacks nothing then, and its round is booked before anybody hears that the rank has left."""
    machine = make_machine([4, 0], Settings(0), 8)
    first, empty = [i.task for i in machine.first_instructions() if isinstance(i, AssignTask)][:2]
    machine.handle(TaskStarted(0, first.number, 0))
    machine.handle(TaskStarted(1, empty.number, 0))
    machine.handle(RoundCompleted(0, samples=4))
    machine.handle(RankWithdrew(1))
    machine.handle(TaskFinished(1, empty.number, 0))
    assert machine.version == 1
    assert machine.ledger.applied == 4
