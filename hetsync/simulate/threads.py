"""What the ranks' main threads do: compute slice after slice, hand over, wait."""

from __future__ import annotations

from hetsync.data.ledger import length
from hetsync.simulate.node import Node
from hetsync.simulate.world import World
from hetsync.sync.messages import Event, Finished, Piece


class MainThreads:
    def __init__(self, world: World) -> None:
        self._world = world

    def given(self, node: Node, piece: Piece) -> None:
        """A piece has come."""
        if self._world.nodes.get(node.rank) is not node:
            return
        node.worker.give(piece)
        if node.piece is None:
            self._go_on(node)

    def wake(self, node: Node) -> None:
        """What the rank waits for may be there."""
        if node.piece is None and self._world.nodes.get(node.rank) is node:
            self._go_on(node)

    def _go_on(self, node: Node, finished: Finished | None = None) -> None:
        """Begin the next piece where that is allowed, and say what there is to say."""
        world = self._world
        events: list[Event] = [] if finished is None else [finished]
        if not world.draining:
            world.delayed.take_over(node)
            if node.worker.may_begin():
                events.append(self._begin(node))
        if node.piece is None:
            self.wait(node)
            world.delayed.wake_after_landing(node)
        if events:
            world.post.tell(node, events)

    def _begin(self, node: Node) -> Event:
        piece, began = node.worker.begin()
        self.end_wait(node)
        node.piece, node.slice_index, node.piece_seconds, node.piece_loss = piece, 0, 0.0, 0.0
        self._world.learner.begin(node.rank, piece)
        self._next_slice(node, piece)
        return began

    def wait(self, node: Node) -> None:
        if node.idle_since is None:
            node.idle_since = self._world.clock.now
            self._world.idle[node.rank] = node

    def end_wait(self, node: Node) -> None:
        if node.idle_since is not None:
            node.wait_seconds += self._world.clock.now - node.idle_since
            node.idle_since = None
            del self._world.idle[node.rank]

    def _next_slice(self, node: Node, piece: Piece) -> None:
        world = self._world
        if node.slice_index == len(piece.slices):
            self._computed(node, piece)
            return
        node.slice_samples = length(piece.slices[node.slice_index])
        seconds = node.device.seconds(node.slice_samples)
        node.piece_seconds += seconds
        node.slice_ends_at = world.clock.now + seconds + world.runtime.slice_seconds
        if piece.synchronous_round is not None and node.slice_index == len(piece.slices) - 1:
            world.lockstep.release(piece, seconds)
        world.clock.at(node.slice_ends_at, self._end_slice, node, piece)

    def _end_slice(self, node: Node, piece: Piece) -> None:
        world = self._world
        node.piece_loss += node.slice_samples * world.learner.slice(node.rank, piece, node.slice_index)
        node.slice_index += 1
        if piece.synchronous_round is None:
            world.delayed.take_over(node)
        self._next_slice(node, piece)

    def _computed(self, node: Node, piece: Piece) -> None:
        world = self._world
        if piece.synchronous_round is None:
            world.delayed.join(node)
            world.learner.finish(node.rank, piece)
            self.finish(node, piece)
        else:
            world.learner.finish(node.rank, piece)
            world.lockstep.join(node, piece)

    def finish(self, node: Node, piece: Piece) -> None:
        """The piece is computed (synchronous: and its round is complete)."""
        world = self._world
        node.piece = None
        finished = node.worker.finish(node.piece_seconds, node.piece_loss)
        samples = finished.samples
        node.compute_seconds += finished.seconds
        node.samples += samples
        node.since_rest += samples
        world.totals.count(world.scenario.ranks[node.rank].time, finished, len(piece.slices))
        if world.learner.learns and samples:
            world.losses.append((samples, finished.loss_sum / samples))
        world.records.piece(world.clock.now, node, piece, world.learner.learns)
        self._go_on(node, finished)
