"""How long a round whose quorum is there waits for ranks that have finished nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_machine_jobs import jobs, relaxed
from virtual import VirtualCluster, make_machine

from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError
from hetsync.sync.members import Activity
from hetsync.sync.messages import (
    NO_BOUND,
    Event,
    RankLeft,
    RankWithdrew,
    Settings,
    SettingsChanged,
    SharesChanged,
    StartRound,
    TaskFinished,
    TaskStarted,
)
from hetsync.sync.state_machine import RoundStateMachine

GRACE = Settings(4, 0.25, grace=1)
SHARE = 4


class ByHand:
    """A machine whose ranks all compute their first task."""

    def __init__(self, settings: Settings = GRACE, ranks: int = 3) -> None:
        self.machine: RoundStateMachine = make_machine([SHARE] * ranks, settings, 4000)
        self.machine.first_instructions()
        for rank in range(ranks):
            self.start(rank)

    def handle(self, event: Event) -> list[frozenset[int]]:
        """Contributors of the rounds that start."""
        return [told.contributors for told in self.machine.handle(event) if isinstance(told, StartRound)]

    def start(self, rank: int) -> None:
        self.handle(TaskStarted(rank, self.machine.members[rank].queued[0].task.number, self.machine.version))

    def finish(self, rank: int) -> list[frozenset[int]]:
        current = self.machine.members[rank].current
        assert current is not None
        found = self.handle(TaskFinished(rank, current.task.number, SHARE))
        self.start(rank)
        return found


def test_without_grace_a_round_starts_with_its_quorum() -> None:
    assert ByHand(Settings(4, 0.25)).finish(0) == [frozenset({0})]


def test_a_round_waits_until_everybody_has_finished_something() -> None:
    job = ByHand()
    assert job.finish(0) == job.finish(2) == []
    assert job.finish(1) == [frozenset({0, 1, 2})]


def test_a_round_waits_no_longer_than_until_somebody_has_used_the_grace() -> None:
    job = ByHand()
    assert job.finish(0) == job.finish(2) == []
    assert job.finish(0) == [frozenset({0, 2})]
    twice = ByHand(Settings(8, 0.25, grace=2))
    assert twice.finish(0) == twice.finish(0) == []
    assert twice.finish(0) == [frozenset({0})]


def test_grace_comes_after_the_quorum() -> None:
    job = ByHand(Settings(4, 0.5, grace=1))
    assert job.finish(0) == job.finish(0) == []  # a third of a full set
    assert job.finish(1) == [frozenset({0, 1})]


@pytest.mark.parametrize(
    "event",
    [RankLeft(2), RankWithdrew(2), SettingsChanged(Settings(4, 0.25)), SettingsChanged(Settings(2, 0.25, grace=1))],
    ids=["leaves", "withdraws", "no grace", "a smaller bound"],
)
def test_who_waits_for_nobody_any_more_starts(event) -> None:
    job = ByHand()
    job.finish(0)
    job.finish(1)
    assert job.handle(event) == [frozenset({0, 1})]


def test_who_has_no_share_is_not_awaited_once_its_tasks_are_done() -> None:
    job = ByHand()
    assert job.handle(SharesChanged({0: 6, 1: 6, 2: 0})) == []
    job.finish(2)
    state = job.machine.members[2]
    assert not job.finish(0)
    assert job.finish(1) == [frozenset({0, 1, 2})]
    assert state.activity is not Activity.RESTING  # it has a task that it was given before


@pytest.mark.parametrize(("bound", "within"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (NO_BOUND, 3)])
def test_grace_leaves_room_within_the_bound(bound: int, within: int) -> None:
    assert Settings(bound, 0.25, grace=3).grace_within_bound == within


def idle(settings: Settings, slices: float, lengths: tuple[float, ...]) -> float:
    """Of the first rank, in the middle of the job: a part of its time. Ranks begin one after another, their tasks take
    so many slices, and a round `slices`."""
    machine = make_machine([SHARE] * len(lengths), settings, len(lengths) * SHARE * 200)
    begun: dict[int, list[float]] = {rank: [] for rank in range(len(lengths))}

    def lasts(rank: int, samples: int) -> float:
        late = 0.0 if begun[rank] else 0.1 * rank
        begun[rank].append(cluster.now)
        return lengths[rank] * samples / SHARE + late

    cluster = VirtualCluster(machine, lasts, communicate=lambda: slices)
    cluster.run()
    middle = begun[0][10:160]
    return 1 - lengths[0] * (len(middle) - 1) / (middle[-1] - middle[0])


@pytest.mark.each_value
@pytest.mark.parametrize("bound", range(1, 9))
@pytest.mark.parametrize("slices", [0.01, 0.5, 0.95, 1.05, 1.5, 1.95, 2.05, 2.5, 2.95, 3.5, 6.0, 11.0])
def test_it_costs_no_waits_however_long_a_round_takes(bound: int, slices: float) -> None:
    without = idle(Settings(bound, 0.25), slices, (1.0,) * 4)
    for grace in (1, 2, 3):
        assert idle(Settings(bound, 0.25, grace=grace), slices, (1.0,) * 4) <= without + 0.01


@pytest.mark.each_value
@pytest.mark.parametrize("bound", [3, 4, 6])
@pytest.mark.parametrize("slices", [0.01, 0.7, 1.3, 1.9, 2.4, 5.0])
@pytest.mark.parametrize("others", [(0.97, 1.03, 1.1), (1.3, 1.7, 2.4), (1.0, 1.0, 9.0)], ids=str)
def test_it_costs_no_waits_where_some_have_longer_tasks(bound: int, slices: float, others: tuple[float, ...]) -> None:
    """Until a rank has used its grace: here nobody is ready as soon as the fastest."""
    without, with_grace = (idle(Settings(bound, 0.25, grace=grace), slices, (1.0, *others)) for grace in (0, 1))
    assert with_grace <= without + 0.02


@relaxed
@given(jobs(st.builds(Settings, st.integers(3, 9), st.floats(0.01, 0.5), grace=st.just(1)), most_ranks=8))
def test_who_puts_two_tasks_or_more_into_a_round_has_used_it(job) -> None:
    """Away from rests: a round without some who work has one that has finished twice."""
    machine, times = job
    rounds = []
    new_round = machine._new_round

    def watched(*given, **named):
        started = new_round(*given, **named)
        members = machine.members
        if started.drain is None:
            awaited = [rank for rank, member in members.items() if member.working and not member.ready]
            rounds.append((awaited, max(len(member.ready) for member in members.values())))
        return started

    machine._new_round = watched
    VirtualCluster(machine, **times.arguments(len(machine.members))).run()
    assert all(most >= 2 for awaited, most in rounds if awaited)


@pytest.mark.parametrize(("bound", "grace", "most"), [(0, 1, "give 0,"), (2, 1, "give 0,"), (4, 2, "give 0 to 1,")])
def test_grace_that_would_not_be_in_force_is_refused(bound: int, grace: int, most: str) -> None:
    with pytest.raises(UserError, match=f"sync.grace is {grace}, but sync.delay_bound {bound} has room for .*{most}"):
        SyncConfig(bound, grace=grace)
    assert SyncConfig(bound, grace="auto").first_grace == 0


def test_grace_is_refused_where_rounds_wait_for_all_anyway() -> None:
    with pytest.raises(UserError, match=r"with sync\.quorum 1 rounds wait for all anyway"):
        SyncConfig(4, 1.0, grace=1)


def test_what_is_in_force_is_told() -> None:
    assert Settings(2, 0.25, grace=1).in_force.grace == 0
    assert Settings(4, 0.25, fragments=2, grace=1).in_force == Settings(4, 0.25, fragments=2, grace=1)
    assert Settings(0, 0.25, fragments=2, grace=1).in_force == Settings(0, 0.25)
