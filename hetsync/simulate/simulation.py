"""The virtual cluster: the engine's policy, coordinator and workers on a virtual clock.

A rank has a main thread, which computes slice after slice, and a communication thread, which looks for news now and
then (the engine's naps) and joins every round. Only what changes the course of things is an event of its own: a round
costs as many as it has contributors and ranks that wait for it. A rank that computes finds out at its next slice what
has landed meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hetsync.data.ledger import Ledger, length
from hetsync.errors import UserError
from hetsync.session import settings_of
from hetsync.simulate.clock import Clock, Naps
from hetsync.simulate.learner import Learner
from hetsync.simulate.node import Node, VirtualDevice
from hetsync.control.observation import Observation, Totals
from hetsync.simulate.records import Records
from hetsync.simulate.rounds import DelayedRound, Looks, SynchronousRound
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.script import Change, check_script
from hetsync.sync.coordinator import Coordinator, Speeds
from hetsync.sync.messages import (
    Completed,
    DrainRequested,
    Event,
    Give,
    Instruction,
    Joined,
    Left,
    Piece,
    Settings,
    StartRound,
    Tuned,
)
from hetsync.sync.policy import Policy

STOP = "stop requested"


class Spokesman(Coordinator):
    """Hands over what was decided as a whole, instead of a letter to every rank."""

    def __init__(
        self, policy: Policy, speeds: Speeds, rebalance: bool, deliver: Callable[[Sequence[Instruction]], None]
    ) -> None:
        super().__init__(policy, speeds, lambda rank, instructions: None, rebalance)
        self._hand_over = deliver

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        self._hand_over(instructions)


class Simulation:
    """Step it with `advance`, look with `observe`, turn with `tune`."""

    def __init__(
        self,
        scenario: Scenario,
        learner: Learner | None = None,
        script: Sequence[Change] = (),
        at_rest: Callable[[Simulation, StartRound], None] = lambda simulation, drained: None,
        records: Records | None = None,
    ) -> None:
        """`at_rest` is called at each drain, when all ranks hold the same weights; it takes no virtual time."""
        self.scenario = scenario
        self._clock = Clock()
        self.learner = learner or Learner()
        self.ended = False
        self.stopped = False
        self.losses: list[tuple[int, float]] = []  # samples and mean loss of each piece since the last look
        self.totals = Totals()
        sync, ranks = scenario.sync, scenario.ranks
        self.first_shares = scenario.shares()
        ledger = Ledger(scenario.total_samples)
        self.policy = Policy(dict(enumerate(self.first_shares)), settings_of(sync), ledger, scenario.next_milestone)
        self.solo_samples_per_second = sum(p.time.rate(n) for p, n in zip(ranks, self.first_shares, strict=True))
        self.nodes = {
            rank: Node(rank, 0, VirtualDevice(scenario.cluster, rank, profile.time.rate(1), scenario.seed))
            for rank, profile in enumerate(ranks)
        }
        self.away: dict[int, Node] = {}  # ranks that have left
        speeds = Speeds({r: p.time for r, p in enumerate(ranks)}, [p.cap for p in ranks], sync.pins)
        self._coordinator = Spokesman(
            self.policy, speeds, sync.rebalance and sync.shares == "speed", self._take_instructions
        )
        self._at_rest = at_rest
        self._records = records or Records()
        self._runtime = scenario.runtime
        self._mark = Totals()
        self._naps = Naps(scenario.runtime, scenario.seed)
        self._idle: dict[int, Node] = dict(self.nodes)
        self._joining: DelayedRound | None = None  # under way, without its sum
        self._landing: DelayedRound | None = None  # the newest whose sum is there
        self._lockstep: dict[int, SynchronousRound] = {}  # synchronous rounds under way
        self._heard_at = 0.0  # when the coordinator last heard of anything
        self._draining = False  # nobody begins what follows a drain before it has landed
        self._landed_drain: StartRound | None = None  # which waits for its books to be closed
        self._changes: list[Change] = []  # of membership, which wait for a drain
        self._measure_link(self.first_shares)
        check_script(script, len(ranks))
        for change in script:
            self._clock.at(change.at_seconds, self._change, change)
        self._coordinator.begin()

    def _measure_link(self, shares: Sequence[int]) -> None:
        scenario, traffic = self.scenario, self.scenario.traffic
        self._sum_seconds = scenario.link_seconds(traffic.values, shares)
        self._bucket_seconds = [scenario.link_seconds(n, shares) for n in traffic.buckets]
        self._tail_seconds = scenario.link_seconds(traffic.tail, shares)
        total = max(1, sum(traffic.buckets))
        self._bucket_shares = [sum(traffic.buckets[: i + 1]) / total for i in range(len(traffic.buckets))]

    # What a caller does.

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now

    def advance(self, rounds: int | None = None, seconds: float | None = None) -> None:
        """Go on until so many more rounds are complete or so many virtual seconds have passed; else to the end."""
        policy = self.policy
        last_round = math.inf if rounds is None else policy.version + rounds
        until = math.inf if seconds is None else self.now + seconds
        while not self.ended and policy.version < last_round and self._clock.step(until):
            pass
        assert self.now < math.inf, f"the simulation is stuck; it waits for ranks {policy.waited_for()}"

    def tune(self, settings: Settings) -> None:
        """New K, D and q for the work handed out from now on."""
        self._hear([Tuned(settings)])

    def request_stop(self) -> None:
        """Come to rest as soon as possible and end there."""
        self._hear([DrainRequested(STOP)])

    def observe(self) -> Observation:
        """What has happened since the last call."""
        policy, nodes = self.policy, self.nodes.values()
        waits = sum(node.wait_seconds + node.waiting_seconds(self.now) for node in nodes) / len(nodes)
        before, self._mark = (
            self._mark,
            replace(
                self.totals,
                at=self.now,
                rounds=policy.version,
                samples=policy.ledger.applied,
                wait_seconds=waits,
                staleness=policy.staleness.copy(),
            ),
        )
        losses, self.losses = self.losses, []
        return Observation(
            **self._mark.since(before, self.solo_samples_per_second),
            losses=tuple(loss for _, loss in losses),
            noise_scale=self.learner.noise_scale,
            progress=policy.ledger.applied / self.scenario.total_samples,
            settings=policy.settings,
        )

    # Messages.

    def _tell(self, node: Node, events: list[Event]) -> None:
        """A rank's word to the coordinator, which lives in rank 0's thread."""
        arrival = self._clock.now
        if node.rank != 0:
            waiting = self.nodes[0].idle_since is not None
            nap = self._naps.longest(self._clock.now - self._heard_at, waiting, self._joining is not None)
            arrival += self._runtime.message_seconds + self._naps.first_look(nap)
            node.told_at = arrival = max(arrival, node.told_at)
        self._clock.at(arrival, self._hear, events, node)

    def _hear(self, events: list[Event], sender: Node | None = None) -> None:
        if sender is not None and self.nodes.get(sender.rank) is not sender:
            return  # nobody listens to those who have left
        self._heard_at = self._clock.now
        self._coordinator.on(events)
        self._rest_if_due()

    def _take_instructions(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Give):
                self._give(self.nodes[instruction.rank], instruction.piece)
            elif instruction.synchronous:
                self._start_synchronous(instruction)
            else:
                self._start_delayed(instruction)

    def _give(self, node: Node, piece: Piece) -> None:
        arrival = self._clock.now
        if node.rank != 0:
            waiting = node.idle_since is not None
            nap = self._naps.longest(node.waiting_seconds(self._clock.now) if waiting else math.inf, waiting, False)
            arrival += self._runtime.message_seconds + self._naps.first_look(nap)
            arrival = max(arrival, node.given_at)
            if node.given_at <= self._clock.now and node.slice_ends_at > arrival:
                node.worker.give(piece)  # nobody asks for it before it arrives: no need for an event
                return
            node.given_at = arrival
        self._clock.at(arrival, self._given, node, piece)

    def _given(self, node: Node, piece: Piece) -> None:
        if self.nodes.get(node.rank) is not node:
            return
        node.worker.give(piece)
        if node.piece is None:
            self._go_on(node)

    # A rank's main thread.

    def _go_on(self, node: Node, *said: Event) -> None:
        """Begin the next piece where that is allowed, and say what there is to say."""
        events = list(said)
        if not self._draining:
            self._take_over(node)
            if node.worker.may_begin():
                events.append(self._begin(node))
        if node.piece is None:
            self._wait(node)
        if events:
            self._tell(node, events)

    def _begin(self, node: Node) -> Event:
        piece, began = node.worker.begin()
        self._end_wait(node)
        node.piece, node.slice_index, node.piece_seconds, node.piece_loss = piece, 0, 0.0, 0.0
        self.learner.begin(node.rank, piece)
        self._next_slice(node, piece)
        return began

    def _wait(self, node: Node) -> None:
        if node.idle_since is None:
            node.idle_since = self._clock.now
            self._idle[node.rank] = node
        newest = self._landing
        if newest is not None and newest.lands is not None and self._clock.now < newest.lands.at(node.rank):
            self._clock.at(newest.lands.at(node.rank), self._wake, node)

    def _end_wait(self, node: Node) -> None:
        if node.idle_since is not None:
            node.wait_seconds += self._clock.now - node.idle_since
            node.idle_since = None
            del self._idle[node.rank]

    def _wake(self, node: Node) -> None:
        if node.piece is None and self.nodes.get(node.rank) is node:
            self._go_on(node)

    def _next_slice(self, node: Node, piece: Piece) -> None:
        if node.slice_index == len(piece.slices):
            self.learner.finish(node.rank, piece)
            (self._finish if piece.synchronous_round is None else self._join_synchronous)(node, piece)
            return
        node.slice_samples = length(piece.slices[node.slice_index])
        seconds = node.device.seconds(node.slice_samples)
        node.piece_seconds += seconds
        node.slice_ends_at = self._clock.now + seconds + self._runtime.slice_seconds
        if piece.synchronous_round is not None and node.slice_index == len(piece.slices) - 1:
            self._lockstep[piece.synchronous_round].release(self._clock.now, seconds)
        self._clock.at(node.slice_ends_at, self._end_slice, node, piece)

    def _end_slice(self, node: Node, piece: Piece) -> None:
        if node.piece is not piece:
            return
        node.piece_loss += node.slice_samples * self.learner.slice(node.rank, piece, node.slice_index)
        node.slice_index += 1
        if piece.synchronous_round is None:
            self._take_over(node)
        self._next_slice(node, piece)

    def _finish(self, node: Node, piece: Piece) -> None:
        node.piece = None
        node.compute_seconds += node.piece_seconds
        node.samples += piece.samples
        node.since_rest += piece.samples
        finished = node.worker.finish(node.piece_seconds, node.piece_loss)
        self.totals.count(self.scenario.ranks[node.rank].time, finished, len(piece.slices))
        if self.learner.learns and piece.samples:
            self.losses.append((piece.samples, node.piece_loss / piece.samples))
        self._records.piece(self._clock.now, node, piece, self.learner.learns)
        self._go_on(node, finished)

    def _take_over(self, node: Node) -> None:
        """Between two slices: what has landed, into the local weights."""
        self._notice(node)
        if node.worker.version < node.landed:
            self.learner.apply(node.rank)
            node.worker.version = node.landed

    # A rank's communication thread.

    def _notice(self, node: Node) -> None:
        """The delayed rounds that have landed on this rank by now."""
        newest = self._landing
        if newest is None or node.landed > newest.number:
            return
        assert newest.lands is not None
        # A round begins only after the one before has landed everywhere.
        landed = newest.number + (self._clock.now >= newest.lands.at(node.rank))
        if landed > node.landed:
            self._land(node, landed)

    def _land(self, node: Node, landed: int) -> None:
        node.landed = landed
        self.learner.land(node.rank, landed - 1)
        if node.flying is not None and node.flying < landed:
            node.worker.complete(node.flying)
            node.flying = None

    # Delayed rounds.

    def _start_delayed(self, start: StartRound) -> None:
        """Every rank joins when its thread looks; contributors say what they put in."""
        first, quiet = self._clock.now + self._runtime.message_seconds, math.inf
        if self._landing is not None and self._landing.lands is not None:
            first = max(first, self._landing.lands.last)
            quiet = self._clock.now - self._landing.lands.first
        nap = self._naps.longest(quiet, len(self._idle) == len(self.nodes), False)
        joins = Looks(first, first + self._naps.last_look(nap, len(self.nodes)), self._naps.phase())
        self._joining = flight = DelayedRound(start, joins)
        self._draining = start.drain is not None
        for rank in sorted(start.contributors):
            self._clock.at(joins.at(rank), self._join, self.nodes[rank], flight)
        self._clock.at(joins.last, self._all_joined, flight)

    def _join(self, node: Node, flight: DelayedRound) -> None:
        self._notice(node)
        took, flight.staleness[node.rank] = node.worker.take(flight.number)
        node.flying = flight.number
        self.learner.load(node.rank, drain=flight.start.drain is not None)
        self._tell(node, [took])

    def _all_joined(self, flight: DelayedRound) -> None:
        self.learner.add(flight.number, sorted(flight.staleness), drain=flight.start.drain is not None)
        nap = self._naps.longest(math.inf, len(self._idle) == len(self.nodes), True)
        seconds = self._sum_seconds + self._naps.exchanges(nap, len(self.nodes))
        self.totals.communication_seconds += seconds
        self._clock.at(self._clock.now + seconds, self._summed, flight, nap)

    def _summed(self, flight: DelayedRound, nap: float) -> None:
        lands = Looks(self._clock.now, self._clock.now + self._naps.last_look(nap, len(self.nodes)), self._naps.phase())
        flight.lands, self._landing, self._joining = lands, flight, None
        self._records.delayed_round(flight)
        self._clock.at(lands.at(0), self._hear, [Completed(flight.number)])
        for rank, node in self._idle.items():
            self._clock.at(lands.at(rank), self._wake, node)
        if flight.start.drain is not None:
            self._clock.at(lands.last, self._drain_landed, flight.start)

    # Synchronous rounds.

    def _start_synchronous(self, start: StartRound) -> None:
        if start.drain is not None:  # nothing to sum
            self._draining = True
            self._records.synchronous_round(start.number, self._clock.now, self._clock.now)
            self._clock.at(self._clock.now, self._hear, [Completed(start.number)])
            self._clock.at(self._clock.now + self._runtime.message_seconds, self._drain_landed, start)
        else:
            self._lockstep[start.number] = SynchronousRound(start, self._bucket_shares, len(start.contributors))

    def _join_synchronous(self, node: Node, piece: Piece) -> None:
        """The rank has computed, and waits for the sums."""
        assert piece.synchronous_round is not None
        node.idle_since = self._clock.now
        self._idle[node.rank] = node
        step = self._lockstep[piece.synchronous_round]
        step.first_at = min(step.first_at, self._clock.now)
        step.missing -= 1
        if step.missing:
            return
        nap = self._naps.longest(self._clock.now - step.first_at, True, True)
        looks = self._naps.exchanges(nap, len(self.nodes)) + self._runtime.step_seconds
        summed = step.summed_at(self._clock.now, self._bucket_seconds, self._tail_seconds) + looks
        self.totals.communication_seconds += summed - self._clock.now
        self._clock.at(summed, self._sum_synchronous, step, piece.round_samples)

    def _sum_synchronous(self, step: SynchronousRound, round_samples: int) -> None:
        number = step.start.number
        del self._lockstep[number]
        self.learner.reduce(number, round_samples)
        self._records.synchronous_round(number, step.first_at, self._clock.now)
        last = self._naps.last_look(self._naps.longest(self._clock.now - step.first_at, True, True), len(self.nodes))
        lands = Looks(self._clock.now, self._clock.now + last, self._naps.phase())
        self._clock.at(lands.at(0), self._hear, [Completed(number)])
        for rank, node in self.nodes.items():
            self._clock.at(lands.at(rank), self._finish_synchronous, node)

    def _finish_synchronous(self, node: Node) -> None:
        piece = node.piece
        assert piece is not None
        assert piece.synchronous_round is not None
        self._end_wait(node)
        self.learner.step(node.rank, piece)
        node.landed = node.worker.version = piece.synchronous_round + 1
        self._finish(node, piece)

    # At rest.

    def _drain_landed(self, start: StartRound) -> None:
        self._landed_drain = start
        self._rest_if_due()

    def _rest_if_due(self) -> None:
        """A drain has landed everywhere, and every contributor's word is in."""
        start = self._landed_drain
        if start is None or self.policy.version <= start.number:
            return
        self._landed_drain = None
        for node in self.nodes.values():
            if node.landed <= start.number:
                self._land(node, start.number + 1)
            node.worker.version = start.number + 1
        if not start.synchronous:
            self.learner.settle()
        samples = {rank: node.since_rest for rank, node in self.nodes.items()}
        self.learner.rest(samples, self.policy.ledger.applied, start.synchronous)
        for node in self.nodes.values():
            node.since_rest = 0
        self.stopped = start.drain == STOP
        self.ended = start.final or self.stopped
        self._at_rest(self, start)
        self._draining = False
        if not self.ended:
            self._change_members()
            for node in list(self.nodes.values()):
                self._wake(node)

    # The script.

    def _change(self, change: Change) -> None:
        if change.what in ("slow_by", "recover"):
            device = (self.nodes.get(change.rank) or self.away[change.rank]).device
            device.slow_by = change.factor
            return
        if self.policy.settings.synchronous:
            raise UserError(
                f"the script says {change.what} of rank {change.rank} in synchronous mode, whose rounds are handed out"
                " ahead: set sync.delay_bound to 1 or more"
            )
        self._changes.append(change)
        self._hear([DrainRequested("membership")])

    def _change_members(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            if change.what == "leave":
                self._leave(change.rank)
            else:
                self._join_again(change.rank)
        if changes:
            self._coordinator.speeds.caps = [self.scenario.ranks[rank].cap for rank in self.policy.members]

    def _leave(self, rank: int) -> None:
        self.away[rank] = node = self.nodes.pop(rank)
        self._end_wait(node)
        self.learner.leave(rank)
        self._hear([Left(rank)])

    def _join_again(self, rank: int) -> None:
        version = self.policy.version
        self.nodes[rank] = node = self.away.pop(rank).again(version, self._clock.now)
        self._idle[rank] = node
        self.learner.join(rank)
        self._hear([Joined(rank, version, self.first_shares[rank])])
