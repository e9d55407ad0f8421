"""The simulator against the engine on a scripted sequence of events: same rounds, same contributors, same staleness.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_simulator.py

The simulator says in which order ranks finish their tasks. The engine's ranks then finish theirs in that very order:
each waits for its turn, which comes when all that the last turn has set off is over. Both sides' state machines are
heard.
(Times are the simulator's own; benchmarks/simulator.py compares them.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from training import BATCH, SAMPLES, train, unequal_shares

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup, LognormalJitter
from hetsync.plane.base import Plane
from hetsync.simulate import Runtime, Scenario, Simulation
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.members import Activity
from hetsync.sync.messages import Contributed, Event, Instruction, StartRound, TaskFinished, TaskStarted
from hetsync.sync.milestones import Milestone
from hetsync.sync.state_machine import LEAST_TASKS_HELD, RoundStateMachine
from hetsync.train.session import Session

pytestmark = pytest.mark.mpi

REST = 100  # samples, where no round would end by itself
AT_ONCE = Runtime(0.0, 0.0, 0.0, 0.0)


@dataclass
class Story:
    """What one state machine took in and decided."""

    finished: list[tuple[int, int]] = field(default_factory=list)  # (rank, task), in order
    started: set[Event] = field(default_factory=set)  # with versions
    contributed: set[Event] = field(default_factory=set)
    rounds: list[StartRound] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    """Of the state machine that comes next; empty it between two."""
    story, handle = Story(), RoundStateMachine.handle

    def heard(machine: RoundStateMachine, event: Event) -> list[Instruction]:
        said = handle(machine, event)
        if isinstance(event, TaskFinished):
            story.finished.append((event.rank, event.task))
        elif isinstance(event, TaskStarted):
            story.started.add(event)
        elif isinstance(event, Contributed):
            story.contributed.add(event)
        story.rounds += [instruction for instruction in said if isinstance(instruction, StartRound)]
        story.staleness = machine.staleness
        return said

    monkeypatch.setattr(RoundStateMachine, "handle", heard)
    return story


def simulated(ranks: int, sync: SyncConfig) -> None:
    def next_milestone(position: int) -> Milestone:
        return Milestone(REST, "rest") if position < REST else Milestone(SAMPLES, "rest", True)

    cluster = Cluster("script", "made up", (DeviceGroup("device", ranks),), None, LognormalJitter(0.7))
    profiles = [RankProfile("device", "here", StepTime(0.0, 1.0))] * ranks
    simulation = Simulation(Scenario(cluster, profiles, sync, BATCH, SAMPLES, next_milestone, runtime=AT_ONCE))
    simulation.advance()
    assert simulation.machine.ledger.applied == SAMPLES


class Turns:
    """Lets the ranks of the engine finish in a given order. Rank 0's communication thread gives the turns away."""

    def __init__(self, order: Sequence[int]) -> None:
        from mpi4py import MPI

        self._turns = MPI.COMM_WORLD.Dup()
        self._order = order
        self._given = 0
        self._finished = 0
        self._kept_back: dict[int, list[Event]] = {}
        self._work: Any = None  # the last that was waited for

    def heard(self, coordinator: Coordinator, events: list[Event]) -> list[Event]:
        """What the coordinator may hear now: of a rank that goes on at once, never the end of a task alone.

        In the engine these are two words of two moments, between which a round might land on a slow machine.
        """
        first = events[0]
        rank = getattr(first, "rank", None)
        if rank is None:
            return events
        events = [*self._kept_back.pop(rank, []), *events]
        if isinstance(events[-1], TaskFinished) and self._goes_on(coordinator.machine, rank):
            self._kept_back[rank] = events
            return []
        return events

    def _goes_on(self, machine: RoundStateMachine, rank: int) -> bool:
        member = machine.members[rank]
        if not member.queued:
            return False
        task, unapplied = member.queued[0].task, len(member.ready) + 1 + len(member.in_flight)
        return machine.version >= task.not_before and unapplied <= task.delay_bound

    def give(self, machine: RoundStateMachine, events: Sequence[Event]) -> None:
        """The next turn, where the last is over and nobody is about to do anything."""
        self._finished += sum(isinstance(event, TaskFinished) for event in events)
        moving = any(member.activity is Activity.STARTING for member in machine.members.values())
        if moving or machine._rounds or self._finished < self._given or self._given == len(self._order):
            return
        rank = self._order[self._given]
        if machine.members[rank].activity is not Activity.COMPUTING:
            return  # all are at rest, and about to be given work
        self._turns.send(machine.version, rank)
        self._given += 1

    def wait(self, session: Session, slice_number: int) -> None:
        """Before the first slice of a task: until it is the rank's turn, and all rounds have landed here."""
        if session.tasks.work is self._work:
            return
        self._work = session.tasks.work
        engine, alone = session.engine, session.plane.size == 1
        pause = engine._communicator.poll if alone else partial(time.sleep, 1e-3)  # alone, this thread polls
        while not self._turns.iprobe(0):
            engine._raise_failure()
            pause()
        version = self._turns.recv(source=0)
        while engine._shared.landed < version:
            pause()

    def close(self) -> None:
        self._turns.Free()


@pytest.mark.parametrize(
    ("delay_bound", "quorum", "accumulation", "grace"),
    [(4, 0.25, 1, 0), (1, 0.25, 1, 0), (2, 1.0, 1, 0), (None, 0.1, 1, 0), (3, 0.5, 2, 0), (4, 0.25, 1, 1)],
)
def test_same_order_same_rounds(
    plane: Plane,
    story: Story,
    monkeypatch: pytest.MonkeyPatch,
    delay_bound: int | None,
    quorum: float,
    accumulation: int,
    grace: int,
) -> None:
    sync = SyncConfig(delay_bound, quorum, accumulation, grace, rebalance=False, pins=unequal_shares(plane.size))
    simulated(plane.size, sync)
    expected = replace(story)
    story.__init__()  # type: ignore[misc]

    turns, handle = Turns([rank for rank, _ in expected.finished]), Coordinator.handle

    def listen(coordinator: Coordinator, events: list[Event]) -> None:
        events = turns.heard(coordinator, events)
        if events:
            handle(coordinator, events)
            turns.give(coordinator.machine, events)

    monkeypatch.setattr(Coordinator, "handle", listen)
    # The engine's tasks last as long as the simulator's here, for which the next one is enough.
    monkeypatch.setattr("hetsync.sync.coordinator.tasks_held", lambda *told: LEAST_TASKS_HELD)
    train(plane, sync, rests=[REST], on_slice=turns.wait)
    if plane.rank == 0:
        assert len(expected.rounds) > 3
        assert story.rounds == expected.rounds
        assert story.finished == expected.finished
        assert story.contributed == expected.contributed
        assert story.started == expected.started
        assert story.staleness == expected.staleness
    plane.barrier()
    turns.close()
