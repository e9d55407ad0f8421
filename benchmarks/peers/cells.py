"""What is compared: workloads, clusters, peers, and the recipe of each job. Nothing runs here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.local_job import RECIPES
from hetsync.balance.profile import StepTime
from hetsync.balance.shares import speed_shares
from hetsync.emulation.cluster import Cluster, DeviceGroup, Slowdown, TraceJitter, load_cluster
from hetsync.errors import UserError

# What the recipe says of the peers that are HetSync itself.
HETSYNC: Mapping[str, Mapping[str, Any]] = {
    "hetsync-sync": {"sync": {"delay_bound": 0}},
    "hetsync-delayed": {"sync": {"delay_bound": 4}},
    "hetsync-k2": {"sync": {"accumulation": 2, "delay_bound": 4}},
    "hetsync-k8": {"sync": {"accumulation": 8, "delay_bound": 1}},
    "hetsync-goodput": {"control": {"name": "goodput"}},
    "hetsync-ppo": {"control": {"name": "ppo"}},
}
PEERS = (
    "alone",
    "unsynchronised",
    "ddp-equal",
    "ddp-join",
    "ddp-by-speed",
    "post-local-sgd",
    "horovod",
    "torchft-local-sgd",
    "torchft-diloco",
    *HETSYNC,
)
EQUAL_SHARES = ("ddp-equal",)

SLOW_FACTOR = 3.0  # of the rank that slows down half-way
SLOW_RANK = 1  # a fast one, and not the one that hosts HetSync's coordinator
CPU_PERCENT = (80, 40, 20, 20)  # of a core, by rank, where devices are really throttled


@dataclass(frozen=True)
class Workload:
    """A recipe with what this benchmark changes in it.

    `scaled` is the factor on the recipe's learning rate, for another batch than its own. `rate` is the samples/s of
    the whole emulated cluster: low enough that the ranks' real compute takes less than a fifth of two cores. `target`
    is (metric, value); `falling` says that less is better.
    """

    name: str
    recipe: str
    batch: int
    samples: int
    rate: float
    quick_samples: int
    quick_rate: float
    target: tuple[str, float]
    falling: bool = False
    scaled: float = 1.0
    folder: str | None = None  # of its data set, within --data
    evaluations: int = 8
    throttled_options: Mapping[str, Any] = field(default_factory=dict)  # of the model, where devices are real

    def read_recipe(self) -> dict[str, Any]:
        made: dict[str, Any] = yaml.safe_load((RECIPES / f"{self.recipe}.yaml").read_text())
        return made

    @property
    def learning_rate(self) -> float:
        return float(self.scaled * self.read_recipe()["optimizer"]["learning_rate"])


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="digits",
            recipe="digits",
            batch=160,
            samples=12_000,
            rate=400,
            quick_samples=9_600,
            quick_rate=800,
            target=("accuracy", 0.90),
            scaled=2.5,  # as the batch (Goyal et al. 2017)
            throttled_options={"channels": 64},
        ),
        Workload(
            name="cifar10",
            recipe="cifar10_resnet18",
            batch=64,
            samples=12_800,
            rate=80,
            quick_samples=2_560,
            quick_rate=80,
            target=("accuracy", 0.35),
            folder="cifar10_lossless",
        ),
        Workload(
            name="deeptte-city",
            recipe="deeptte_synthetic_city",
            batch=128,
            samples=12_000,
            rate=150,
            quick_samples=5_120,
            quick_rate=150,
            target=("mape", 18.0),
            falling=True,
        ),
        Workload(
            name="deeptte-chengdu",
            recipe="deeptte_chengdu",
            batch=64,
            samples=12_800,
            rate=80,
            quick_samples=3_200,
            quick_rate=80,
            target=("mape", 25.0),
            falling=True,
            scaled=1.5,  # about as the root of the batch, for AdamW (Malladi et al. 2022)
            folder="deeptte_chengdu",
        ),
        Workload(
            name="ptb",
            recipe="ptb_lstm_small",
            batch=40,
            samples=8_000,
            rate=40,
            quick_samples=1_600,
            quick_rate=40,
            target=("perplexity", 700.0),
            falling=True,
            folder="ptb",
        ),
    )
}


@dataclass(frozen=True)
class Scenario:
    """A cluster, and what happens to it. Without `cluster`, the machine's own cores under quotas of `cpu_percent`.

    `memory_limited` shrinks the fastest devices' memory so that it holds half of their share by speed (`profile`).
    """

    title: str
    cluster: Cluster | None
    slows: bool = False
    memory_limited: bool = False
    cpu_percent: Sequence[int] = CPU_PERCENT

    @property
    def ranks(self) -> int:
        return len(self.cpu_percent) if self.cluster is None else self.cluster.size

    def speeds(self) -> list[float]:
        """Relative speeds of the ranks at the start; throttled ones by their quotas."""
        if self.cluster is None:
            return [float(percent) for percent in self.cpu_percent]
        return [self.cluster.device_of(rank).speed for rank in range(self.ranks)]


def scenarios(traces: Path | None) -> dict[str, Scenario]:
    """`traces` is a folder with Alibaba's job_N_norm.csv; without it the fitted profile is taken."""
    production = Scenario("production jitter (fitted)", load_cluster("alibaba-jitter"))
    if traces is not None:
        path = (traces / "job_1_norm.csv").resolve()
        if not path.is_file():
            raise UserError(f"--traces is {traces}, which holds no job_1_norm.csv: name the folder that does")
        replay = TraceJitter(str(path), batch_time_column="batch_time_norm")
        production = Scenario("production jitter (trace, job 1)", with_jitter(load_cluster("quickstart"), replay))
    return {
        "v100-p100-k80": Scenario("V100+P100+K80", load_cluster("v100-p100-k80")),
        "t4-v100-a100": Scenario("T4+V100+A100", load_cluster("t4-v100-a100")),
        "homogeneous": Scenario("homogeneous", load_cluster("homogeneous")),
        "production-jitter": production,
        "heavy-jitter": Scenario("heavy jitter (lognormal, σ 0.5)", load_cluster("heavy-jitter")),
        "one-rank-in-trouble": Scenario("one rank 2.4× slower", load_cluster("one-rank-in-trouble")),
        "slow-link": Scenario("slow link (half of compute)", load_cluster("slow-link")),
        "slows-half-way": Scenario("a rank slows 3× half-way", load_cluster("quickstart"), slows=True),
        "uneven-memory": Scenario("uneven memory", load_cluster("quickstart"), memory_limited=True),
        "throttled": Scenario("not emulated: CPU quotas", None),
    }


