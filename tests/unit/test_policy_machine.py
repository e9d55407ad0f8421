"""The policy's state machine: every transition happens, and what cannot happen is an error that tells the story."""

from __future__ import annotations

import pytest
from policy_jobs import Times, everyday, script
from virtual import VirtualCluster, make_policy

from hetsync.sync import policy as policy_module
from hetsync.sync.members import TRANSITIONS
from hetsync.sync.messages import (
    Began,
    Completed,
    Finished,
    Give,
    Joined,
    Left,
    Reshared,
    Scored,
    Settings,
    StartRound,
    Took,
)
from hetsync.sync.story import ProtocolError


def test_every_transition_is_exercised(monkeypatch):
    seen = set()

    class Recorded(dict):
        def get(self, pair, default=None):
            seen.add(pair)
            return super().get(pair, default)

    monkeypatch.setattr(policy_module, "TRANSITIONS", Recorded(TRANSITIONS))
    late = Times(5, 50, 0.5, 10, 5, 0.01)
    for settings in (Settings(1, 0.25), Settings(2, 1.0), Settings(0)):
        for when in (everyday, late):
            VirtualCluster(make_policy([4, 4, 1], settings, 900, 300), **when.arguments(3)).run()
    # A rank without a share gets one while its work waits for a quorum that it cannot reach alone.
    policy = make_policy([2, 2], Settings(1, 1.0), 200)
    hold = script([(3, Reshared({0: 4, 1: 0})), (40, Reshared({0: 2, 1: 2}))])
    VirtualCluster(policy, lambda rank, n: 1.0 if rank else 30.0, before=hold).run()
    assert seen == set(TRANSITIONS)


def working(settings=None, shares=(4, 4)):
    """A policy whose rank 0 computes its first piece; what it told rank 0."""
    policy = make_policy(list(shares), settings or Settings(4, 0.25), 400)
    first = next(i for i in policy.begin() if isinstance(i, Give) and i.rank == 0).piece.number
    policy.on(Began(0, first, 0))
    return policy, first


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (lambda first: Began(0, first, 0), "BEGAN while COMPUTING"),
        (lambda first: Began(1, 99, 0), "rank 1 began another piece"),
        (lambda first: Finished(0, first + 1, 4), "rank 0 finished another piece"),
        (lambda first: Finished(1, first, 4), "rank 1 finished another piece"),
        (lambda first: Took(0, 0, first), "no such round"),
        (lambda first: Completed(0), "no such round"),
        (lambda first: Scored(0, 0, {}), "rank 0 was not asked to evaluate round 0"),
        (lambda first: Began(7, first, 0), "rank 7 is no member"),
        (lambda first: Left(7), "rank 7 is no member"),
        (lambda first: Joined(1, 0, 4), "rank 1 is a member already"),
        (lambda first: Reshared({7: 4}), "rank 7 is no member"),
    ],
)
def test_an_impossible_event_tells_the_story(event, what):
    policy, first = working()
    with pytest.raises(ProtocolError, match=what) as error:
        policy.on(event(first))
    assert str(Began(0, first, 0)) in str(error.value)
    assert str(event(first)) in str(error.value)


def test_a_rank_below_its_floor_is_an_error():
    policy = make_policy([4], Settings(4), 400, version=5)
    (give, *_) = policy.begin()
    with pytest.raises(ProtocolError, match="below its floor 5"):
        policy.on(Began(0, give.piece.number, 4))


def test_who_was_not_asked_to_contribute_is_an_error():
    policy, first = working(Settings(4, 0.25))
    assert [i for i in policy.on(Finished(0, first, 4)) if isinstance(i, StartRound)]
    second = policy.members[1].held[0].piece.number
    policy.on(Began(1, second, 0))
    policy.on(Finished(1, second, 4))
    with pytest.raises(ProtocolError, match="was not asked"):
        policy.on(Took(1, 0, second))


def test_staleness_over_the_bound_is_an_error():
    """Even if the rules above failed, no such contribution is booked."""
    policy, first = working(Settings(1, 0.25))
    policy.on(Finished(0, first, 4))
    policy.members[0].ready[0].version = -2
    with pytest.raises(ProtocolError, match="is applied with staleness 2"):
        policy.on(Took(0, 0, first))


def test_waited_for_names_the_ranks_at_work():
    policy, _ = working()
    assert policy.waited_for() == [0, 1]
