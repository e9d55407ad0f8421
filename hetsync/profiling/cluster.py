"""Cluster profiles: what `cluster_profiles/*.yaml` may say, and how it is read and written.

A profile is what `hetsync profile` measures, what the planner and the simulator read, and what `--emulate`
imposes on a machine that has no such devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from hetsync.errors import UserError


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices. `speed` is relative, in any unit; `samples_per_second` is measured, by model name."""

    name: str
    count: int = 1
    speed: float = 1.0
    memory_gib: float | None = None
    samples_per_second: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.count >= 1, "count", self.count, "at least 1")
        _require(self.speed > 0, "speed", self.speed, "above 0")
        _require(self.memory_gib is None or self.memory_gib > 0, "memory_gib", self.memory_gib, "above 0")
        for model, rate in self.samples_per_second.items():
            _require(rate > 0, f"samples_per_second.{model}", rate, "above 0")

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device; None where the profile does not limit it."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


@dataclass(frozen=True)
class Link:
    """What an allreduce over all ranks costs: that of a ring, or a fraction of what the devices need.

    `bytes_per_second` is the bandwidth of each rank's own link; None is unlimited. `compute_fraction` makes a
    round take this fraction of a slice's time instead, so that a profile can mean "half as long as the
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


@dataclass(frozen=True)
class Cluster:
    """A cluster: its devices in rank order, its link, its jitter, and where the figures come from."""

    name: str
    source: str
    devices: tuple[DeviceGroup, ...]
    link: Link | None = None
    jitter: Jitter | None = None
    events: tuple[Slowdown, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.devices), "devices", [], "at least one")

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(group.count for group in self.devices)

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
    try:
        file = resources.files("hetsync.cluster_profiles") / f"{path.name}.yaml" if shipped else path
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        cluster = _record(Cluster, loaded, "")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"cannot read cluster profile {name_or_path}: {problem}") from error
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
    target = Path(path)
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            yaml.safe_dump(_plain(cluster), file, sort_keys=False, allow_unicode=True, width=110)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        problem = f"cannot write cluster profile {path}: {error.strerror}"
        raise UserError(f"{problem}: choose another path") from error
    finally:
        draft.unlink(missing_ok=True)


def _require(condition: bool, key: str, value: Any, what: str) -> None:
    if not condition:
        raise UserError(f"{key} is {value}, but must be {what}")


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, without the keys that have their default; tuples as lists."""
    if dataclasses.is_dataclass(value):
        pairs = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: _plain(v) for f, v in pairs if not _default(f, v)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _default(key: dataclasses.Field[Any], value: Any) -> bool:
    if key.name == "distribution":  # it tells the reader which kind of jitter this is
        return False
    factory = key.default_factory
    return value == (key.default if factory is dataclasses.MISSING else factory())


def _build(kind: Any, value: Any, where: str) -> Any:
    """A value of the annotated type from what YAML gave, or a UserError that names the key."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in options:
            return None
        return _build(_option([o for o in options if o is not NoneType], value, where), value, where)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if origin is tuple:
        _require(isinstance(value, list), where, repr(value), "a list")
        return tuple(_build(options[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        _require(isinstance(value, dict), where, repr(value), "a mapping")
        return {str(key): _build(options[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        _require(value in options, where, repr(value), " or ".join(options))
        return value
    return _scalar(kind, value, where)


def _record(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where or "the file", repr(value), "a mapping of keys to values")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    dot = f"{where}." if where else ""
    for key in value:
        if key not in fields:
            raise UserError(f"{dot}{key} is not a key: use one of {', '.join(fields)}, or remove it")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise UserError(f"{dot}{name} is missing: add it")
    hints = get_type_hints(kind)
    arguments = {key: _build(hints[key], item, f"{dot}{key}") for key, item in value.items()}
    try:
        return kind(**arguments)
    except UserError as error:
        raise UserError(f"{dot}{error}") from None


def _option(options: Sequence[Any], value: Any, where: str) -> Any:
    """Which member of a union is meant: the only one, or the one that `distribution` names."""
    if len(options) == 1:
        return options[0]
    _require(isinstance(value, dict), where, repr(value), "a mapping of keys to values")
    named = {option.distribution: option for option in options}
    chosen = value.get("distribution")
    _require(chosen in named, f"{where}.distribution", repr(chosen), " or ".join(named))
    return named[chosen]


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        return _number(value, where)
    words = {int: "a whole number", str: "text"}
    _require(isinstance(value, kind) and not isinstance(value, bool), where, repr(value), words[kind])
    return value


def _number(value: Any, where: str) -> float:
    number = math.nan
    # YAML 1.1 takes 1e9, without a point, for text.
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            number = float(value)
    _require(math.isfinite(number), where, repr(value), "a number")
    return number
