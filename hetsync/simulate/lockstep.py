"""Synchronous rounds on their way: a round's buckets travel while ranks compute, and all go on when the sums are in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetsync.simulate.clock import Looks
from hetsync.simulate.node import Node
from hetsync.simulate.world import World
from hetsync.sync.messages import Completed, Piece, StartRound


@dataclass
class SynchronousRound:
    """Buckets travel one after the other, each once all ranks have released it; the tail once all have finished."""

    shares: Sequence[float]  # part of backward after which each bucket is full
    missing: int  # ranks that have not finished
    evaluate: bool = False
    released_at: list[float] = field(default_factory=list)  # the last rank's
    first_at: float = math.inf  # the first rank has finished

    def __post_init__(self) -> None:
        self.released_at = [0.0] * len(self.shares)

    def release(self, now: float, seconds: float) -> None:
        """A rank begins its last slice. Backward takes about twice as long as forward."""
        for index, share in enumerate(self.shares):
            self.released_at[index] = max(self.released_at[index], now + seconds * (1 + 2 * share) / 3)

    def summed_at(self, now: float, bucket_seconds: Sequence[float], tail_seconds: float) -> float:
        """When the link has carried everything, all ranks having finished now."""
        free = 0.0
        for released, seconds in zip(self.released_at, bucket_seconds, strict=True):
            free = max(free, released) + seconds
        return max(free, now) + tail_seconds


class Lockstep:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rounds: dict[int, SynchronousRound] = {}  # under way
        scenario, shares = world.scenario, world.first_shares
        buckets = scenario.traffic.buckets
        self._bucket_seconds = [scenario.link_seconds(values, shares) for values in buckets]
        self._tail_seconds = scenario.link_seconds(scenario.traffic.tail, shares)
        self._bucket_shares = [sum(buckets[: i + 1]) / max(1, sum(buckets)) for i in range(len(buckets))]

    def start(self, start: StartRound) -> None:
        world = self._world
        if start.drain is None:
            self._rounds[start.number] = SynchronousRound(self._bucket_shares, len(start.contributors), start.evaluate)
            return
        now = world.clock.now  # nothing to sum
        world.draining = True
        world.records.synchronous_round(start.number, now, now)
        world.clock.at(now, world.post.hear, [Completed(start.number)])
        world.clock.at(now + world.message_seconds, world.rest.landed, start)

    def release(self, piece: Piece, seconds: float) -> None:
        """A rank begins its last slice, which takes so long."""
        assert piece.synchronous_round is not None
        self._rounds[piece.synchronous_round].release(self._world.clock.now, seconds)

    def join(self, node: Node, piece: Piece) -> None:
        """The rank has computed, and waits for the sums."""
        assert piece.synchronous_round is not None
        world = self._world
        now, number = world.clock.now, piece.synchronous_round
        world.threads.wait(node)
        step = self._rounds[number]
        step.first_at = min(step.first_at, now)
        step.missing -= 1
        if step.missing:
            return
        nap = world.naps.longest(now - step.first_at, True, True)
        looks = world.naps.exchanges(nap, len(world.nodes)) + world.runtime.step_seconds
        summed = step.summed_at(now, self._bucket_seconds, self._tail_seconds) + looks
        world.totals.communication_seconds += summed - now
        world.clock.at(summed, self._summed, number, piece.round_samples)

    def _summed(self, number: int, round_samples: int) -> None:
        world = self._world
        now, step = world.clock.now, self._rounds.pop(number)
        world.learner.reduce(number, round_samples)
        world.records.synchronous_round(number, step.first_at, now)
        nap = world.naps.longest(now - step.first_at, True, True)
        lands = Looks(now, now + world.naps.last_look(nap, len(world.nodes)), world.naps.phase())
        world.clock.at(lands.at(0), world.post.hear, [Completed(number)])
        for rank, node in world.nodes.items():
            world.clock.at(lands.at(rank), self._land, node, step.evaluate)

    def _land(self, node: Node, evaluate: bool) -> None:
        piece = node.piece
        assert piece is not None
        assert piece.synchronous_round is not None
        self._world.threads.end_wait(node)
        self._world.learner.step(node.rank, piece)
        if evaluate and node.rank == 0:
            self._world.evaluations.landed(piece.synchronous_round)
        node.landed = node.worker.version = piece.synchronous_round + 1
        self._world.threads.finish(node, piece)
