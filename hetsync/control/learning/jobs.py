"""Simulated jobs to learn on and to be judged on: a cluster, a recipe, and a landscape that stands for the workload.

`random_job` draws all of it; `JobDraw` varies a given cluster or recipe instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from hetsync.balance.profile import RankProfile
from hetsync.config.schema import (
    Config,
    DataConfig,
    EmulationConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SyncConfig,
    most_grace,
)
from hetsync.emulation.cluster import Cluster, DeviceGroup, LognormalJitter, PairLink, QuantileJitter, load_cluster
from hetsync.emulation.cluster import Link as ClusterLink
from hetsync.emulation.device import emulated_rates, tells_rates
from hetsync.simulate.quadratic import Landscape, NoisyQuadratic
from hetsync.simulate.recipe import profiles, scaled
from hetsync.simulate.scenario import Scenario, Traffic
from hetsync.simulate.script import Change
from hetsync.simulate.simulation import Simulation
from hetsync.sync.messages import Settings

# A decision covers the time in which the ranks, with nobody to wait for, compute so many batches.
WINDOW_BATCHES = 16
# Decisions until the time of a job is up. It has as many samples as could be applied by then.
DECISIONS = 40
# Of the landscape's noise, side by side: a single one hides what a decision was worth where noise is all that remains.
REALISATIONS = 16

Random = np.random.Generator
AnyLink = TypeVar("AnyLink", ClusterLink, PairLink)


@dataclass(frozen=True)
class Job:
    """A job on a simulated cluster.

    Args:
        config: Batch, optimizer, schedule, synchronisation at the start, and the seed of everything drawn.
        cluster: Devices, jitter, link.
        ranks: Ranks on it; its devices repeat where it has fewer.
        landscape: What stands for model and data.
        samples_per_second: What the ranks reach alone, together, but for their fixed seconds.
        batches: Samples to train on, in batches.
        script: What changes on the way.
        traffic: What travels.
        knows_noise: Does a controller see the gradient noise scale?
        loss_noise: Standard deviation of the logarithm of each task's observed loss, which no quadratic has.
    """

    config: Config
    cluster: Cluster
    ranks: int
    landscape: Landscape
    samples_per_second: float
    batches: int = WINDOW_BATCHES * DECISIONS
    script: tuple[Change, ...] = ()
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    knows_noise: bool = True
    loss_noise: float = 0.0

    @property
    def batch_size(self) -> int:
        return self.config.data.batch_size

    @cached_property
    def profiles(self) -> list[RankProfile]:
        config = replace(self.config, emulation=EmulationConfig(self.cluster.name, self.samples_per_second))
        return profiles(config, scaled(self.cluster, self.ranks), self.ranks)

    @cached_property
    def _slice_samples(self) -> float:
        """A batch, and what the devices could compute in the seconds that a slice takes whatever its samples."""
        return self.batch_size + sum(p.time.fixed_seconds / p.time.seconds_per_sample for p in self.profiles)

    @property
    def window_seconds(self) -> float:
        return WINDOW_BATCHES * self._slice_samples / self.samples_per_second

    @property
    def time_limit(self) -> float:
        """Virtual seconds in which all samples could be applied if no rank ever waited."""
        return self.batches * self._slice_samples / self.samples_per_second

    def start(self) -> Simulation:
        config, total = self.config, self.batches * self.batch_size
        cluster, seed = scaled(self.cluster, self.ranks), config.run.seed
        sync = replace(config.sync, fragments=1)  # a quadratic knows no others
        scenario = Scenario(cluster, self.profiles, sync, self.batch_size, total, None, seed, self.traffic)
        learner = NoisyQuadratic(self.landscape, config, self.ranks, total, REALISATIONS)
        return Simulation(scenario, learner, self.script)


def with_settings(job: Job, settings: Settings) -> Job:
    """The job with these settings at its start."""
    sync = job.config.sync
    grace = min(sync.first_grace, most_grace(settings.delay_bound))
    sync = replace(sync, delay_bound=settings.delay_bound, accumulation=settings.accumulation, grace=grace)
    return replace(job, config=replace(job.config, sync=sync))


def random_job(random: Random) -> Job:
    """Any job on any cluster."""
    return JobDraw()(random)


@dataclass(frozen=True)
class JobDraw:
    """Jobs on a cluster like the given one, and with a recipe like the given one, whose model makes this traffic;
    anything where it is None."""

    cluster: Cluster | None = None
    recipe: Config | None = None
    traffic: Traffic | None = None

    def __call__(self, random: Random) -> Job:
        cluster = random_cluster(random) if self.cluster is None else varied(self.cluster, random)
        seed = int(random.integers(2**31))
        config = random_recipe(cluster.size, random) if self.recipe is None else self.recipe
        config = replace(config, run=RunConfig(seed=seed))
        rate = self._samples_per_second(config, cluster, random)
        slice_seconds = config.data.batch_size / rate
        job = Job(
            config,
            cluster,
            cluster.size,
            random_landscape(config, random),
            rate,
            traffic=random_traffic(cluster, slice_seconds, random) if self.traffic is None else self.traffic,
            knows_noise=bool(random.random() < 0.5),
            loss_noise=float(random.choice([0.0, 0.05, 0.2])),
        )
        return replace(job, script=random_script(job, random))

    def _samples_per_second(self, config: Config, cluster: Cluster, random: Random) -> float:
        """As the profile tells it of the recipe's model; else a slice takes a twentieth of a second to a whole one."""
        drawn = config.data.batch_size / log_uniform(random, 0.05, 1.0)
        if self.recipe is None or not tells_rates(cluster, cluster.size, config.model.name):
            return drawn
        return sum(emulated_rates(cluster, cluster.size, config.model.name, None, drawn))


