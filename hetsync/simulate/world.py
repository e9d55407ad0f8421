"""What the parts of a simulation share: the clock, the ranks, the policy, the books."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetsync.control.observation import Totals
from hetsync.data.ledger import Ledger
from hetsync.session import settings_of
from hetsync.simulate.clock import Clock, Naps
from hetsync.simulate.learner import Learner
from hetsync.simulate.node import Node, VirtualDevice
from hetsync.simulate.records import Records
from hetsync.simulate.scenario import Scenario
from hetsync.sync.policy import Policy
from hetsync.sync.post import GROUP

if TYPE_CHECKING:
    from hetsync.simulate.delayed import DelayedRounds
    from hetsync.simulate.evaluation import Evaluations
    from hetsync.simulate.lockstep import Lockstep
    from hetsync.simulate.post import Post
    from hetsync.simulate.rest import Rest
    from hetsync.simulate.threads import MainThreads


class World:
    """The six parts are put in by `Simulation`; each knows the others through here."""

    post: Post
    threads: MainThreads
    delayed: DelayedRounds
    lockstep: Lockstep
    rest: Rest
    evaluations: Evaluations

    def __init__(self, scenario: Scenario, learner: Learner, records: Records) -> None:
        self.scenario = scenario
        self.learner = learner
        self.records = records
        self.runtime = scenario.runtime
        # A letter that a leader passes on waits for one look more: half a nap on average.
        passed_on = len(scenario.ranks) > GROUP
        self.message_seconds = scenario.runtime.message_seconds + passed_on * scenario.runtime.idle_nap_seconds / 2
        self.clock = Clock()
        self.naps = Naps(scenario.runtime, scenario.seed)
        self.first_shares = scenario.shares()
        self.policy = Policy(
            dict(enumerate(self.first_shares)),
            settings_of(scenario.sync),
            Ledger(scenario.total_samples),
            scenario.rests,
            evaluations=scenario.evaluations,
        )
        self.nodes = {
            rank: Node(rank, 0, VirtualDevice(scenario.cluster, rank, profile.time.rate(1), scenario.seed))
            for rank, profile in enumerate(scenario.ranks)
        }
        self.idle: dict[int, Node] = dict(self.nodes)  # whose main threads wait
        self.away: dict[int, Node] = {}  # ranks that have left
        self.draining = False  # nobody begins what follows a drain before it has landed
        self.ended = False
        self.stopped = False  # before its time, on request
        self.totals = Totals()
        self.losses: list[tuple[int, float]] = []  # samples and mean loss of each piece since the last look

    @property
    def everybody_waits(self) -> bool:
        return len(self.idle) == len(self.nodes)
