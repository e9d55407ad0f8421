"""At rest: when a drain has landed and its books are closed, members may leave and join, and work goes on."""

from __future__ import annotations

from collections.abc import Sequence

from hetsync.errors import UserError
from hetsync.session import STOP
from hetsync.simulate.script import Change, check_script
from hetsync.simulate.world import World
from hetsync.sync.messages import DrainRequested, Joined, Left, StartRound


class Rest:
    def __init__(self, world: World, script: Sequence[Change]) -> None:
        self._world = world
        self._landed: StartRound | None = None  # a drain that waits for its books to be closed
        self._changes: list[Change] = []  # of membership, which wait for a drain
        check_script(script, len(world.nodes))
        for change in script:
            world.clock.at(change.at_seconds, self._change, change)

    def landed(self, start: StartRound) -> None:
        """A drain round has landed everywhere."""
        self._landed = start
        self.check()

    def check(self) -> None:
        """Go on once every contributor's word is in, too."""
        world, start = self._world, self._landed
        if start is None or world.policy.version <= start.number:
            return
        self._landed = None
        for node in world.nodes.values():
            if node.landed <= start.number:
                world.delayed.land(node, start.number + 1)
            node.worker.version = start.number + 1
        if not start.synchronous:
            world.learner.settle()
        samples = {rank: node.since_rest for rank, node in world.nodes.items()}
        world.learner.rest(samples, world.policy.ledger.applied, start.synchronous)
        for node in world.nodes.values():
            node.since_rest = 0
        world.stopped = start.drain == STOP
        world.ended = start.final or world.stopped
        world.evaluations.at_rest(start)
        world.draining = False
        if not world.ended:
            self._change_members()
            for node in list(world.nodes.values()):
                world.threads.wake(node)

    # The script.

    def _change(self, change: Change) -> None:
        world = self._world
        if change.what in ("slow_by", "recover"):
            device = (world.nodes.get(change.rank) or world.away[change.rank]).device
            device.slow_by = change.factor
            return
        if world.policy.settings.synchronous:
            raise UserError(
                f"the script says {change.what} of rank {change.rank} in synchronous mode, whose rounds are handed out"
                " ahead: set sync.delay_bound to 1 or more"
            )
        self._changes.append(change)
        world.post.hear([DrainRequested("membership")])

    def _change_members(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            if change.what == "leave":
                self._leave(change.rank)
            else:
                self._join(change.rank)
        if changes:
            self._world.post.members_changed()

    def _leave(self, rank: int) -> None:
        world = self._world
        world.away[rank] = node = world.nodes.pop(rank)
        world.threads.end_wait(node)
        world.learner.leave(rank)
        world.post.hear([Left(rank)])

    def _join(self, rank: int) -> None:
        world = self._world
        version = world.policy.version
        world.nodes[rank] = node = world.away.pop(rank).again(version, world.clock.now)
        world.idle[rank] = node
        world.learner.join(rank)
        world.post.hear([Joined(rank, version, world.first_shares[rank])])
