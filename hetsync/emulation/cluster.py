"""Cluster profiles: what `cluster_profiles/*.yaml` may say, and how it is read and written.

A profile is what `hetsync profile` measures, what the simulator reads, and what `--emulate`
imposes on a machine that has no such devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from hetsync.config.checks import wrong
from hetsync.config.records import plain, record
from hetsync.config.yaml_files import read_yaml
from hetsync.errors import UserError, brief, did_you_mean
from hetsync.files import write_atomically

MOST_DEVICES = 1_000_000
MOST_FIXED_SECONDS = 3600.0
RATES = (1e-6, 1e15)  # samples/s that times can be made of


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices. `speed` is relative, in any unit; `samples_per_second` is measured, by model name.

    A slice takes `fixed_seconds` however few samples it has (kernel launches, Python), and its samples beside that.
    `host` is the machine that they are in, for links between machines.
    """

    name: str
    count: int = 1
    speed: float = 1.0
    memory_gib: float | None = None
    samples_per_second: Mapping[str, float] = field(default_factory=dict)
    fixed_seconds: float = 0.0
    host: str | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.count <= MOST_DEVICES, "count", self.count, f"at least 1 and at most {MOST_DEVICES:,}")
        _require_rate("speed", self.speed)
        memory = self.memory_gib
        _require(memory is None or 0 < memory < 2**30, "memory_gib", memory, "above 0 and below 2^30")
        fixed = self.fixed_seconds
        _require(0 <= fixed <= MOST_FIXED_SECONDS, "fixed_seconds", fixed, f"from 0 to {MOST_FIXED_SECONDS:g}")
        for model, rate in self.samples_per_second.items():
            _require_rate(f"samples_per_second.{brief(model)}", rate)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device; None where the profile does not limit it."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


@dataclass(frozen=True)
class Link:
    """What an allreduce over all ranks costs: that of a ring, or a fraction of what the devices need.

    `bytes_per_second` is the bandwidth of each rank's own link; None is unlimited. `compute_fraction` makes a
    sum of all weights take this fraction of a slice's time instead, so that a profile can mean "half as long as the
    devices compute" for every model.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float | None = None
    compute_fraction: float | None = None

    def __post_init__(self) -> None:
        rate, fraction = self.bytes_per_second, self.compute_fraction
        _require(self.latency_seconds >= 0, "latency_seconds", self.latency_seconds, "at least 0")
        _require(rate is None or rate > 0, "bytes_per_second", rate, "above 0")
        _require(fraction is None or fraction >= 0, "compute_fraction", fraction, "at least 0")
        other = rate is not None or self.latency_seconds > 0
        _require(fraction is None or not other, "compute_fraction", fraction, "alone, without the other keys")

    def seconds(self, size_bytes: int, ranks: int, slice_seconds: float) -> float:
        """Seconds of one round's allreduce of a tensor of this size, where a slice takes `slice_seconds`."""
        if ranks == 1:
            return 0.0
        if self.compute_fraction is not None:
            return self.compute_fraction * slice_seconds
        carried_bytes = 2 * (ranks - 1) / ranks * size_bytes
        return self.latency_seconds + carried_bytes / (self.bytes_per_second or math.inf)


@dataclass(frozen=True)
class PairLink:
    """What lies between two groups of devices or hosts, by their names; each twice the same: within it.

    Each pair of ranks has such a link, both ways.
    """

    between: tuple[str, ...]
    latency_seconds: float = 0.0
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        _require(len(self.between) == 2, "between", list(self.between), "two names of device groups or hosts")
        _ = self.link  # whose checks are ours

    @property
    def link(self) -> Link:
        return Link(self.latency_seconds, self.bytes_per_second)

    def joins(self, one: DeviceGroup, other: DeviceGroup) -> bool:
        """Whether it lies between these."""
        first, second = self.between
        return (_called(one, first) and _called(other, second)) or (_called(one, second) and _called(other, first))


def _called(group: DeviceGroup, name: str) -> bool:
    return name in (group.name, group.host)


@dataclass(frozen=True)
class LognormalJitter:
    """Every slice takes exp(σz − σ²/2) times its mean, z standard normal: independent, with mean 1."""

    sigma: float
    distribution: Literal["lognormal"] = "lognormal"

    def __post_init__(self) -> None:
        _require(self.sigma >= 0, "sigma", self.sigma, "at least 0")


