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


def gain_of(
    config: Config, cluster: Cluster, ranks: Sequence[RankProfile], traffic: Traffic, adaptive: bool = False
) -> Gain:
    """Simulated; `adaptive` as in `Scenario`. UserError where the recipe's shares cannot be given to these ranks."""
    batch = config.data.batch_size
    slices = max(LEAST_SLICES, min(MOST_SLICES, SIMULATED_SLICES // len(ranks)))
    spare_the_collector()

    def rate(sync: SyncConfig) -> float:
        job = Scenario(cluster, ranks, sync, batch, slices * batch, seed=config.run.seed, traffic=traffic)
        simulation = Simulation(job)
        simulation.advance()
        return job.total_samples / simulation.now

    def ruled(sync: SyncConfig) -> float:
        """As the rule decides on the delay bound in the end: in so few slices it would not come to it."""
        if sync.delay_bound != "auto":
            return rate(sync)
        without = rate(replace(sync, delay_bound=0, grace=0))
        with_delay = rate(replace(sync, delay_bound=sync.most_delay_bound))
        return with_delay if with_delay > (1 + delay_costs(adaptive)) * without else without

    in_step = replace(config.sync, delay_bound=0, accumulation=1, grace=0, pins={})
    equal = rate(replace(in_step, shares="equal", rebalance=False))
    by_speed = rate(replace(in_step, shares="speed"))
    return Gain(equal, by_speed, ruled(config.sync), sum(solo_rates(batch, ranks, config.sync.least_slice)), slices)
