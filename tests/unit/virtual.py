"""A virtual cluster for the policy: ranks with scripted speeds, messages with scripted delays, one event queue.

It keeps books of its own (what was begun from which version, which samples reached the anchor) and compares
them with the policy's at every step, so a test only has to run it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hetsync.data.ledger import Ledger, Span, length
from hetsync.sync.members import Activity
from hetsync.sync.messages import (
    Completed,
    Event,
    Finished,
    Give,
    Instruction,
    Joined,
    Left,
    Piece,
    Scored,
    Settings,
    StartRound,
)
from hetsync.sync.milestones import Evaluation, marks_every, rests_at
from hetsync.sync.policy import Policy
from hetsync.sync.worker import Worker


@dataclass
class Node:
    """One rank: its main thread (`worker`, `computing`, `finished`) and its communication thread (the rest)."""

    worker: Worker
    computing: bool = False
    finished: Finished | None = None  # synchronous: gradients are there, the round is not complete
    rounds: deque[StartRound] = field(default_factory=deque)  # heard of, not landed
    joined: bool = False  # the first of these
    snapshot: int | None = None  # a round whose anchor it has not evaluated yet


@dataclass
class Flight:
    """A round between its start and its sum."""

    start: StartRound
    missing: set[int]  # ranks that have not joined
    landing: set[int]  # ranks that take part and have not landed
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    summed: bool = False


class VirtualCluster:
    """Runs a policy to its end. `compute(rank, samples)` and the other callables return virtual seconds.

    Delays differ from message to message; from one sender to one receiver order is kept, as MPI keeps it.
    `land` is the time from a sum's completion to a rank's noticing it. `before(cluster, step)` returns events
    to slip in ahead of a step.
    """

    def __init__(
        self,
        policy: Policy,
        compute: Callable[[int, int], float],
        delay: Callable[[], float] = lambda: 0.0,
        communicate: Callable[[], float] = lambda: 0.0,
        land: Callable[[], float] = lambda: 0.0,
        before: Callable[[VirtualCluster, int], list[Event]] = lambda cluster, step: [],
        evaluate: Callable[[int], float] = lambda rank: 0.0,
    ) -> None:
        self.policy, self.compute, self.evaluate, self.before = policy, compute, evaluate, before
        self.delay, self.communicate, self.land = delay, communicate, land
        self.now = 0.0
        self.nodes = {rank: Node(Worker(rank, policy.version)) for rank in policy.members}
        self.busy = dict.fromkeys(policy.members, 0.0)
        self.drains: list[tuple[int, str]] = []  # (samples applied, reason)
        self.starts: list[StartRound] = []
        self.evaluations: list[Evaluation] = []
        self.flights: dict[int, Flight] = {}
        self.staleness: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()  # pieces by rank
        self.round_spans: dict[int, list[Span]] = {}
        self.applied = bytearray(policy.ledger.total)
        self.applied[: policy.ledger.applied] = b"\1" * policy.ledger.applied
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._last: dict[tuple[object, object], float] = {}  # (sender, receiver) -> last arrival
        self._pieces: dict[int, Piece] = {}
        self._began: dict[int, int] = {}  # piece -> version

    def run(self, steps: int = 1_000_000) -> None:
        self._dispatch(self.policy.begin())
        for step in range(steps):
            for event in self.before(self, step):
                self.tell_policy(event)
            if not self._queue:
                break
            self.now, _, action = heapq.heappop(self._queue)
            action()
        assert self.policy.ended, f"stuck; waited for {self.policy.waited_for()}"
        assert not self._queue
        assert set(self.applied) <= {1}, "some samples were not applied exactly once"
        assert self.staleness == self.policy.staleness

    def tell_policy(self, event: Event) -> None:
        if isinstance(event, Left):
            self._bury(event.rank)
        elif isinstance(event, Joined):
            self._welcome(event)
        self._dispatch(self.policy.on(event))
        if (evaluation := self.policy.snapshots.take()) is not None:
            self.evaluations.append(evaluation)
        if len(self.nodes) <= 8 or next(self._ticket) % 16 == 0:  # dear with many ranks
            validate(self.policy)

    @property
    def between_rounds(self) -> bool:
        """No contribution is half applied: membership may change. (Synchronous rounds not yet summed are redone.)"""
        return all(
            flight.start.synchronous and not flight.start.drain and not flight.summed
            for number, flight in self.flights.items()
            if number >= self.policy.version
        )

    # Time and messages.

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._ticket), action))

    def _message(self, sender: object, receiver: object, delay: float, action: Callable[[], None]) -> None:
        arrival = max(self.now + delay, self._last.get((sender, receiver), 0.0))
        self._last[sender, receiver] = arrival
        self._at(arrival, action)

    def _tell(self, rank: int, *events: Event) -> None:
        node = self.nodes[rank]

        def arrive() -> None:
            for event in events:
                if self.nodes.get(rank) is node:  # nobody listens to the dead
                    self.tell_policy(event)

        self._message(rank, "policy", self.delay(), arrive)

    def _to_rank(self, rank: int, action: Callable[[Node], None], sender: str = "policy") -> None:
        node = self.nodes[rank]
        seconds = self.delay() if sender == "policy" else self.land()
        self._message(sender, rank, seconds, lambda: self.nodes.get(rank) is node and action(node))

    def _dispatch(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Give):
                piece = instruction.piece
                assert piece.delay_bound == self.policy.settings.delay_bound
                self._pieces[piece.number] = piece
                self._to_rank(instruction.rank, lambda node, i=instruction: self._given(node, i))
            else:
                self._check_start(instruction)
                self.starts.append(instruction)
                self.flights[instruction.number] = Flight(instruction, set(self.nodes), set(self.nodes))
                for rank in self.nodes:
                    self._to_rank(rank, lambda node, i=instruction: self._heard(node, i))

    def _check_start(self, start: StartRound) -> None:
        assert start.applied == self.policy.ledger.applied
        assert not self.starts or start.number == self.starts[-1].number + 1, "rounds start in order"
        if start.synchronous:
            assert start.drain or start.contributors == set(self.nodes)
        else:
            assert start.number == self.policy.version, "one round at a time"
            assert all(self.nodes[rank].worker._finished for rank in start.contributors), "work not finished"
        if start.drain:
            assert not any(n.snapshot is not None for n in self.nodes.values()), "drain while evaluating"
            assert not any(n.computing or n.worker.upcoming for n in self.nodes.values()), "drain while working"
            assert {r for r, n in self.nodes.items() if n.worker._finished} == start.contributors, "left behind"

    # The ranks.

    def _given(self, node: Node, give: Give) -> None:
        node.worker.give(give.piece)
        self._advance(node)

    def _advance(self, node: Node, *events: Event) -> None:
        """The main thread: begin what may be begun."""
        rank = node.worker.rank
        if not node.computing and node.finished is None and node.snapshot is not None:
            number, node.snapshot = node.snapshot, None
            node.computing = True
            self._at(self.now + self.evaluate(rank), lambda: self._score(node, number))
        if not node.computing and node.finished is None and node.worker.may_begin():
            piece, began = node.worker.begin()
            node.computing = True
            self._began[piece.number] = node.worker.version
            seconds = self.compute(rank, piece.samples)
            self.busy[rank] += seconds
            self._at(self.now + seconds, lambda: self._finish(node, piece, seconds))
            events = (*events, began)
        if events:
            self._tell(rank, *events)

    def _score(self, node: Node, number: int) -> None:
        rank = node.worker.rank
        node.computing = False
        if self.nodes.get(rank) is node:
            self._advance(node, Scored(rank, number, {"ranks": 1, str(rank): 1}))

    def _finish(self, node: Node, piece: Piece, seconds: float) -> None:
        rank = node.worker.rank
        if self.nodes.get(rank) is not node:
            return
        finished = node.worker.finish(seconds, 0.0)
        self.finished[rank] += 1
        node.computing = False
        if piece.synchronous_round is None:
            self._advance(node, finished)
        else:  # its gradients are in; it goes on when the round is complete
            node.finished = finished
        self._join(node)

    def _heard(self, node: Node, start: StartRound) -> None:
        node.rounds.append(start)
        self._join(node)

    def _join(self, node: Node) -> None:
        """The communication thread: collectives in order; a synchronous one when the rank's gradients are there."""
        if node.joined or not node.rounds:
            return
        start, rank = node.rounds[0], node.worker.rank
        if start.synchronous and not start.drain and rank in start.contributors and node.finished is None:
            return
        node.joined = True
        flight = self.flights[start.number]
        flight.missing.discard(rank)
        if start.synchronous and not start.drain and rank in start.contributors:
            flight.pieces[rank] = [self._pieces[node.finished.piece]]
        elif not start.synchronous and rank in start.contributors:
            flight.pieces[rank] = [self._pieces[number] for number, _ in node.worker._finished]
            took, _ = node.worker.take(start.number)
            self._tell(rank, took)
        for piece in flight.pieces.get(rank, []):
            staleness = start.number - self._began[piece.number]
            assert 0 <= staleness <= piece.delay_bound, f"staleness {staleness}, bound {piece.delay_bound}"
            self.staleness[staleness] += 1
        if start.synchronous and start.drain:  # no collective
            flight.summed = True
            self._to_rank(rank, lambda node: self._landed(node, start.number), sender="plane")
        else:
            self._look(flight)

    def _look(self, flight: Flight) -> None:
        if not flight.missing and not flight.summed:
            self._at(self.now + self.communicate(), lambda: self._sum(flight))

    def _sum(self, flight: Flight) -> None:
        if flight.missing or flight.summed:
            return
        flight.summed = True
        spans = [span for rank in sorted(flight.pieces) for p in flight.pieces[rank] for s in p.slices for span in s]
        self.round_spans[flight.start.number] = spans
        for start, stop in spans:
            assert not any(self.applied[start:stop]), f"samples [{start}, {stop}) were applied before"
            self.applied[start:stop] = b"\1" * (stop - start)
        for rank in sorted(flight.landing):
            self._to_rank(rank, lambda node: self._landed(node, flight.start.number), sender="plane")

    def _landed(self, node: Node, number: int) -> None:
        start = node.rounds.popleft()
        node.joined = False
        node.worker.complete(number)
        node.worker.version = number + 1
        flight = self.flights[number]
        flight.landing.discard(node.worker.rank)
        finished, node.finished = node.finished, None
        if start.evaluate and not start.drain:
            assert node.snapshot is None, "one snapshot at a time"
            node.snapshot = number
        if node.worker.rank == 0:
            if flight.start.drain:
                done = self.policy.ledger.frontier
                assert sum(self.applied) == done == sum(self.applied[:done]), "a drain left something out"
                self.drains.append((done, flight.start.drain))
            self._tell(0, Completed(number))
        self._advance(node, *([finished] if finished else []))
        self._join(node)

    # Membership.

    def _bury(self, rank: int) -> None:
        assert rank != 0
        del self.nodes[rank]
        self._last = {pair: when for pair, when in self._last.items() if rank not in pair}
        for flight in self.flights.values():
            flight.missing.discard(rank)
            flight.landing.discard(rank)
            if not flight.summed:
                for piece in flight.pieces.pop(rank, []):
                    self.staleness[flight.start.number - self._began[piece.number]] -= 1
                self._look(flight)

    def _welcome(self, event: Joined) -> None:
        node = self.nodes[event.rank] = Node(Worker(event.rank, event.version))
        self.busy.setdefault(event.rank, 0.0)
        for number, flight in sorted(self.flights.items()):
            if number >= event.version:  # it gives zeros to the rounds that started without it
                flight.missing.add(event.rank)
                flight.landing.add(event.rank)
                start = flight.start._replace(evaluate=False)  # nobody asks it for a part
                self._to_rank(event.rank, lambda node, i=start: self._heard(node, i))
        assert not node.joined