def with_jitter(cluster: Cluster, jitter: TraceJitter) -> Cluster:
    return dataclasses.replace(cluster, jitter=jitter)


# Reference figures.


def phases(scenario: Scenario, rate: float) -> list[list[float]]:
    """The ranks' solo rates (samples/s) in each stretch of the job; stretches hold equally many samples."""
    speeds = scenario.speeds()
    before = [rate * speed / sum(speeds) for speed in speeds]
    if not scenario.slows:
        return [before]
    return [before, [r / SLOW_FACTOR if rank == SLOW_RANK else r for rank, r in enumerate(before)]]


def ideal_rate(stretches: Sequence[Sequence[float]]) -> float:
    """Samples/s of devices that never wait, over the whole job."""
    return len(stretches) / sum(1 / sum(rates) for rates in stretches)


def equal_rate(stretches: Sequence[Sequence[float]]) -> float:
    """Samples/s of equal shares in lock-step without jitter or communication: their ceiling."""
    return len(stretches) / sum(1 / (len(rates) * min(rates)) for rates in stretches)


# Jobs.


@dataclass(frozen=True)
class Cell:
    """One job. `rate` is that of the whole emulated cluster, `learning_rate` the workload's where None.

    `known_rates` are the ranks' solo rates where devices are real, once they are measured: what a user who sets shares
    by hand goes by. HetSync is not told.
    """

    workload: Workload
    cluster: str
    scenario: Scenario
    peer: str
    seed: int
    samples: int
    rate: float
    learning_rate: float | None = None
    solo_rank: int | None = None  # measures this throttled rank alone
    known_rates: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        return 1 if self.peer == "alone" else self.scenario.ranks

    @property
    def fastest(self) -> int:
        speeds = self.scenario.speeds()
        return speeds.index(max(speeds)) if self.solo_rank is None else self.solo_rank


