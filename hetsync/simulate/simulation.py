"""A job on a virtual cluster: the engine's state machine, coordinator and workers on a virtual clock.

Each rank has a main thread, which computes slice after slice (`engine`), and a communication thread, which polls now
and then (`polling`), carries messages (`router`) and joins every round (`communicator`). What happens when all have
come to rest is in `drains`, what happens to the weights in a `learner`. README.md has what they stand for.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace

from hetsync.data.ledger import Ledger
from hetsync.simulate.clock import Clock
from hetsync.simulate.communicator import Communicator
from hetsync.simulate.drains import Drains
from hetsync.simulate.engine import MainThreads
from hetsync.simulate.evaluations import Evaluations, OnEvaluation
from hetsync.simulate.learner import Learner
from hetsync.simulate.polling import Polling
from hetsync.simulate.scenario import Scenario
from hetsync.simulate.script import Change
from hetsync.simulate.telemetry import Telemetry
from hetsync.simulate.virtual_rank import VirtualRank, VirtualRanks
from hetsync.sync.messages import DrainRequested, Settings, SettingsChanged, settings_of
from hetsync.sync.milestones import STOP
from hetsync.sync.observation import Observation, Totals
from hetsync.sync.rounds_rule import RoundsChange
from hetsync.sync.state_machine import RoundStateMachine

# New objects between two runs of the garbage collector, and runs between those that go through more.
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
        telemetry: Telemetry | None = None,
    ) -> None:
        """`on_evaluation` is told the metrics wherever the scenario evaluates, and at the end."""
        self.scenario = scenario
        self.learner = learner = learner or Learner()
        self._telemetry = telemetry = telemetry or Telemetry()
        self._clock = clock = Clock()
        self._ranks = ranks = VirtualRanks.of(scenario)
        self.machine = _state_machine(scenario)
        evaluations = Evaluations(clock, ranks, learner, telemetry, on_evaluation, scenario.judged)
        self._communicator = Communicator(
            scenario=scenario,
            clock=clock,
            polling=Polling(scenario.runtime, scenario.seed),
            ranks=ranks,
            machine=self.machine,
            learner=learner,
            telemetry=telemetry,
            evaluations=evaluations,
            on_rest=lambda start: self._drains.at_rest(start),
        )
        main_threads = MainThreads(
            scenario=scenario,
            clock=clock,
            ranks=ranks,
            learner=learner,
            telemetry=telemetry,
            communicator=self._communicator,
        )
        self._drains = Drains(
            script=script,
            clock=clock,
            ranks=ranks,
            learner=learner,
            evaluations=evaluations,
            communicator=self._communicator,
            main_threads=main_threads,
        )
        profiles = zip(scenario.ranks, scenario.shares, strict=True)
        self.solo_samples_per_second = sum(profile.time.rate(share) for profile, share in profiles)
        self._mark = Totals()
        for rank in ranks.present.values():
            main_threads.go_on(rank)
        self._communicator.start()

    @property
    def ranks(self) -> dict[int, VirtualRank]:
        """The ranks that are there."""
        return self._ranks.present

    @property
    def away(self) -> dict[int, VirtualRank]:
        """The ranks that have left."""
        return self._ranks.away

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now

    @property
    def ended(self) -> bool:
        return self._drains.ended

    @property
    def stopped(self) -> bool:
        """It ended before its time, on request."""
        return self._drains.stopped

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Samples and mean loss of each task since the last `observe`."""
        return self._telemetry.losses

    @property
    def totals(self) -> Totals:
        return self._telemetry.totals

    @property
    def rounds_changes(self) -> Sequence[RoundsChange]:
        """By rule, so far."""
        return self._telemetry.rounds_changes

    def advance(self, rounds: int | None = None, seconds: float | None = None) -> None:
        """Go on until so many more rounds are complete or so many virtual seconds have passed; else to the end."""
        drains, machine, step = self._drains, self.machine, self._clock.step
        last_round = math.inf if rounds is None else machine.version + rounds
        until = math.inf if seconds is None else self.now + seconds
        while not drains.ended and machine.version < last_round and step(until):
            pass
        assert self.now < math.inf, f"the simulation is stuck; it waits for ranks {machine.waited_for()}"

    def tune(self, settings: Settings) -> None:
        """New K, D and q for the work handed out from now on; all else stays as it is."""
        self._communicator.handle_events([SettingsChanged(settings)])

    def request_stop(self) -> None:
        """Come to rest as soon as possible and end there."""
        self._communicator.handle_events([DrainRequested(STOP)])

    def observe(self) -> Observation:
        """What has happened since the last call."""
        machine, applied, before = self.machine, self.machine.ledger.applied, self._mark
        self._mark = replace(
            self.totals,
            at=self.now,
            rounds=machine.version,
            samples=applied,
            wait_seconds=self._mean_wait_seconds(),
            staleness=machine.staleness.copy(),
        )
        losses, self._telemetry.losses = self._telemetry.losses, []
        return Observation(
            **self._mark.since(before, self.solo_samples_per_second),
            losses=tuple(loss for _, loss in losses),
            noise_scale=self.learner.noise_scale,
            progress=applied / self.scenario.total_samples,
            learning_rate=self.learner.learning_rate(applied),
            settings=machine.settings,
        )

    def _mean_wait_seconds(self) -> float:
        ranks = self.ranks.values()
        return sum(rank.wait_seconds + rank.waiting_seconds(self.now) for rank in ranks) / len(ranks)


def _state_machine(scenario: Scenario) -> RoundStateMachine:
    settings = settings_of(scenario.sync)
    return RoundStateMachine(
        dict(enumerate(scenario.shares)),
        settings if scenario.begun is None else scenario.begun.applied_to(settings),
        Ledger(scenario.total_samples),
        scenario.rests,
        evaluations=scenario.evaluations,
        least_slice=scenario.sync.least_slice,
    )