@dataclass(frozen=True)
class TraceJitter:
    """Replay a CSV file of step times: worker w's records, in order of time, divided by their mean.

    One record holds for `hold` slices, because traces record only some iterations (about every tenth in
    Alibaba's). `path` is relative to the profile's folder.
    """

    path: str
    worker_column: str = "worker"
    time_column: str = "time"
    batch_time_column: str = "batch_time"
    hold: int = 10
    distribution: Literal["trace"] = "trace"

    def __post_init__(self) -> None:
        _require(self.hold >= 1, "hold", self.hold, "at least 1")


@dataclass(frozen=True)
class QuantileModel:
    """A fitted distribution of step times: its quantile function, linear between points, and its lag-1
    autocorrelation. Factors are divided by the mean they have together, so that it is 1."""

    probabilities: tuple[float, ...]
    factors: tuple[float, ...]
    autocorrelation: float = 0.0

    def __post_init__(self) -> None:
        p, f, rho = self.probabilities, self.factors, self.autocorrelation
        steps = all(a < b for a, b in pairwise(p))
        full = len(p) >= 2 and p[0] == 0 and p[-1] == 1
        _require(full and steps, "probabilities", list(p), "ascending from 0 to 1")
        _require(len(f) == len(p), "factors", list(f), f"{len(p)} numbers, one for each probability")
        _require(f[0] > 0 and list(f) == sorted(f), "factors", list(f), "ascending and above 0")
        _require(0 <= rho < 1, "autocorrelation", rho, "at least 0 and below 1")


@dataclass(frozen=True)
class QuantileJitter:
    """Fitted step times; rank i follows `models[i mod n]`, and one draw holds for `hold` slices."""

    models: tuple[QuantileModel, ...]
    hold: int = 10
    distribution: Literal["quantiles"] = "quantiles"

    def __post_init__(self) -> None:
        _require(bool(self.models), "models", [], "at least one")
        _require(self.hold >= 1, "hold", self.hold, "at least 1")


Jitter = LognormalJitter | TraceJitter | QuantileJitter


@dataclass(frozen=True)
class Slowdown:
    """A rank takes `factor` times as long after `after_samples` of its own samples, until `until_samples`."""

    rank: int
    factor: float
    after_samples: int
    until_samples: int | None = None

    def __post_init__(self) -> None:
        until, after = self.until_samples, self.after_samples
        _require(self.rank >= 0, "rank", self.rank, "at least 0")
        _require(self.factor > 0, "factor", self.factor, "above 0")
        _require(after >= 0, "after_samples", after, "at least 0")
        _require(until is None or until > after, "until_samples", until, f"above after_samples, {after}")


def slowdown_factor(slowdowns: Iterable[Slowdown], samples_done: int) -> float:
    """How many times as long a rank takes after so many of its own samples; `slowdowns` are that rank's."""
    active = (s for s in slowdowns if s.after_samples <= samples_done < (s.until_samples or math.inf))
    return math.prod(s.factor for s in active)


