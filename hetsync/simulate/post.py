"""Letters between the ranks and the coordinator, which lives in rank 0's communication thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from hetsync.simulate.node import Node
from hetsync.simulate.world import World
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.messages import Event, Give, Instruction, Piece
from hetsync.sync.milestones import Evaluation
from hetsync.sync.policy import Policy
from hetsync.sync.speeds import Speeds

Deliver = Callable[[Sequence[Instruction]], None]
Report = Callable[[Evaluation], None]


class Spokesman(Coordinator):
    """Hands over what was decided as a whole, instead of a letter to every rank."""

    def __init__(self, policy: Policy, speeds: Speeds, rebalance: bool, deliver: Deliver, report: Report) -> None:
        super().__init__(policy, speeds, lambda letters: None, rebalance, on_evaluation=report)
        self._hand_over = deliver

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        self._hand_over(instructions)


class Post:
    """A letter takes `Runtime.message_seconds`, and is read when the receiver's thread looks next.

    Letters to rank 0 that come before one look are read together: with thousands of ranks that saves many events.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._inbox: deque[tuple[float, Node, Sequence[Event]]] = deque()  # on their way, by time of arrival
        self._heard_at = 0.0  # when rank 0's thread last heard of anything
        ranks, sync = world.scenario.ranks, world.scenario.sync
        speeds = Speeds({r: p.time for r, p in enumerate(ranks)}, [p.cap for p in ranks], sync.pins)
        rebalance = sync.rebalance and sync.shares == "speed"
        self._coordinator = Spokesman(world.policy, speeds, rebalance, self._deliver, self._report)

    def begin(self) -> None:
        self._coordinator.begin()

    def members_changed(self) -> None:
        world = self._world
        self._coordinator.speeds.caps = [world.scenario.ranks[rank].cap for rank in world.policy.members]

    def tell(self, node: Node, events: Sequence[Event]) -> None:
        """A rank's word to the coordinator."""
        clock = self._world.clock
        if node.rank == 0:
            clock.at(clock.now, self.hear, events)
            return
        arrival = clock.now + self._world.message_seconds
        self._inbox.append((arrival, node, events))
        if len(self._inbox) == 1:
            self._await(arrival)

    def _await(self, arrival: float) -> None:
        """Rank 0's thread will look some time after the letter has come, and read what has come until then."""
        world = self._world
        waiting, collective = world.nodes[0].idle_since is not None, world.delayed.joining is not None
        nap = world.naps.longest(arrival - self._heard_at, waiting, collective)
        world.clock.at(arrival + world.naps.first_look(nap), self._look)

    def _look(self) -> None:
        inbox, nodes = self._inbox, self._world.nodes
        now = self._world.clock.now
        heard: list[Event] = []
        while inbox and inbox[0][0] <= now:
            _, sender, events = inbox.popleft()
            if nodes.get(sender.rank) is sender:  # nobody listens to those who have left
                heard += events
        self.hear(heard)
        if inbox:
            self._await(inbox[0][0])

    def hear(self, events: Sequence[Event]) -> None:
        """What rank 0's thread learns while it is awake."""
        self._heard_at = self._world.clock.now
        self._coordinator.on(events)
        self._world.rest.check()

    def _report(self, evaluation: Evaluation) -> None:
        self._world.evaluations.report(evaluation)

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Give):
                self._give(self._world.nodes[instruction.rank], instruction.piece)
            elif instruction.synchronous:
                self._world.lockstep.start(instruction)
            else:
                self._world.delayed.start(instruction)

    def _give(self, node: Node, piece: Piece) -> None:
        world = self._world
        now = arrival = world.clock.now
        if node.rank != 0:
            arrival += world.message_seconds
            if node.idle_since is None:
                if node.given_at <= now and node.slice_ends_at > arrival + world.runtime.idle_nap_seconds:
                    node.worker.give(piece)  # nobody asks for it before it arrives: no need for an event
                    return
                nap = world.naps.longest(math.inf, False, False)
            else:
                nap = world.naps.longest(now - node.idle_since, True, False)
            node.given_at = arrival = max(arrival + world.naps.first_look(nap), node.given_at)
        world.clock.at(arrival, world.threads.given, node, piece)
