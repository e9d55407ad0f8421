"""A recipe: every setting with its unit, its default and its limits. Parsing and merging are jsonargparse's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetsync.config.checks import at_least
from hetsync.config.faults import FaultConfig
from hetsync.config.schedule import ScheduleConfig
from hetsync.errors import UserError, brief, did_you_mean

RULED_DELAY_BOUND = 4  # where waits call for delay
FIRST_QUORUM = 0.25  # where it follows what rounds cost
MOST_FRAGMENTS = 64
SMALL_VALUES = 10_000  # below which a model's wire is never by rule: blocks, filled up for each rank, may be larger
LARGE_VALUES = 1_000_000  # from which on a model has fragments by rule: a smaller one's rounds cost calls, not bytes
FIRST_FRAGMENTS, MOST_RULED_FRAGMENTS = 2, 4
WireFormat = Literal["float32", "bfloat16", "int8", "int4", "int2", "top64"]
TRACKERS = ("tensorboard", "mlflow", "wandb")


def most_grace(delay_bound: int) -> int:
    """That D has room for, where a rank's tasks last alike. With g + 1 tasks in a round under way a rank must be able
    to finish g + 1 more for the next; it starts the last of these while 2 g + 1 are not applied, which D must allow."""
    return max(0, (delay_bound - 1) // 2)


@dataclass(frozen=True)
class KeepBestConfig:
    """The best weights so far, in RUN/best.

    Args:
        metric: Metric of the evaluations by which weights are the best; null keeps none. Where one is named, all ranks
            come to rest for each evaluation, with the same weights.
        mode: Is the greatest value the best, or the least?
    """

    metric: str | None = None
    mode: Literal["max", "min"] = "max"


@dataclass(frozen=True)
class EarlyStopConfig:
    """Training that ends when it gains nothing any more.

    Args:
        metric: Metric of the evaluations that must go on getting better; null trains to the end. Where one is named,
            all ranks come to rest for each evaluation, with the same weights.
        mode: Is a greater value better, or a lesser one?
        patience: Evaluations in a row without a better value after which training ends.
    """

    metric: str | None = None
    mode: Literal["max", "min"] = "max"
    patience: int = 5

    def __post_init__(self) -> None:
        at_least("run.early_stop.patience", self.patience, 1)


@dataclass(frozen=True)
class RunConfig:
    """The run: where it writes, how long it trains.

    Args:
        name: Name of the run, part of its folder's name.
        dir: The run folder itself; null makes runs/NAME-DATE-TIME.
        seed: Seed of weights, sample order, dropout and emulated jitter.
        samples: Samples to train on, over all ranks; null trains for `epochs`.
        epochs: Passes over the training data, where `samples` is null.
        evaluate_every: Samples between evaluations, on the validation part of the data or, where they have none, on
            their test part; null evaluates at the end only.
        checkpoint_every: Samples between checkpoints, each at the first end of a batch at or after its mark; null
            saves by `checkpoint_seconds` and at the end only.
        checkpoint_seconds: Longest training without a checkpoint, in seconds; null saves by `checkpoint_every` only.
        keep_checkpoints: Newest checkpoints to keep.
        plane: What carries sums and messages: mpi; torch (sums by NCCL for CUDA devices, else by Gloo); horovod (sums
            by Horovod, messages by MPI); local (one rank); or auto (torch under torchrun, and under MPI launchers mpi,
            but NCCL for sums of ranks that have a CUDA device of their own).
        device: Device of each rank: auto (a CUDA device where there is one), cpu, cuda, cuda:INDEX, or mps (an Apple
            GPU).
        precision: Number format of forward and backward passes: float32, or autocast to bfloat16 or float16 (with
            scaled gradients). Weights stay what they are.
        compile: Compile the model by torch.compile, which takes a compiler for the device.
        track: Trackers that get the run's figures beside RUN/metrics.csv: any of tensorboard, mlflow and wandb, each
            with files of its own in the run folder.
        keep_best: The best weights so far.
        early_stop: Training that ends when it gains nothing any more.
        timeout_seconds: Longest wait for other ranks, or for a batch to be loaded, before the job ends and says for
            whom or what it waited, in seconds. While rank 0 saves, the others wait half as long again.
        profile_seconds: Longest time to measure each rank's speed at the start, in seconds, where steps scatter.
    """

    name: str = "digits"
    dir: str | None = None
    seed: int = 0
    samples: int | None = None
    epochs: float = 10.0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = 900.0
    keep_checkpoints: int = 3
    plane: Literal["auto", "mpi", "torch", "horovod", "local"] = "auto"
    device: str = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    track: list[str] = field(default_factory=list)
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    timeout_seconds: float = 600.0
    profile_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 100 or "/" in self.name:
            raise UserError(f"run.name is {brief(self.name)}: give 1 to 100 characters without a slash")
        at_least("run.seed", self.seed, 0)
        at_least("run.samples", self.samples, 1)
        at_least("run.epochs", self.epochs, 0, above=True)
        at_least("run.evaluate_every", self.evaluate_every, 1)
        at_least("run.checkpoint_every", self.checkpoint_every, 1)
        at_least("run.checkpoint_seconds", self.checkpoint_seconds, 0, above=True)
        at_least("run.keep_checkpoints", self.keep_checkpoints, 1)
        at_least("run.timeout_seconds", self.timeout_seconds, 0, above=True)
        at_least("run.profile_seconds", self.profile_seconds, 0, above=True)
        for name in self.track:
            check_tracker("run.track", name)
        if self.early_stop.metric is not None and self.evaluate_every is None:
            raise UserError(
                f"run.early_stop.metric is {brief(self.early_stop.metric)}, but run.evaluate_every is null, so there is"
                " one evaluation, at the end: give the samples between evaluations"
            )


def check_tracker(key: str, name: str) -> None:
    """UserError unless it is the name of one."""
    if name not in TRACKERS:
        raise UserError(
            f"{key} has {brief(name)}{did_you_mean(name, TRACKERS)}: use {', '.join(TRACKERS)}; RUN/metrics.csv is"
            " always written"
        )


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
            Random augmentation repeats in a resumed run only where processes load.
        options: Keyword arguments for the data set.
    """

    name: str = "digits"
    batch_size: int = 64
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("data.batch_size", self.batch_size, 1)
        at_least("data.workers", self.workers, 0, most=1000)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of each rank (the inner one in delayed mode).

    Args:
        name: sgd, adam or adamw of torch.optim, or the import path of your own.
        learning_rate: Learning rate before the schedule.
        momentum: Momentum of sgd.
        weight_decay: As torch.optim means it: times the weight, added to its gradient (adamw: taken off the weight).
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
        at_least("optimizer.learning_rate", self.learning_rate, 0, above=True)
        at_least("optimizer.momentum", self.momentum, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.max_grad_norm", self.max_grad_norm, 0, above=True)


@dataclass(frozen=True)
class EmaConfig:
    """A running average of the weights.

    Args:
        decay: Part of the average that stays at each optimizer step (such as 0.999); null keeps no average. Evaluations
            and the best weights are then of the average, and all ranks come to rest for each evaluation. Batch-norm
            statistics are averaged with the weights; integer buffers and infinities (masks) are copied.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        at_least("ema.decay", self.decay, 0)
        if self.decay is not None and self.decay >= 1:
            raise UserError(f"ema.decay is {self.decay}: it must be below 1")


@dataclass(frozen=True)
class OuterConfig:
    """What a round's sum does to the anchor (delayed mode).

    Args:
        name: identity adds it; nesterov is DiLoCo's outer optimizer.
        learning_rate: Learning rate of nesterov.
        momentum: Momentum of nesterov over a full contribution set (K slices of all ranks), below 1.
    """

    name: Literal["identity", "nesterov"] = "identity"
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        at_least("sync.outer.learning_rate", self.learning_rate, 0, above=True)
        at_least("sync.outer.momentum", self.momentum, 0)
        if self.momentum >= 1:
            raise UserError(f"sync.outer.momentum is {self.momentum}: it must be below 1")


@dataclass(frozen=True)
class SyncConfig:
    """Synchronisation.

    Args:
        delay_bound: Greatest staleness in rounds (D). 0 is synchronous training; null has no bound (asynchronous). auto
            begins at 0, and is 4 where ranks would wait for each other or for rounds for more than delay costs, which
            it looks at again from time to time; between hosts it is 4 from the start where a sum is seen to take two
            slices and more. Where delay has lost training all go back to what they had before it,
            and on at 0. It is 4 with a controller, by a plan that cuts the model, with an outer optimizer, and where
            `accumulation` is a number above 1.
        quorum: Part of a full contribution set, in samples, that may start a round when D > 0;
            1 waits for a contribution of every rank (stale synchronous parallel with bound D). auto is 0.25, and 0.5
            where the work of rounds is a notable part of a slice and grace is 0 or auto, but not with a controller, or
            by a plan that cuts the model.
        accumulation: Slices in one contribution (K): at delay bound 1 and above K optimizer steps, at 0 gradient
            accumulation. auto is 1, and at delay bound 1 and above up to 4 where rounds are a notable part of a slice,
            but not with a controller, or by a plan that cuts the model.
        grace: How many tasks after its first a rank may finish before a round that has its quorum stops waiting for
            ranks that have finished none. 0 does not wait. With 1 most rounds are of all ranks, and a slow rank delays
            one by a task of a faster rank at most. At most (D - 1) / 2, which costs no waits where tasks last alike.
            auto is 0, and 1 where D is 3 or more (or null), q at most 0.5, and the work of rounds a notable part of a
            slice, also after q has become 0.5; but not with a controller, or by a plan that cuts the model.
        shares: Samples of a rank in a slice: speed (by measured speed), equal, or first (rank 0 as pinned,
            the rest even).
        least_slice: The fewest samples of a slice: some layers do not take one, and local steps on few train worse. A
            slice is smaller only where the batch, the data or a rank's memory leave no more. A slow rank's slices then
            come more rarely; where the others would wait for one, it gets none.
        pins: Shares set by hand, rank: samples.
        rebalance: Let shares follow the measured speeds while training, where that gains over 5 %.
        wire: Number format of what travels, with error feedback: bfloat16 is half of float32's bytes, int8 a quarter,
            int4 an eighth, int2 a sixteenth, top64 (of each 4,096 values the 64 largest) a 124th. The last three are
            for progress; gradients, at delay bound 0, go as int8 then. Rests travel as float32. auto is float32, and,
            at delay bound 1 and above, int8 where ranks wait for rounds, and top64 where they do so for longer than
            they compute; where the link keeps all waiting twice as long as they compute, or is seen to before the
            first round, it comes as soon as delay does. With a controller, by a plan that cuts the model, and for
            models of a few values it stays float32.
        fragments: Of the weights (1 to 64; 1 with an outer optimizer, or by a plan that cuts the model): in delayed
            mode each round sums one, in turn, and a rest all. Fewer bytes a round, and each weight is merged more
            seldom: staleness is that of contributions, whose other fragments follow in the rounds after. auto is 2 from
            a million trained values on, where q is below 1, grace 0 or auto, and K 1 or auto, and then 4 where ranks
            wait for rounds (with a controller it stays 2); else 1.
        bucket_bytes: Size of a gradient bucket in bytes (synchronous mode).
        overlap: Let gradient sums travel while backward still runs (synchronous mode); not where a slice has several
            backward calls now and then.
        outer: What a round's sum does to the anchor (delayed mode).
    """

    delay_bound: int | Literal["auto"] | None = "auto"
    quorum: float | Literal["auto"] = "auto"
    accumulation: int | Literal["auto"] = 1
    grace: int | Literal["auto"] = "auto"
    shares: Literal["speed", "equal", "first"] = "speed"
    least_slice: int = 2
    pins: dict[int, int] = field(default_factory=dict)
    rebalance: bool = True
    wire: Literal["auto", WireFormat] = "auto"
    fragments: int | Literal["auto"] = "auto"
    bucket_bytes: int = 4194304
    overlap: bool = True
    outer: OuterConfig = field(default_factory=OuterConfig)

    def __post_init__(self) -> None:
        if self.delay_bound == "auto" and self._delayed_only:
            object.__setattr__(self, "delay_bound", RULED_DELAY_BOUND)
        if self.delay_bound != "auto":
            at_least("sync.delay_bound", self.delay_bound, 0)
        if self.accumulation != "auto":
            at_least("sync.accumulation", self.accumulation, 1)
        if self.grace != "auto":
            self._check_grace(self.grace)
        at_least("sync.bucket_bytes", self.bucket_bytes, 4)
        if self.fragments != "auto":
            if not 1 <= self.fragments <= MOST_FRAGMENTS:
                raise UserError(f"sync.fragments is {self.fragments}: give 1 to {MOST_FRAGMENTS}, or auto")
            if self.fragments > 1 and self.outer.name != "identity":
                raise UserError(
                    f"sync.fragments is {self.fragments}, which the outer optimizer {self.outer.name} does not know:"
                    " give 1 or auto, or sync.outer.name identity"
                )
        if self.quorum != "auto" and not 0 < self.quorum <= 1:
            raise UserError(f"sync.quorum is {self.quorum}: it is a fraction of the samples, above 0 and at most 1")
        if any(rank < 0 or share < 0 for rank, share in self.pins.items()):
            raise UserError(f"sync.pins is {brief(self.pins)}: it maps ranks to samples, both 0 or more")
        at_least("sync.least_slice", self.least_slice, 1)
        if thin := {rank: share for rank, share in self.pins.items() if 0 < share < self.least_slice}:
            raise UserError(
                f"sync.pins is {brief(thin)}, below sync.least_slice {self.least_slice}: raise the pin, make it 0, or"
                " lower sync.least_slice"
            )
        if self.shares == "first" and set(self.pins) != {0}:
            raise UserError("sync.shares is first, so sync.pins must name rank 0's samples and no others")

    def _check_grace(self, grace: int) -> None:
        at_least("sync.grace", grace, 0)
        bound = self.most_delay_bound
        most = None if bound is None else most_grace(bound)
        if most is not None and grace > most:
            raise UserError(
                f"sync.grace is {grace}, but sync.delay_bound {bound} has room for {most} at most:"
                f" give {f'0 to {most}' if most else 0}, auto, or a greater sync.delay_bound"
            )
        if grace and self.quorum == 1:
            raise UserError(
                f"sync.grace is {grace}, but with sync.quorum 1 rounds wait for all anyway: leave one of them out"
            )

    @property
    def _delayed_only(self) -> bool:
        """Does something ask for what synchronous training does not know, or takes for another thing?"""
        return self.first_accumulation > 1 or self.outer.name != "identity"

    @property
    def first_delay_bound(self) -> int | None:
        """D at the start."""
        return 0 if self.delay_bound == "auto" else self.delay_bound

    @property
    def most_delay_bound(self) -> int | None:
        """That it may come to."""
        return RULED_DELAY_BOUND if self.delay_bound == "auto" else self.delay_bound

    @property
    def settled(self) -> SyncConfig:
        """By a plan that cuts the model: nothing follows what rounds cost."""
        return replace(self, delay_bound=self.most_delay_bound, fragments=1, wire=self.first_wire)

    @property
    def first_accumulation(self) -> int:
        """K at the start."""
        return 1 if self.accumulation == "auto" else self.accumulation

    @property
    def first_wire(self) -> WireFormat:
        """At the start."""
        return "float32" if self.wire == "auto" else self.wire

    @property
    def first_quorum(self) -> float:
        """q at the start."""
        return FIRST_QUORUM if self.quorum == "auto" else self.quorum

    @property
    def first_grace(self) -> int:
        """At the start."""
        return 0 if self.grace == "auto" else self.grace

    def for_model(self, values: int) -> SyncConfig:
        """The same for a model of so many trained values: `fragments` is auto for large ones only, and `wire` for all
        but small ones."""
        # As was asked for.
        merges_seldom = self.quorum == 1 or self.accumulation not in (1, "auto") or self.grace not in (0, "auto")
        whole = values < LARGE_VALUES or self.outer.name != "identity" or merges_seldom
        fragments = 1 if whole and self.fragments == "auto" else self.fragments
        return replace(self, fragments=fragments, wire=self.first_wire if values < SMALL_VALUES else self.wire)

    @property
    def first_fragments(self) -> int:
        """At the start."""
        return FIRST_FRAGMENTS if self.fragments == "auto" else self.fragments

    @property
    def most_fragments(self) -> int:
        """That it may come to: the weights are cut into so many."""
        return MOST_RULED_FRAGMENTS if self.fragments == "auto" else self.fragments


@dataclass(frozen=True)
class ControlConfig:
    """What sets accumulation and delay bound while training runs.

    Args:
        name: fixed leaves them as `sync` says; ppo is the learned controller, goodput maximises throughput times
            statistical efficiency; proportional, schedule and random are baselines.
        policy: Saved policy of ppo, as `hetsync control train` writes it; null takes the one that comes along.
        interval_seconds: Length of the windows that the controller looks at, in seconds; it decides once a window.
        min_accumulation: Smallest K that it may set.
        max_accumulation: Largest K that it may set.
        min_delay_bound: Smallest D that it may set; 0 lets it change to synchronous training, which drains first.
        max_delay_bound: Largest D that it may set.
        fine_tune: Let ppo go on learning while training runs.
    """

    name: Literal["fixed", "ppo", "proportional", "goodput", "schedule", "random"] = "fixed"
    policy: str | None = None
    interval_seconds: float = 10.0
    min_accumulation: int = 1
    max_accumulation: int = 8
    min_delay_bound: int = 1
    max_delay_bound: int = 16
    fine_tune: bool = False

    def __post_init__(self) -> None:
        at_least("control.interval_seconds", self.interval_seconds, 0, above=True)
        at_least("control.min_accumulation", self.min_accumulation, 1)
        at_least("control.max_accumulation", self.max_accumulation, self.min_accumulation)
        at_least("control.min_delay_bound", self.min_delay_bound, 0)
        at_least("control.max_delay_bound", self.max_delay_bound, self.min_delay_bound)
        if self.name != "ppo" and (self.policy is not None or self.fine_tune):
            key = "policy" if self.policy is not None else "fine_tune"
            raise UserError(f"control.{key} is {getattr(self, key)}, but control.name is {self.name}: only ppo learns")

    def check_start(self, sync: SyncConfig) -> None:
        """Raise UserError unless the controller can begin from these settings."""
        if self.name == "fixed":
            return
        self._check_key("delay_bound", sync.delay_bound)
        self._check_key("accumulation", sync.first_accumulation)

    def _check_key(self, key: str, value: int | str | None) -> None:
        least, greatest = getattr(self, f"min_{key}"), getattr(self, f"max_{key}")
        if not isinstance(value, int) or not least <= value <= greatest:
            raise UserError(
                f"sync.{key} is {'null' if value is None else value}, where control.name {self.name} may set"
                f" {least} to {greatest}: begin within these, or change control.min_{key} and control.max_{key}"
            )


@dataclass(frozen=True)
class EmulationConfig:
    """Emulated devices.

    Args:
        profile: Cluster profile whose devices this machine shall imitate: a path, or the name of a shipped one. Short
            form: --emulate.
        samples_per_second: Speed of the whole emulated cluster, where its profile does not know the model;
            null chooses one that this machine imitates honestly (real compute at most 15 % of its cores,
            a slice at least 0.1 s).
    """

    profile: str | None = None
    samples_per_second: float | None = None

    def __post_init__(self) -> None:
        at_least("emulation.samples_per_second", self.samples_per_second, 1e-6)
        if self.profile is None and self.samples_per_second is not None:
            raise UserError(
                f"emulation.samples_per_second is {self.samples_per_second}, but no cluster is emulated: name its"
                " profile by --emulate, or leave it out"
            )


@dataclass(frozen=True)
class PlanConfig:
    """A plan: which ranks hold which part of the model.

    Args:
        file: Plan file, as `hetsync plan` writes it, that `hetsync-train` shall run; null gives every rank the whole
            model. Short form: --plan.
    """

    file: str | None = None

    def check_unused(self, command: str) -> None:
        """UserError where a plan is named, for a command that runs none."""
        if self.file is not None:
            raise UserError(f"plan.file is {brief(self.file)}, but {command} runs no plan: leave plan.file out")


@dataclass(frozen=True)
class Config:
    """A whole recipe.

    Args:
        run: The run.
        model: The model.
        data: The data.
        optimizer: The optimizer.
        schedule: The learning rate's schedule.
        ema: A running average of the weights.
        sync: Synchronisation.
        control: What sets accumulation and delay bound while training runs.
        emulation: Emulated devices.
        plan: Which ranks hold which part of the model.
        fault: What becomes of the job when something fails.
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)

    @property
    def step_samples(self) -> int:
        """Of a batch, or of the several that make one step in synchronous mode."""
        return self.data.batch_size * (self.sync.first_accumulation if self.sync.delay_bound == 0 else 1)

    @property
    def rests_to_evaluate(self) -> bool:
        """Do all ranks come to rest for each evaluation?"""
        deciding = (self.run.keep_best.metric, self.run.early_stop.metric)
        return self.ema.decay is not None or any(metric is not None for metric in deciding)

    def __post_init__(self) -> None:
        if self.control.name != "fixed" and self.sync.delay_bound == "auto":  # it sets D itself
            object.__setattr__(self, "sync", replace(self.sync, delay_bound=self.sync.most_delay_bound))
        self.control.check_start(self.sync)
        if self.fault.not_finite != "stop" and self.control.name != "fixed":
            raise UserError(
                f"fault.not_finite is {self.fault.not_finite}, but control.name is {self.control.name}, which would"
                " take what is left out for progress: use stop, or control.name fixed"
            )
        never_saves = self.run.checkpoint_every is None and self.run.checkpoint_seconds is None
        if self.fault.goes_back and never_saves:
            raise UserError(
                "fault.not_finite is rollback, but run.checkpoint_every and run.checkpoint_seconds are null, so that"
                " there is no checkpoint to go back to: give one of them, or use skip"
            )
        if self.fault.replace and self.control.name != "fixed":
            raise UserError(
                f"fault.replace is true, but control.name is {self.control.name}, which knows of no ranks that join:"
                " use fault.replace false, or control.name fixed"
            )