@dataclass(frozen=True)
class Cluster:
    """A cluster: its devices in rank order, its link, its jitter, and where the figures come from.

    Of `links` the first counts that lies between two devices; where none does, it is `link`.

    `step_seconds` is what a synchronous step takes on its hosts beyond devices and link, such as for ranks that wake at
    once on few cores. The simulator adds it; emulation does not, whose host has a time of its own.
    """

    name: str
    source: str
    devices: tuple[DeviceGroup, ...]
    link: Link | None = None
    jitter: Jitter | None = None
    events: tuple[Slowdown, ...] = ()
    step_seconds: float = 0.0
    links: tuple[PairLink, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.devices), "devices", [], "at least one")
        _require(self.step_seconds >= 0, "step_seconds", self.step_seconds, "at least 0")
        self._check_links()

    def _check_links(self) -> None:
        groups, hosts = {group.name for group in self.devices}, {group.host for group in self.devices if group.host}
        known, seen = groups | hosts, set()
        if self.links and self.link is not None and self.link.compute_fraction is not None:
            raise wrong(
                "link.compute_fraction", self.link.compute_fraction, "left out beside links: give bytes_per_second"
            )
        for index, pair in enumerate(self.links):
            key = f"links[{index}].between"
            for name in pair.between:
                if name not in known:
                    raise UserError(
                        f"{key} has {brief(name)}, which is neither a device group nor a host"
                        f"{did_you_mean(name, known)}: use {', '.join(sorted(known))}"
                    )
                if name in groups & hosts:
                    raise UserError(f"{key} has {name}, which is a device group and a host: rename one of them")
            names = tuple(sorted(pair.between))
            _require(names not in seen, key, list(pair.between), "there once: remove one of the two")
            seen.add(names)

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(group.count for group in self.devices)

    def without_limits(self) -> Cluster:
        """The same with devices that hold any model whole."""
        return replace(self, devices=tuple(replace(group, memory_gib=None) for group in self.devices))

    def device_of(self, rank: int) -> DeviceGroup:
        """The device that a rank drives: devices are dealt out in listed order. UserError beyond the last."""
        ranks_before = 0
        for group in self.devices:
            ranks_before += group.count
            if 0 <= rank < ranks_before:
                return group
        raise UserError(
            f"cluster profile {self.name} has {self.size} devices, none for rank {rank}: "
            f"start at most {self.size} ranks, or add devices to it"
        )

    def link_between(self, rank: int, other: int) -> Link:
        """What carries tensors from one rank to another; free where the profile says nothing."""
        groups = self.device_of(rank), self.device_of(other)
        return next((pair.link for pair in self.links if pair.joins(*groups)), self.link or Link())

    def ring_link(self, ranks: Sequence[int]) -> Link:
        """What an allreduce of these ranks travels on: the slowest of the links between neighbours in the ring. That of
        all ranks is no faster than `link`, by which `hetsync profile` measures it."""
        found = self.slowest_link(ranks)
        if self.links and self.link is not None and 1 < len(ranks) == self.size:
            return _slowest([found, self.link])
        return found

    def slowest_link(self, ranks: Sequence[int]) -> Link:
        """Of those between neighbours in the ring, however long a sum was measured to take."""
        if not self.links or len(ranks) == 1:
            return self.link or Link()
        return _slowest([self.link_between(*pair) for pair in pairwise([*ranks, ranks[0]])])


def _slowest(links: Sequence[Link]) -> Link:
    bandwidths = [link.bytes_per_second for link in links if link.bytes_per_second is not None]
    return Link(max(link.latency_seconds for link in links), min(bandwidths, default=None))


def shipped_clusters() -> list[str]:
    """Names of the profiles that come with HetSync."""
    files = resources.files("hetsync.cluster_profiles").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml"))


def load_cluster(name_or_path: str) -> Cluster:
    """Read a profile: a shipped one by name, any other by a path (which has a suffix or a separator).

    UserError, naming the file and the key, where there is none or it does not say what it must.
    """
    path = Path(name_or_path)
    shipped = path.suffix not in (".yaml", ".yml") and path.name == name_or_path
    if shipped and name_or_path not in shipped_clusters():
        raise UserError(
            f"there is no cluster profile {name_or_path}: give the path of a .yaml file, "
            f"or one of {', '.join(shipped_clusters())}"
        )
    file = resources.files("hetsync.cluster_profiles") / f"{path.name}.yaml" if shipped else path
    loaded = read_yaml(file, f"cluster profile {name_or_path}")
    try:
        cluster = record(Cluster, loaded)
    except UserError as error:
        raise UserError(f"cluster profile {name_or_path}: {error}") from None
    if isinstance(cluster.jitter, TraceJitter) and not shipped:
        trace = str(path.parent / cluster.jitter.path)
        cluster = dataclasses.replace(cluster, jitter=dataclasses.replace(cluster.jitter, path=trace))
    return cluster


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a profile, all of it or nothing: a reader never sees half a file.

    UserError where the path cannot be written. A trace's path is written as it stands: make it absolute if
    it is relative to another folder.
    """
    text = yaml.safe_dump(plain(cluster), sort_keys=False, allow_unicode=True, width=110)
    write_atomically(Path(path), text, "choose another path")


def _require(condition: bool, key: str, value: Any, what: str) -> None:
    if not condition:
        raise wrong(key, value, what)


def _require_rate(key: str, value: float) -> None:
    least, most = RATES
    _require(least <= value <= most, key, value, f"above 0, from {least:g} to {most:g}")
