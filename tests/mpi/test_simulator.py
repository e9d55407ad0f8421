"""The simulator against the engine on a scripted sequence of events: same rounds, same contributors, same staleness.

mpirun -np N python -m pytest --with-mpi tests/mpi/test_simulator.py

The simulator says in which order ranks finish their pieces. The engine's ranks then finish theirs in that very order:
each waits for its turn, which comes when all that the last turn has set off is over. Both sides' policies are heard.
(Times are the simulator's own; benchmarks/simulator.py compares them.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from training import BATCH, SAMPLES, train, unequal_shares

from hetsync.config import SyncConfig
from hetsync.plane.base import Plane
from hetsync.profiling.cluster import Cluster, DeviceGroup, LognormalJitter
from hetsync.session import RankProfile, Session
from hetsync.simulate import Runtime, Scenario, Simulation
from hetsync.slicing import StepTime
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.members import Activity
from hetsync.sync.messages import Began, Event, Finished, Instruction, StartRound, Took
from hetsync.sync.milestones import Milestone
from hetsync.sync.policy import Policy

pytestmark = pytest.mark.mpi

REST = 100  # samples, where no round would end by itself
AT_ONCE = Runtime(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass
class Story:
    """What one policy heard and said."""

    finished: list[tuple[int, int]] = field(default_factory=list)  # (rank, piece), in order
    began: set[Event] = field(default_factory=set)  # with versions
    took: set[Event] = field(default_factory=set)
    rounds: list[StartRound] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    """Of the policy that is listened to next; empty it between two."""
    story, on = Story(), Policy.on

    def heard(policy: Policy, event: Event) -> list[Instruction]:
        said = on(policy, event)
        if isinstance(event, Finished):
            story.finished.append((event.rank, event.piece))
        elif isinstance(event, Began):
            story.began.add(event)
        elif isinstance(event, Took):
            story.took.add(event)
        story.rounds += [instruction for instruction in said if isinstance(instruction, StartRound)]
        story.staleness = policy.staleness
        return said

    monkeypatch.setattr(Policy, "on", heard)
    return story


def simulated(ranks: int, sync: SyncConfig) -> None:
    def next_milestone(position: int) -> Milestone:
        return Milestone(REST, "rest") if position < REST else Milestone(SAMPLES, "rest", True)

    cluster = Cluster("script", "made up", (DeviceGroup("device", ranks),), None, LognormalJitter(0.7))
    profiles = [RankProfile("device", "here", StepTime(0.0, 1.0))] * ranks
    simulation = Simulation(Scenario(cluster, profiles, sync, BATCH, SAMPLES, next_milestone, runtime=AT_ONCE))
    simulation.advance()
    assert simulation.policy.ledger.applied == SAMPLES


class Turns:
    """Lets the ranks of the engine finish in a given order. Rank 0's communication thread gives the turns away."""

    def __init__(self, order: Sequence[int]) -> None:
        from mpi4py import MPI

        self._turns = MPI.COMM_WORLD.Dup()
        self._order = order
        self._given = 0
        self._finished = 0
        self._kept_back: dict[int, list[Event]] = {}
        self._piece: Any = None

    def heard(self, coordinator: Coordinator, events: list[Event]) -> list[Event]:
        """What the coordinator may hear now: of a rank that goes on at once, never the end of a piece alone.

        In the engine these are two words of two moments, between which a round might land on a slow machine.
        """
        first = events[0]
        rank = getattr(first, "rank", None)
        if rank is None:
            return events
        events = [*self._kept_back.pop(rank, []), *events]
        if isinstance(events[-1], Finished) and self._goes_on(coordinator.policy, rank):
            self._kept_back[rank] = events
            return []
        return events

    def _goes_on(self, policy: Policy, rank: int) -> bool:
        member = policy.members[rank]
        if not member.held:
            return False
        piece, unapplied = member.held[0].piece, len(member.ready) + 1 + len(member.flying)
        return policy.version >= piece.not_before and unapplied <= piece.delay_bound

    def give(self, policy: Policy, events: Sequence[Event]) -> None:
        """The next turn, where the last is over and nobody is about to do anything."""
        self._finished += sum(isinstance(event, Finished) for event in events)
        moving = any(member.activity is Activity.STARTING for member in policy.members.values())
        if moving or policy._rounds or self._finished < self._given or self._given == len(self._order):
            return
        rank = self._order[self._given]
        if policy.members[rank].activity is not Activity.COMPUTING:
            return  # all are at rest, and about to be given work
        self._turns.send(policy.version, rank)
        self._given += 1

    def wait(self, session: Session, slice_number: int) -> None:
        """Before the first slice of a piece: until it is the rank's turn, and all rounds have landed here."""
        if session._piece is self._piece:
            return
        self._piece = session._piece
        while not self._turns.iprobe(0):
            session.engine._raise_failure()
            time.sleep(1e-3)
        version = self._turns.recv(source=0)
        while session.engine._landed < version:
            time.sleep(1e-3)

    def close(self) -> None:
        self._turns.Free()


@pytest.mark.parametrize(
    ("delay_bound", "quorum", "accumulation"), [(4, 0.25, 1), (1, 0.25, 1), (2, 1.0, 1), (None, 0.1, 1), (3, 0.5, 2)]
)
def test_same_order_same_rounds(
    plane: Plane,
    story: Story,
    monkeypatch: pytest.MonkeyPatch,
    delay_bound: int | None,
    quorum: float,
    accumulation: int,
) -> None:
    sync = SyncConfig(delay_bound, quorum, accumulation, rebalance=False, pins=unequal_shares(plane.size))
    simulated(plane.size, sync)
    expected = replace(story)
    story.__init__()  # type: ignore[misc]

    turns, on = Turns([rank for rank, _ in expected.finished]), Coordinator.on

    def listen(coordinator: Coordinator, events: list[Event]) -> None:
        events = turns.heard(coordinator, events)
        if events:
            on(coordinator, events)
            turns.give(coordinator.policy, events)

    monkeypatch.setattr(Coordinator, "on", listen)
    train(plane, sync, rests=[REST], on_slice=turns.wait)
    if plane.rank == 0:
        assert len(expected.rounds) > 3
        assert story.rounds == expected.rounds
        assert story.finished == expected.finished
        assert story.took == expected.took
        assert story.began == expected.began
        assert story.staleness == expected.staleness
    plane.barrier()
    turns.close()
