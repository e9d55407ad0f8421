"""The state machine: every transition happens, and what cannot happen is an error that tells the story."""

from __future__ import annotations

import pytest
from state_machine_jobs import Times, everyday, script
from virtual import VirtualCluster, make_machine

from hetsync.sync import state_machine as state_machine_module
from hetsync.sync.members import TRANSITIONS
from hetsync.sync.messages import (
    AssignTask,
    Contributed,
    Evaluated,
    RankJoined,
    RankLeft,
    RankWithdrew,
    RoundCompleted,
    Settings,
    SharesChanged,
    StartRound,
    TaskFinished,
    TaskStarted,
)
from hetsync.sync.state_machine import ProtocolError


def test_every_transition_is_exercised(monkeypatch):
    seen = set()

    class Recorded(dict):
        def get(self, pair, default=None):
            seen.add(pair)
            return super().get(pair, default)

    monkeypatch.setattr(state_machine_module, "TRANSITIONS", Recorded(TRANSITIONS))
    late = Times(5, 50, 0.5, 10, 5, 0.01)
    for settings in (Settings(1, 0.25), Settings(2, 1.0), Settings(0)):
        for when in (everyday, late):
            VirtualCluster(make_machine([4, 4, 1], settings, 900, 300), **when.arguments(3)).run()
    # A rank without a share gets one while its work waits for a quorum that it cannot reach alone.
    machine = make_machine([2, 2], Settings(1, 1.0), 200)
    hold = script([(3, SharesChanged({0: 4, 1: 0})), (40, SharesChanged({0: 2, 1: 2}))])
    VirtualCluster(machine, lambda rank, n: 1.0 if rank else 30.0, before=hold).run()
    # Ranks leave their loops in whatever they do.
    for settings in (Settings(1, 0.25), Settings(1, 1.0)):
        for step in range(0, 60, 3):
            machine = make_machine([4, 4, 1, 0], settings, 400)
            leave = script([(step, RankWithdrew(0)), (step, RankWithdrew(3)), (step + 40, RankWithdrew(2))])
            VirtualCluster(machine, **late.arguments(4), before=leave).run()
    assert seen == set(TRANSITIONS)


def working(settings=None, shares=(4, 4)):
    """A state machine whose rank 0 computes its first task; what it told rank 0."""
    machine = make_machine(list(shares), settings or Settings(4, 0.25), 400)
    first = next(i for i in machine.first_instructions() if isinstance(i, AssignTask) and i.rank == 0).task.number
    machine.handle(TaskStarted(0, first, 0))
    return machine, first


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (lambda first: TaskStarted(0, first, 0), "STARTED while COMPUTING"),
        (lambda first: TaskStarted(1, 99, 0), "rank 1 started another task"),
        (lambda first: TaskFinished(0, first + 1, 4), "rank 0 finished another task"),
        (lambda first: TaskFinished(1, first, 4), "rank 1 finished another task"),
        (lambda first: Contributed(0, 0, first), "no such round"),
        (lambda first: RoundCompleted(0), "no such round"),
        (lambda first: Evaluated(0, 0, {}), "rank 0 was not asked to evaluate round 0"),
        (lambda first: TaskStarted(7, first, 0), "rank 7 is no member"),
        (lambda first: RankLeft(7), "rank 7 is no member"),
        (lambda first: RankJoined(1, 0, 4), "rank 1 is a member already"),
        (lambda first: SharesChanged({7: 4}), "rank 7 is no member"),
    ],
)
def test_an_impossible_event_tells_the_story(event, what):
    machine, first = working()
    with pytest.raises(ProtocolError, match=what) as error:
        machine.handle(event(first))
    assert str(TaskStarted(0, first, 0)) in str(error.value)
    assert str(event(first)) in str(error.value)


def test_a_rank_below_its_floor_is_an_error():
    machine = make_machine([4], Settings(4), 400, version=5)
    (give, *_) = machine.first_instructions()
    with pytest.raises(ProtocolError, match="below its floor 5"):
        machine.handle(TaskStarted(0, give.task.number, 4))


def test_who_was_not_asked_to_contribute_is_an_error():
    machine, first = working(Settings(4, 0.25))
    assert [i for i in machine.handle(TaskFinished(0, first, 4)) if isinstance(i, StartRound)]
    second = machine.members[1].queued[0].task.number
    machine.handle(TaskStarted(1, second, 0))
    machine.handle(TaskFinished(1, second, 4))
    with pytest.raises(ProtocolError, match="was not asked"):
        machine.handle(Contributed(1, 0, second))


def test_staleness_over_the_bound_is_an_error():
    """Even if the rules above failed, no such contribution is booked."""
    machine, first = working(Settings(1, 0.25))
    machine.handle(TaskFinished(0, first, 4))
    machine.members[0].ready[0].version = -2
    with pytest.raises(ProtocolError, match="is applied with staleness 2"):
        machine.handle(Contributed(0, 0, first))


def test_waited_for_names_the_ranks_at_work():
    machine, _ = working()
    assert machine.waited_for() == [0, 1]