def log_uniform(random: Random, low: float, high: float) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def random_cluster(random: Random) -> Cluster:
    """Two to eight devices: alike, of two or three kinds, or with one in trouble."""
    size = int(random.integers(2, 9))
    speeds = np.ones(size)
    kind = random.integers(3)
    if kind == 1:
        speeds = np.sort(random.choice([1.0, log_uniform(random, 1, 4), log_uniform(random, 2, 8)], size))[::-1]
    elif kind == 2:
        speeds[-1] = 1 / random.uniform(1.5, 4)
    return Cluster("random", "drawn", devices(speeds), random_link(random), random_jitter(random))


def devices(speeds: Sequence[float] | np.ndarray) -> tuple[DeviceGroup, ...]:
    return tuple(DeviceGroup(f"device {rank}", 1, float(speed)) for rank, speed in enumerate(speeds))


def random_link(random: Random) -> ClusterLink | None:
    """None, or one whose round takes a twentieth of a slice's time up to ten times as long."""
    return None if random.random() < 0.3 else ClusterLink(compute_fraction=log_uniform(random, 0.05, 10.0))


def random_traffic(cluster: Cluster, slice_seconds: float, random: Random) -> Traffic:
    """Of a model of any size whose weights the cluster's network moves in ten slices at most. Where that has no
    bandwidth the size does not matter."""
    bandwidth = cluster.ring_link(range(cluster.size)).bytes_per_second
    if bandwidth is None:
        return Traffic()
    most = 10 * slice_seconds * bandwidth / 8  # a ring carries each value of four bytes almost twice
    values = max(1, int(min(log_uniform(random, 1e4, 1e8), most)))
    return Traffic(values, (values,))


def random_jitter(random: Random) -> LognormalJitter | QuantileJitter | None:
    kind = random.integers(4)
    if kind == 0:
        return None
    if kind == 1:
        fitted = load_cluster("alibaba-jitter").jitter
        assert isinstance(fitted, QuantileJitter)
        return fitted
    return LognormalJitter(float(random.uniform(0.05, 0.6)))


def varied(cluster: Cluster, random: Random) -> Cluster:
    """The cluster with every device up to a fifth faster or slower, and its links up to twice as fast or slow."""
    groups = [_at_speed(cluster.device_of(rank), random.uniform(0.8, 1.2)) for rank in range(cluster.size)]
    link, links = cluster.link, cluster.links
    if link is not None or links:
        factor = log_uniform(random, 0.5, 2.0)
        links = tuple(_slower(pair, factor) for pair in links)
        if link is not None:
            fraction = None if link.compute_fraction is None else link.compute_fraction * factor
            link = replace(_slower(link, factor), compute_fraction=fraction)
    return replace(cluster, devices=tuple(groups), link=link, links=links)


def _at_speed(group: DeviceGroup, factor: float) -> DeviceGroup:
    """One device of the group, at another speed."""
    rates = {model: rate * factor for model, rate in group.samples_per_second.items()}
    return replace(group, count=1, speed=group.speed * factor, samples_per_second=rates)


def _slower(link: AnyLink, factor: float) -> AnyLink:
    bandwidth = None if link.bytes_per_second is None else link.bytes_per_second / factor
    return replace(link, latency_seconds=link.latency_seconds * factor, bytes_per_second=bandwidth)


def random_recipe(ranks: int, random: Random) -> Config:
    batch = ranks * int(random.choice([8, 16, 32]))
    momentum = float(random.choice([0.0, 0.9]))
    bound, slices = int(random.choice([0, 1, 4, 4, 16])), int(random.choice([1, 1, 1, 2, 8]))
    return Config(
        data=DataConfig(batch_size=batch),
        optimizer=OptimizerConfig("sgd", 0.05, momentum),
        schedule=ScheduleConfig("cosine" if random.random() < 0.4 else "constant"),
        # The quorum of the jobs that the policy which comes along was learned on.
        sync=SyncConfig(delay_bound=bound, quorum=0.25, accumulation=slices),
    )


def random_landscape(config: Config, random: Random) -> Landscape:
    """One that the recipe's learning rate can learn on, quickly or slowly, with little noise or much, which stays or
    falls with the loss.

    A sharpness (learning rate times largest curvature, momentum included) of 1 is near where synchronous steps of full
    batches begin to swing; at 0.03 a job ends long before it has converged.
    """
    rate = config.optimizer.learning_rate
    momentum = config.optimizer.momentum if config.optimizer.name == "sgd" else 0.0
    sharpness = log_uniform(random, 0.03, 0.5)
    noise = log_uniform(random, 0.02, 5.0)
    power = float(random.choice([0.0, random.uniform(), 1.0]))
    if power:
        # From 0.57 / sharpness on, noise in proportion to the loss raises it faster than the slowest dimension falls.
        noise = min(noise, 0.3 / sharpness)
    floor = log_uniform(random, 0.003, 0.3)
    scale = log_uniform(random, 0.1, 10.0)
    curvature = sharpness * (1 - momentum) / rate
    return Landscape(scale, floor * scale, curvature, noise * config.data.batch_size, power)


def random_script(job: Job, random: Random) -> tuple[Change, ...]:
    """Nothing, or one or two ranks that become slower for a part of the time or for good."""
    if random.random() < 0.6:
        return ()
    out = []
    for rank in random.choice(job.ranks, size=min(job.ranks, int(random.integers(1, 3))), replace=False):
        begin, end = np.sort(random.uniform(0.1, 1.3, 2)) * job.time_limit
        out.append(Change(float(begin), int(rank), "slow_by", float(random.uniform(1.5, 4.0))))
        out.append(Change(float(end), int(rank), "recover"))
    return tuple(sorted(out, key=lambda change: change.at_seconds))
