"""The virtual cluster: the engine's policy, coordinator and workers on a virtual clock.

A rank has a main thread, which computes slice after slice (`threads`), and a communication thread, which looks for news
now and then (the engine's naps: `clock`), carries letters (`post`) and joins every round (`delayed`, `lockstep`). What
happens when all have come to rest is in `rest`, what happens to shared weights on the way in `evaluation`. They share a
`World`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace

from hetsync.control.observation import Observation, Totals
from hetsync.session import STOP
from hetsync.simulate.delayed import DelayedRounds
from hetsync.simulate.evaluation import Evaluations, OnEvaluation
from hetsync.simulate.learner import Learner
from hetsync.simulate.lockstep import Lockstep
from hetsync.simulate.node import Node
from hetsync.simulate.post import Post
from hetsync.simulate.records import Records
from hetsync.simulate.rest import Rest
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.script import Change
from hetsync.simulate.threads import MainThreads
from hetsync.simulate.world import World
from hetsync.sync.messages import DrainRequested, Settings, Tuned
from hetsync.sync.policy import Policy

# New objects between two looks of the garbage collector, and looks between those that look at more.
COLLECT_SELDOM = (50_000, 20, 100)


def spare_the_collector() -> None:
    """For a process that simulates many ranks: events refer to each other in no circles, and looking for some among all
    that is alive takes a sixth of the time."""
    gc.freeze()
    gc.set_threshold(*COLLECT_SELDOM)


class Simulation:
    """Step it with `advance`, look with `observe`, turn with `tune`."""

    def __init__(
        self,
        scenario: Scenario,
        learner: Learner | None = None,
        script: Sequence[Change] = (),
        on_evaluation: OnEvaluation | None = None,
        records: Records | None = None,
    ) -> None:
        """`on_evaluation` is told the metrics wherever the scenario evaluates, and at the end."""
        self.scenario = scenario
        self.learner = learner or Learner()
        self._world = world = World(scenario, self.learner, records or Records())
        world.post = Post(world)
        world.threads = MainThreads(world)
        world.delayed = DelayedRounds(world)
        world.lockstep = Lockstep(world)
        world.rest = Rest(world, script)
        world.evaluations = Evaluations(world, on_evaluation)
        profiles = zip(scenario.ranks, world.first_shares, strict=True)
        self.solo_samples_per_second = sum(profile.time.rate(share) for profile, share in profiles)
        self._mark = Totals()
        world.post.begin()

    @property
    def policy(self) -> Policy:
        return self._world.policy

    @property
    def nodes(self) -> dict[int, Node]:
        """The ranks that are there."""
        return self._world.nodes

    @property
    def away(self) -> dict[int, Node]:
        """The ranks that have left."""
        return self._world.away

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._world.clock.now

    @property
    def ended(self) -> bool:
        return self._world.ended

    @property
    def stopped(self) -> bool:
        """It ended before its time, on request."""
        return self._world.stopped

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Samples and mean loss of each piece since the last `observe`."""
        return self._world.losses

    @property
    def totals(self) -> Totals:
        return self._world.totals

    def advance(self, rounds: int | None = None, seconds: float | None = None) -> None:
        """Go on until so many more rounds are complete or so many virtual seconds have passed; else to the end."""
        world, policy, step = self._world, self.policy, self._world.clock.step
        last_round = math.inf if rounds is None else policy.version + rounds
        until = math.inf if seconds is None else self.now + seconds
        while not world.ended and policy.version < last_round and step(until):
            pass
        assert self.now < math.inf, f"the simulation is stuck; it waits for ranks {policy.waited_for()}"

    def tune(self, settings: Settings) -> None:
        """New K, D and q for the work handed out from now on."""
        self._world.post.hear([Tuned(settings)])

    def request_stop(self) -> None:
        """Come to rest as soon as possible and end there."""
        self._world.post.hear([DrainRequested(STOP)])

    def observe(self) -> Observation:
        """What has happened since the last call."""
        world, policy, nodes = self._world, self.policy, self.nodes.values()
        waits = sum(node.wait_seconds + node.waiting_seconds(self.now) for node in nodes) / len(nodes)
        before, self._mark = (
            self._mark,
            replace(
                world.totals,
                at=self.now,
                rounds=policy.version,
                samples=policy.ledger.applied,
                wait_seconds=waits,
                staleness=policy.staleness.copy(),
            ),
        )
        losses, world.losses = world.losses, []
        return Observation(
            **self._mark.since(before, self.solo_samples_per_second),
            losses=tuple(loss for _, loss in losses),
            noise_scale=self.learner.noise_scale,
            progress=policy.ledger.applied / self.scenario.total_samples,
            learning_rate=self.learner.learning_rate(policy.ledger.applied),
            settings=policy.settings,
        )