def validate(policy: Policy) -> None:
    """What must hold between any two events."""
    ledger = policy.ledger
    holding = 0
    for rank, member in policy.members.items():
        state = (member.activity.name, member.current is not None, len(member.held), rank)
        assert (member.activity is Activity.COMPUTING) == (member.current is not None), state
        assert policy.settings.synchronous or len(member.held) + (member.current is not None) <= 2, state
        if member.activity is Activity.RESTING:
            assert not member.held, state
        elif member.activity is not Activity.COMPUTING:
            assert member.held, state
            begins = policy._below_bound(member)
            assert begins == (member.activity is Activity.STARTING), state
        assert all(work.version >= 0 for work in member.ready), state
        holding += sum(work.piece.samples for work in member.unapplied().values())
    validate_sums(policy)
    assert ledger.outstanding() == holding
    assert ledger.applied + holding + length(ledger._returned) == ledger.frontier, "samples got lost"


def validate_sums(policy: Policy) -> None:
    """The roster's sums are those of its members."""
    roster, members, slices = policy._roster, policy.members, policy.settings.accumulation
    assert policy.batch == sum(member.share for member in members.values())
    assert roster.ready == {rank for rank, member in members.items() if member.ready}
    assert roster.ready_samples == sum(work.piece.samples for m in members.values() for work in m.ready)
    assert roster.resting == all(member.activity is Activity.RESTING for member in members.values())
    assert roster.working == any(member.working for member in members.values())
    ready = {rank: sum(work.piece.samples for work in member.ready) for rank, member in members.items()}
    assert roster.quorum_samples == sum(min(ready[rank], slices * m.share) for rank, m in members.items())
    if not policy.settings.synchronous and ledger_has_samples(policy):
        lacking = {r for r, m in members.items() if m.share and len(m.held) + (m.current is not None) < 2}
        assert lacking <= roster.hungry, "a rank lacks work and nobody knows"


def ledger_has_samples(policy: Policy) -> bool:
    return bool(policy.ledger.available(policy.rests.next.position))


def make_policy(
    shares, settings: Settings, total: int, every: int | None = None, evaluate: int | None = None, **arguments
) -> Policy:
    """A policy over `total` samples with a drain after each `every` and an evaluation after each `evaluate`."""
    if not isinstance(shares, dict):
        shares = dict(enumerate(shares))
    applied = arguments.pop("applied", 0)
    rests, evaluations = rests_at(marks_every(every, total), "checkpoint", total), marks_every(evaluate, total)
    return Policy(shares, settings, Ledger(total, applied), rests, evaluations=evaluations, **arguments)
