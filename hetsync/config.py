"""A recipe: every setting with its unit, its default and its limits. Parsing and merging are jsonargparse's."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hetsync.errors import UserError


def _at_least(key: str, value: float | None, least: float, above: bool = False) -> None:
    """Raise unless the value is a finite number >= least (> least if `above`); None passes."""
    if value is None:
        return
    if not math.isfinite(value) or value < least or (above and value == least):
        relation = "greater than" if above else "at least"
        raise UserError(f"{key} is {value}: it must be {relation} {least:g}")


@dataclass(frozen=True)
class RunConfig:
    """The run: where it writes, how long it trains.

    Args:
        name: Name of the run, part of its folder's name.
        dir: The run folder itself; null makes runs/NAME-DATE-TIME.
        seed: Seed of weights, sample order, dropout and emulated jitter.
        samples: Samples to train on, over all ranks; null trains for `epochs`.
        epochs: Passes over the training data, where `samples` is null.
        evaluate_every: Samples between evaluations on the test data; null evaluates at the end only.
        checkpoint_every: Samples between checkpoints; null saves at the end only.
        keep_checkpoints: Newest checkpoints to keep.
        plane: What carries the data: mpi, local (one rank), or auto (mpi when started by an MPI launcher).
        device: Device of each rank: auto (a CUDA device where there is one), cpu, cuda or cuda:INDEX.
        timeout_seconds: Longest wait for other ranks before the job ends and names them, in seconds.
    """

    name: str = "digits"
    dir: str | None = None
    seed: int = 0
    samples: int | None = None
    epochs: float = 10.0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    plane: Literal["auto", "mpi", "local"] = "auto"
    device: str = "auto"
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        _at_least("run.seed", self.seed, 0)
        _at_least("run.samples", self.samples, 1)
        _at_least("run.epochs", self.epochs, 0, above=True)
        _at_least("run.evaluate_every", self.evaluate_every, 1)
        _at_least("run.checkpoint_every", self.checkpoint_every, 1)
        _at_least("run.keep_checkpoints", self.keep_checkpoints, 1)
        _at_least("run.timeout_seconds", self.timeout_seconds, 0, above=True)


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Args:
        name: A model of hetsync.models, or the import path of your own (my_pkg.my_module:MyModel).
        options: Keyword arguments for it.
    """

    name: str = "digits_cnn"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """The data.

    Args:
        name: A data set of hetsync.data, or the import path of your own (my_pkg.my_module:my_data).
        batch_size: Samples of one slice of all ranks together (B).
        workers: Processes of each rank that load its samples, for data sets that keep Python busy; 0 loads on a thread.
        options: Keyword arguments for the data set.
    """

    name: str = "digits"
    batch_size: int = 64
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least("data.batch_size", self.batch_size, 1)
        _at_least("data.workers", self.workers, 0)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of each rank (the inner one in delayed mode).

    Args:
        name: sgd, adam or adamw of torch.optim, or the import path of your own.
        learning_rate: Learning rate before the schedule.
        momentum: Momentum of sgd.
        weight_decay: Weight decay.
        max_grad_norm: Clip the gradient to this norm before each step; null does not clip.
        options: More keyword arguments for the optimizer.
    """

    name: str = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least("optimizer.learning_rate", self.learning_rate, 0, above=True)
        _at_least("optimizer.momentum", self.momentum, 0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0)
        _at_least("optimizer.max_grad_norm", self.max_grad_norm, 0, above=True)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over samples (not steps).

    Args:
        name: constant, linear or cosine; the latter two fall to `final_factor` at the end of the run.
        warmup_samples: Samples over which the learning rate rises from zero.
        final_factor: Factor on the learning rate at the end.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_samples: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        _at_least("schedule.warmup_samples", self.warmup_samples, 0)
        _at_least("schedule.final_factor", self.final_factor, 0)

    def factor(self, samples: int, total: int) -> float:
        """Factor on the learning rate after `samples` of `total`."""
        if samples < self.warmup_samples:
            return (samples + 1) / self.warmup_samples
        done = (samples - self.warmup_samples) / max(1, total - self.warmup_samples)
        fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[self.name]
        return 1 - fall * (1 - self.final_factor)


@dataclass(frozen=True)
class OuterConfig:
    """What a round's sum does to the anchor (delayed mode).

    Args:
        name: identity adds it; nesterov is DiLoCo's outer optimizer.
        learning_rate: Learning rate of nesterov.
        momentum: Momentum of nesterov.
    """

    name: Literal["identity", "nesterov"] = "identity"
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _at_least("sync.outer.learning_rate", self.learning_rate, 0, above=True)
        _at_least("sync.outer.momentum", self.momentum, 0)


@dataclass(frozen=True)
class SyncConfig:
    """Synchronisation.

    Args:
        delay_bound: Greatest staleness in rounds (D). 0 is synchronous training; null has no bound (asynchronous).
        quorum: Part of a full contribution set, in samples, that may start a round when D > 0;
            1 waits for a contribution of every rank (stale synchronous parallel with bound D).
        accumulation: Slices in one contribution (K).
        shares: Samples of a rank in a slice: speed (by measured speed), equal, or first (rank 0 as pinned,
            the rest even).
        pins: Shares set by hand, rank: samples.
        rebalance: Let shares follow the measured speeds while training, where that gains over 5 %.
        wire: Number format of what travels.
        bucket_bytes: Size of a gradient bucket in bytes (synchronous mode).
        outer: What a round's sum does to the anchor (delayed mode).
    """

    delay_bound: int | None = 4
    quorum: float = 0.25
    accumulation: int = 1
    shares: Literal["speed", "equal", "first"] = "speed"
    pins: dict[int, int] = field(default_factory=dict)
    rebalance: bool = True
    wire: Literal["float32", "bfloat16", "int8"] = "float32"
    bucket_bytes: int = 4194304
    outer: OuterConfig = field(default_factory=OuterConfig)

    def __post_init__(self) -> None:
        _at_least("sync.delay_bound", self.delay_bound, 0)
        _at_least("sync.accumulation", self.accumulation, 1)
        _at_least("sync.bucket_bytes", self.bucket_bytes, 4)
        if not 0 < self.quorum <= 1:
            raise UserError(f"sync.quorum is {self.quorum}: it is a fraction of the samples, above 0 and at most 1")
        if any(rank < 0 or share < 0 for rank, share in self.pins.items()):
            raise UserError(f"sync.pins is {self.pins}: it maps ranks to samples, both 0 or more")
        if self.shares == "first" and set(self.pins) != {0}:
            raise UserError("sync.shares is first, so sync.pins must name rank 0's samples and no others")


@dataclass(frozen=True)
class ControlConfig:
    """What sets accumulation and delay bound while training runs.

    Args:
        name: fixed leaves them as `sync` says; ppo is the learned controller, goodput maximises throughput times
            statistical efficiency; proportional, schedule and random are baselines.
        policy: Saved policy of ppo, as `hetsync control train` writes it; null takes the one that comes along.
        interval_seconds: Length of the windows that the controller looks at, in seconds; it decides once a window.
        least_accumulation: Smallest K that it may set.
        greatest_accumulation: Largest K that it may set.
        least_delay_bound: Smallest D that it may set; 0 lets it change to synchronous training, which drains first.
        greatest_delay_bound: Largest D that it may set.
        fine_tune: Let ppo go on learning while training runs.
    """

    name: Literal["fixed", "ppo", "proportional", "goodput", "schedule", "random"] = "fixed"
    policy: str | None = None
    interval_seconds: float = 10.0
    least_accumulation: int = 1
    greatest_accumulation: int = 8
    least_delay_bound: int = 1
    greatest_delay_bound: int = 16
    fine_tune: bool = False

    def __post_init__(self) -> None:
        _at_least("control.interval_seconds", self.interval_seconds, 0, above=True)
        _at_least("control.least_accumulation", self.least_accumulation, 1)
        _at_least("control.greatest_accumulation", self.greatest_accumulation, self.least_accumulation)
        _at_least("control.least_delay_bound", self.least_delay_bound, 0)
        _at_least("control.greatest_delay_bound", self.greatest_delay_bound, self.least_delay_bound)
        if self.name != "ppo" and (self.policy is not None or self.fine_tune):
            key = "policy" if self.policy is not None else "fine_tune"
            raise UserError(f"control.{key} is {getattr(self, key)}, but control.name is {self.name}: only ppo learns")

    def check_start(self, sync: SyncConfig) -> None:
        """Raise UserError unless the controller can begin from these settings."""
        if self.name == "fixed":
            return
        self._check_key("delay_bound", sync.delay_bound)
        self._check_key("accumulation", sync.accumulation)

    def _check_key(self, key: str, value: int | None) -> None:
        least, greatest = getattr(self, f"least_{key}"), getattr(self, f"greatest_{key}")
        if value is None or not least <= value <= greatest:
            raise UserError(
                f"sync.{key} is {'null' if value is None else value}, where control.name {self.name} may set"
                f" {least} to {greatest}: begin within these, or change control.least_{key} and control.greatest_{key}"
            )


@dataclass(frozen=True)
class EmulationConfig:
    """Emulated devices; see --emulate.

    Args:
        samples_per_second: Speed of the whole emulated cluster, where its profile does not know the model;
            null chooses one that this machine imitates honestly (real compute at most 15 % of its cores,
            a slice at least 0.1 s).
    """

    samples_per_second: float | None = None

    def __post_init__(self) -> None:
        _at_least("emulation.samples_per_second", self.samples_per_second, 0, above=True)


@dataclass(frozen=True)
class Config:
    """A whole recipe.

    Args:
        run: The run.
        model: The model.
        data: The data.
        optimizer: The optimizer.
        schedule: The learning rate's schedule.
        sync: Synchronisation.
        control: What sets accumulation and delay bound while training runs.
        emulation: Emulated devices.
        emulate: Cluster profile whose devices this machine shall imitate: a path, or the name of a shipped one.
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    emulate: str | None = None

    def __post_init__(self) -> None:
        self.control.check_start(self.sync)


def import_object(key: str, path: str) -> Any:
    """The object at `package.module:name`."""
    import importlib

    if os.getcwd() not in sys.path:  # console scripts do not look into the folder that they are started in
        sys.path.append(os.getcwd())
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{key} is {path}, which cannot be imported ({error}): give package.module:name") from error
    return found


def call_with_options(
    key: str, function: Any, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """Call with a recipe's options; a wrong option is the user's mistake, said in one sentence.

    `defaults` count where the options do not say otherwise.
    """
    import inspect

    arguments = {**(defaults or {}), **options}
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(f"{key}.options is {dict(options)}: {error}; see the arguments of {function}") from error
    return function(**arguments)
