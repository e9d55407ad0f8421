"""What a recipe gains on a cluster over the two ways of training that wait for all ranks in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import solo_rates
from hetsync.config.schema import Config, SyncConfig
from hetsync.emulation.cluster import Cluster
from hetsync.simulate.scenario import Scenario, Traffic
from hetsync.simulate.simulation import Simulation, spare_the_collector
from hetsync.sync.rounds_rule import delay_costs

MOST_SLICES = 200  # of every rank; rounds repeat long before
LEAST_SLICES = 20
SIMULATED_SLICES = 200_000  # of all ranks together: a few seconds


@dataclass(frozen=True)
class Gain:
    """Samples/s of three ways to train; `alone` is what the devices could do with nobody to wait for, added up.

    `equal` and `by_speed` are synchronous, with equal shares and with shares by speed; `recipe` is as the recipe says.
    """

    equal: float
    by_speed: float
    recipe: float
    alone: float
    slices: int


@dataclass(frozen=True)
class Trials:
    """Ways to train a job's recipe on its devices, each simulated for so many `slices` of every rank.

    `adaptive` as in `Scenario`.
    """

    config: Config
    cluster: Cluster
    ranks: Sequence[RankProfile]
    traffic: Traffic
    adaptive: bool
    slices: int

    def rate(self, sync: SyncConfig) -> float:
        """Samples/s. UserError where these shares cannot be given to the ranks."""
        batch, seed = self.config.data.batch_size, self.config.run.seed
        job = Scenario(self.cluster, self.ranks, sync, batch, self.slices * batch, seed=seed, traffic=self.traffic)
        simulation = Simulation(job)
        simulation.advance()
        return job.total_samples / simulation.now

    def both(self, sync: SyncConfig) -> tuple[float, float]:
        """Of the recipe's own settings, without delay and with that which the rule may choose."""
        delayed = replace(sync, delay_bound=sync.most_delay_bound)
        return self.rate(replace(sync, delay_bound=0, grace=0)), self.rate(delayed)


def worth_its_delay(without: float, with_delay: float, adaptive: bool) -> bool:
    """As the rule decides on the delay bound in the end, by samples/s: in few slices it would not come to it."""
    return with_delay > (1 + delay_costs(adaptive)) * without


def gain_of(
    config: Config, cluster: Cluster, ranks: Sequence[RankProfile], traffic: Traffic, adaptive: bool = False
) -> Gain:
    """Simulated; `adaptive` as in `Scenario`. UserError where the recipe's shares cannot be given to these ranks."""
    batch = config.data.batch_size
    slices = max(LEAST_SLICES, min(MOST_SLICES, SIMULATED_SLICES // len(ranks)))
    spare_the_collector()
    trials = Trials(config, cluster, ranks, traffic, adaptive, slices)

    def ruled(sync: SyncConfig) -> float:
        if sync.delay_bound != "auto":
            return trials.rate(sync)
        without, with_delay = trials.both(sync)
        return with_delay if worth_its_delay(without, with_delay, adaptive) else without

    in_step = replace(config.sync, delay_bound=0, accumulation=1, grace=0, pins={})
    equal = trials.rate(replace(in_step, shares="equal", rebalance=False))
    by_speed = trials.rate(replace(in_step, shares="speed"))
    return Gain(equal, by_speed, ruled(config.sync), sum(solo_rates(batch, ranks, config.sync.least_slice)), slices)
