"""Delayed rounds on their way: every rank joins, the sum travels, and lands on each rank at a moment of its own.

A round costs three events, and one for each rank that waits for it. A rank that computes finds out at its next slice
what has landed meanwhile. What it had finished when its thread joined goes into the round at its next finish, or when
all have joined, whichever comes first: nobody could tell the difference, as the policy decides nothing before it has
heard from all contributors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetsync.simulate.clock import Looks
from hetsync.simulate.node import Node
from hetsync.simulate.world import World
from hetsync.sync.messages import Completed, StartRound, Took


@dataclass
class DelayedRound:
    """Ranks join when they hear of it; once all have, its sum travels; then each rank sees it land."""

    start: StartRound
    joins: Looks
    missing: set[int]  # contributors that have not put anything in
    words: list[Took] = field(default_factory=list)  # what the others have put in
    staleness: dict[int, int] = field(default_factory=dict)  # of that
    lands: Looks | None = None  # None until the sum is there

    @property
    def number(self) -> int:
        return self.start.number


class DelayedRounds:
    def __init__(self, world: World) -> None:
        self._world = world
        self.joining: DelayedRound | None = None  # under way, without its sum
        self._landing: DelayedRound | None = None  # the newest whose sum is there
        self._sum_seconds = world.scenario.link_seconds(world.scenario.traffic.values, world.first_shares)

    # The round.

    def start(self, start: StartRound) -> None:
        """Every rank joins when its thread looks; contributors say what they put in."""
        world = self._world
        now = world.clock.now
        first, quiet = now + world.message_seconds, math.inf
        if self._landing is not None and self._landing.lands is not None:
            first = max(first, self._landing.lands.last)
            quiet = now - self._landing.lands.first
        nap = world.naps.longest(quiet, world.everybody_waits, False)
        joins = Looks(first, first + world.naps.last_look(nap, len(world.nodes)), world.naps.phase())
        self.joining = flight = DelayedRound(start, joins, set(start.contributors))
        world.draining = start.drain is not None
        world.clock.at(joins.last, self._all_joined, flight)

    def join(self, node: Node) -> None:
        """The rank is about to finish a piece: should its thread have joined before?"""
        flight = self.joining
        if flight is not None and node.rank in flight.missing and flight.joins.at(node.rank) <= self._world.clock.now:
            self._join(node, flight)

    def _join(self, node: Node, flight: DelayedRound) -> None:
        self._notice(node)
        flight.missing.discard(node.rank)
        took, flight.staleness[node.rank] = node.worker.take(flight.number)
        flight.words.append(took)
        node.flying = flight.number
        self._world.learner.load(node.rank, drain=flight.start.drain is not None)

    def _all_joined(self, flight: DelayedRound) -> None:
        world = self._world
        for rank in sorted(flight.missing):
            self._join(world.nodes[rank], flight)
        if flight.words:
            world.post.tell(world.nodes[max(flight.start.contributors)], flight.words)
        world.learner.add(flight.number, sorted(flight.start.contributors), drain=flight.start.drain is not None)
        nap = world.naps.longest(math.inf, world.everybody_waits, True)
        seconds = self._sum_seconds + world.naps.exchanges(nap, len(world.nodes))
        world.totals.communication_seconds += seconds
        world.clock.at(world.clock.now + seconds, self._summed, flight, nap)

    def _summed(self, flight: DelayedRound, nap: float) -> None:
        world = self._world
        now = world.clock.now
        lands = Looks(now, now + world.naps.last_look(nap, len(world.nodes)), world.naps.phase())
        flight.lands, self._landing, self.joining = lands, flight, None
        world.records.delayed_round(flight.number, flight.joins, lands, flight.staleness)
        world.clock.at(lands.at(0), world.post.hear, [Completed(flight.number)])
        for rank, node in world.idle.items():
            world.clock.at(lands.at(rank), world.threads.wake, node)
        if flight.start.drain is not None:
            world.clock.at(lands.last, world.rest.landed, flight.start)
        elif flight.start.evaluate:
            world.clock.at(lands.at(0), self._evaluate, flight)

    def _evaluate(self, flight: DelayedRound) -> None:
        self._notice(self._world.nodes[0])
        self._world.evaluations.landed(flight.number)

    # What a rank sees of it.

    def take_over(self, node: Node) -> None:
        """Between two slices: what has landed, into the local weights."""
        self._notice(node)
        if node.worker.version < node.landed:
            self._world.learner.apply(node.rank)
            node.worker.version = node.landed

    def wake_after_landing(self, node: Node) -> None:
        """A sum that is there, but not yet on this rank, which has begun to wait."""
        newest = self._landing
        if newest is not None and newest.lands is not None and self._world.clock.now < newest.lands.at(node.rank):
            self._world.clock.at(newest.lands.at(node.rank), self._world.threads.wake, node)

    def _notice(self, node: Node) -> None:
        newest = self._landing
        if newest is None or node.landed > newest.number:
            return
        assert newest.lands is not None
        # A round begins only after the one before has landed everywhere.
        landed = newest.number + (self._world.clock.now >= newest.lands.at(node.rank))
        if landed > node.landed:
            self.land(node, landed)

    def land(self, node: Node, landed: int) -> None:
        """The sums of the rounds below `landed` have arrived on the rank."""
        node.landed = landed
        self._world.learner.land(node.rank, landed - 1)
        if node.flying is not None and node.flying < landed:
            node.worker.complete(node.flying)
            node.flying = None
