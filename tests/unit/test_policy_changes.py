"""The policy while settings, shares and members change under it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from policy_jobs import (
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
from virtual import VirtualCluster, make_policy

from hetsync.data.ledger import length
from hetsync.sync.members import Activity
from hetsync.sync.messages import (
    Began,
    Completed,
    DrainRequested,
    Finished,
    Give,
    Joined,
    Left,
    Reshared,
    Settings,
    Took,
    Tuned,
)


@hypothesis_settings(relaxed, max_examples=120)
@given(st.data())
def test_settings_shares_and_drains_change_at_any_moment(data):
    policy, times = data.draw(jobs(most_ranks=8))
    planned = data.draw(interventions(len(policy.members), policy.batch))
    cluster = VirtualCluster(policy, **times.arguments(len(policy.members)), before=script(planned))
    cluster.run()


@hypothesis_settings(relaxed, max_examples=100)
@given(share_lists(3, 4), any_settings, st.integers(10, 60), st.data())
def test_interventions_in_any_order_of_events(shares, settings, total, data):
    policy = make_policy(shares, settings, total, 25)
    planned = [(step // 3, event) for step, event in data.draw(interventions(len(shares), sum(shares)))]
    seconds = st.sampled_from([0.0, 1.0, 3.0, 20.0])
    VirtualCluster(policy, **arguments(lambda: data.draw(seconds)), before=script(planned)).run()


@pytest.mark.parametrize("first", [Settings(0, 1.0, 2), Settings(4, 0.25, 1)])
def test_the_two_modes_never_overlap(first):
    second = Settings(4, 0.25, 1) if first.synchronous else Settings(0, 1.0, 2)
    policy = make_policy([4, 2, 2], first, 800)
    before = script([(60, Tuned(second)), (300, Tuned(first))])
    cluster = VirtualCluster(policy, **everyday.arguments(3), before=before)
    cluster.run()
    modes = [start.synchronous for start in cluster.starts]
    switches = [i for i in range(1, len(modes)) if modes[i] != modes[i - 1]]
    assert len(switches) == 2
    assert all(cluster.starts[i - 1].drain == "mode change" for i in switches)
    assert policy.settings == first


def test_taking_a_mode_change_back_leaves_the_mode():
    policy = make_policy([4, 2], Settings(4), 400)
    before = script([(30, Tuned(Settings(0))), (31, Tuned(Settings(2)))])
    cluster = VirtualCluster(policy, **everyday.arguments(2), before=before)
    cluster.run()
    assert policy.settings == Settings(2)
    assert not any(start.synchronous for start in cluster.starts)


@relaxed
@given(any_settings, st.integers(0, 400), st.integers(0, 2))
def test_no_drain_request_is_forgotten(settings, step, also):
    """Pre-emption asks once: also while all ranks are coming to rest for another reason."""
    policy = make_policy([4, 2, 2], settings, 200, 60)
    requests = [(step, DrainRequested("stop")), (step, DrainRequested("save")), (step, Tuned(Settings(3)))]
    planned = script(requests[: also + 1])
    asked = []

    def before(cluster, now):
        due = planned(cluster, now)
        if not policy.rests.next.final or policy.ledger.frontier < 200:  # the end answers for any
            asked.extend(event.reason for event in due if isinstance(event, DrainRequested))
        return due

    cluster = VirtualCluster(policy, **everyday.arguments(3), before=before)
    cluster.run()
    assert [reason for _, reason in cluster.drains if reason in ("stop", "save")] == asked


def test_a_lowered_bound_holds_for_work_that_may_have_begun_unheard():
    """A rank computes a piece with bound 8 and holds one with bound 1. It may have begun that one from version 1,
    with the word of it still on its way: version 1 + 2 rounds would be too late for it."""
    policy = make_policy([4, 4], Settings(8, 0.25), 400)
    first = policy.begin()
    (a, a2), (b, b2) = numbers(first, 0), numbers(first, 1)
    policy.on(Tuned(Settings(1, 0.25)))
    policy.on(Began(1, b, 0))
    out = policy.on(Finished(1, b, 4))
    (tight,) = numbers(out, 1)  # the piece with bound 1
    assert rounds(out) == [0]
    policy.on(Began(1, b2, 0))
    policy.on(Took(1, 0, b))
    policy.on(Completed(0))
    policy.on(Began(0, a, 1))
    assert rounds(policy.on(Finished(0, a, 4))) == []
    policy.on(Began(0, a2, 1))
    out = policy.on(Finished(1, b2, 4)) + policy.on(Began(1, tight, 1))  # what was on its way
    assert rounds(out) == [1]


def test_a_rank_that_gets_a_share_again_is_not_expected_to_work_beyond_its_bound():
    """It rests with D + 1 contributions that wait; the quorum is out of its reach; nobody else works either."""
    policy = make_policy([7, 1], Settings(1, 1.0), 400)

    def before(cluster, step):
        resting = cluster.policy.members[1].activity is Activity.RESTING
        if not before.taken:
            before.taken = True
            return [Reshared({0: 8, 1: 0})]
        if resting and not before.given:
            before.given = True
            assert len(cluster.policy.members[1].ready) == 2
            return [Reshared({0: 2, 1: 6})]
        return []

    before.taken = before.given = False
    VirtualCluster(policy, lambda rank, n: 1.0 if rank else 30.0, before=before).run()
    assert before.given


# Membership.


def test_a_rank_that_leaves_between_a_synchronous_sum_and_its_word_gives_nothing_back_twice():
    policy = make_policy([4, 4], Settings(0, 1.0), 400)
    first = policy.begin()
    for rank in (0, 1):
        policy.on(Began(rank, numbers(first, rank)[0], 0))
    policy.on(Completed(0))
    policy.on(Left(1))  # its piece of round 0 is applied; it holds one of round 1 and one of round 2
    assert policy.ledger.applied == 8
    assert policy.ledger.applied + policy.ledger.outstanding() + policy.ledger.available(400) == 400


@hypothesis_settings(relaxed, max_examples=120)
@given(st.data())
def test_ranks_leave_and_join_between_rounds(data):
    policy, times = data.draw(jobs(most_ranks=8))
    ranks = len(policy.members)
    changes = data.draw(st.lists(st.tuples(st.integers(0, 300), st.none() | st.integers(0, 7)), max_size=10))
    planned = sorted(changes, key=lambda pair: pair[0])
    tuned = script(
        data.draw(
            interventions(ranks, policy.batch).map(
                lambda events: [(s, e) for s, e in events if not isinstance(e, Reshared)]
            )
        )
    )
    fresh = iter(range(ranks, 1000))
    living = set(policy.members)

    def before(cluster, step):
        if planned and planned[0][0] <= step and cluster.between_rounds and not policy.ended:
            _, leaver = planned.pop(0)
            if leaver is None:
                living.add(rank := next(fresh))
                return [Joined(rank, policy.version, 3)]
            if others := sorted(living - {0}):
                living.discard(rank := others[leaver % len(others)])
                return [Left(rank)]
        return tuned(cluster, step)

    cluster = VirtualCluster(policy, **times.arguments(ranks), before=before)
    cluster.run()
    assert set(policy.members) == living == set(cluster.nodes)


def test_a_round_does_not_wait_for_the_word_of_the_dead():
    policy = make_policy([4, 4], Settings(4, 1.0), 400)
    first = policy.begin()
    for rank in (0, 1):
        policy.on(Began(rank, numbers(first, rank)[0], 0))
        out = policy.on(Finished(rank, numbers(first, rank)[0], 4))
    assert rounds(out) == [0]
    policy.on(Took(0, 0, numbers(first, 0)[0]))
    policy.on(Left(1))
    policy.on(Completed(0))
    assert (policy.version, policy.ledger.applied) == (1, 4)


@pytest.mark.parametrize("settings", [Settings(0, 1.0, 1), Settings(4, 0.25, 1)])
def test_what_the_dead_held_goes_out_again(settings):
    policy = make_policy([4, 4], settings, 80)
    lost = [i.piece for i in policy.begin() if isinstance(i, Give) and i.rank == 1]
    assert length(span for piece in lost for spans in piece.slices for span in spans) == 8
    given = policy.on(Left(1))
    assert policy.ledger.available(80) + policy.ledger.outstanding() == 80
    assert policy.ledger.outstanding() == 8 + length(
        span for i in given if isinstance(i, Give) for spans in i.piece.slices for span in spans
    )