def profile(cell: Cell, memory_bytes: int | None) -> Cluster:
    """The cluster that this job's ranks emulate; `memory_bytes` of the fastest devices, where it is limited.

    It limits HetSync only, whose slices are what fits. Whoever sets shares by hand, or has one device, accumulates the
    gradients of smaller batches where a share does not fit; on devices without a fixed cost a step that takes as long.
    """
    cluster = cell.scenario.cluster
    assert cluster is not None
    if cell.peer == "alone":
        one = dataclasses.replace(cluster.device_of(cell.fastest), count=1, memory_gib=None)
        return dataclasses.replace(cluster, devices=(_bare(one),), link=None)
    devices = [_bare(group) for group in cluster.devices]
    if memory_bytes is not None and cell.peer in HETSYNC:
        top = max(group.speed for group in devices)
        gib = memory_bytes / 2**30
        devices = [dataclasses.replace(g, memory_gib=gib) if g.speed == top else g for g in devices]
    events = (slowdown(cell),) if cell.scenario.slows else ()
    return dataclasses.replace(cluster, devices=tuple(devices), events=events)


def sections(cell: Cell) -> dict[str, dict[str, Any]]:
    """Of the recipe, what the peer decides."""
    by_hand: dict[str, Any] = {}
    if cell.peer not in HETSYNC and cell.ranks == len(cell.known_rates):
        shares = speed_shares([StepTime(0.0, 1 / rate) for rate in cell.known_rates], cell.workload.batch)
        by_hand = {"pins": dict(enumerate(shares))}
    return {"sync": by_hand} | {section: dict(keys) for section, keys in HETSYNC.get(cell.peer, {}).items()}


def _bare(group: DeviceGroup) -> DeviceGroup:
    """Without real memory sizes, which mean nothing to these small models."""
    return dataclasses.replace(group, memory_gib=None)


def slowdown(cell: Cell) -> Slowdown:
    """Half-way through the job, counted in samples of the rank itself, so in its share of the job's half."""
    speeds = cell.scenario.speeds()
    part = 1 / len(speeds) if cell.peer in EQUAL_SHARES else speeds[SLOW_RANK] / sum(speeds)
    return Slowdown(SLOW_RANK, SLOW_FACTOR, round(part * cell.samples / 2))


def recipe(cell: Cell, run: Path, cluster_file: Path | None, data: Path | None) -> dict[str, Any]:
    """What both `hetsync-train` and the peers read."""
    workload = cell.workload
    made = workload.read_recipe()
    batches = -(-cell.samples // (workload.evaluations * workload.batch))  # whole ones between evaluations
    made["run"] = {"name": "peers", "dir": str(run), "seed": cell.seed, "samples": cell.samples}
    made["run"] |= {"evaluate_every": batches * workload.batch, "device": "cpu"}
    made["data"]["batch_size"] = workload.batch
    if workload.folder is not None:
        assert data is not None
        made["data"]["options"]["path"] = str(data / workload.folder)
    made["optimizer"]["learning_rate"] = cell.learning_rate or workload.learning_rate
    made |= sections(cell)
    if cluster_file is None:
        made["model"].setdefault("options", {}).update(workload.throttled_options)
    else:
        share = cell.scenario.speeds()[cell.fastest] / sum(cell.scenario.speeds())
        rate = cell.rate * (share if cell.peer == "alone" else 1)
        made["emulation"] = {"profile": str(cluster_file), "samples_per_second": rate}
    return made
