"""For a training loop of your own: some lines make it delay-synchronised.

    import hetsync

    with hetsync.join(run="runs/mine", resume="auto") as job:
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(train_set, batch_size=64, shuffle=True))
        for epoch in job.epochs(10):
            for inputs, labels in loader:
                loss = cross_entropy(model(inputs), labels)
                job.backward(loss)
                job.step(optimizer)

Start it with `torchrun --nproc-per-node N my_script.py` or `mpirun -np N python my_script.py`. Every rank gets slices
of its own; together they use each sample once an epoch.

The small form has no run folder, and takes all at once:

    with hetsync.join(model, optimizer, train_set, batch_size=64, epochs=10) as session:
        for inputs, labels in session.slices():
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            session.step(loss)
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, overload

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from hetsync.config.parser import recipe_of
from hetsync.config.schema import Config, RunConfig, SyncConfig
from hetsync.data.handed_over import check_dataset, check_not_a_worker, source_of
from hetsync.data.ledger import total_samples
from hetsync.data.loader import Source
from hetsync.data.random_state import Chance
from hetsync.emulation.cluster import load_cluster
from hetsync.emulation.device import make_device
from hetsync.errors import UserError, did_you_mean
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.plane.ending import end_loop, opening
from hetsync.plane.unclosed import Unclosed
from hetsync.profiling.measure import find_place, make_current
from hetsync.stop_signal import StopSignal
from hetsync.sync.milestones import marks_every, rests_at
from hetsync.sync.optimizers import check_needs_no_closure
from hetsync.sync.rates import Rates, ScheduleRates, SchedulerRates, check_scheduler
from hetsync.train.job import Job
from hetsync.train.memory import slice_memory
from hetsync.train.parts import Parts
from hetsync.train.session import Session
from hetsync.train.speeds import assumed_profiles
from hetsync.train.tasks import Trained
from hetsync.train.terms import Terms
from hetsync.train.trackers import Tracked

NOTHING: Mapping[str, Any] = MappingProxyType({})


class JoinedSession(Session):
    """The small form's: it ends the whole job when its block fails on one rank, and closes a plane of its own."""

    def __init__(self, *, owns_plane: bool, **session: Any) -> None:
        """`session`: the arguments of a `Session`."""
        super().__init__(**session)
        self._owns_plane = owns_plane
        self.unclosed = Unclosed(
            self.plane, is_over=lambda: not self.under_way, close=self.close, give_up=self._give_up
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def __enter__(self) -> JoinedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if failure is not None:
            self.unclosed.fail(failure)
            return
        try:
            self.close()
        except BaseException as late:
            self.unclosed.fail(late)
            raise

    def close(self) -> None:
        super().close()
        if self._owns_plane:
            self.plane.close()
        self.unclosed.closed()

    def _give_up(self, failure: BaseException) -> None:
        if self.plane.size == 1:
            self.release()


@overload
def join(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset[Any], **arguments: Any
) -> JoinedSession: ...


@overload
def join(*, run: str | Path | None = None, **arguments: Any) -> Job: ...


def join(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dataset: Dataset[Any] | None = None,
    *,
    plane: Plane | str | None = None,
    **arguments: Any,
) -> Job | JoinedSession:
    """Collective: this rank's part in the job that torchrun or an MPI launcher started, or in a job of one rank.

    Without a model: a `Job`, see `join_job`. With model, optimizer and data set: the small form, see `join_session`.
    `plane`: a name as in a recipe's `run.plane`, or a plane of your own, where another than the launcher's is wanted.

    Ranks start with equal shares (where nothing was measured) and are re-balanced from their measured speeds. A mistake
    ends the job with one sentence and status 2 (SystemExit on a lone rank).
    """
    own = plane is None or isinstance(plane, str)
    stop = StopSignal(of_script=True) if model is None and arguments.get("run") is not None else None
    with opening():
        check_not_a_worker()
        if plane is None or isinstance(plane, str):
            plane = opened(plane or "auto", arguments)
        elif not isinstance(plane, Plane):
            raise UserError(f"plane is a {type(plane).__name__}: give the name of one, or leave it out")
    try:
        form = join_job if model is None else join_session
        check_settings(form, arguments)
        joined: Job | JoinedSession
        if model is None:
            joined = join_job(plane, own, stop, **arguments)
        else:
            joined = join_session(model, optimizer, dataset, plane, own, **arguments)
        joined.unclosed.watch()
        return joined
    except UserError as mistake:
        end_loop(plane, mistake)
        raise


def opened(name: str, arguments: Mapping[str, Any]) -> Plane:
    """The plane of this name, whose blocking calls wait as long as the arguments of `join` say."""
    seconds = arguments.get("timeout_seconds", RunConfig().timeout_seconds)
    usable = isinstance(seconds, int | float) and seconds > 0  # what is not is refused with the other arguments
    fault = arguments.get("fault", NOTHING)
    told = fault.get("tolerate") if isinstance(fault, Mapping) else None
    tolerate = bool(arguments.get("tolerate", True) if told is None else told)
    return open_plane(name, float(seconds) if usable else RunConfig().timeout_seconds, tolerate)


def join_job(
    plane: Plane,
    owns_plane: bool,
    stop: StopSignal | None,
    *,
    run: str | Path | None = None,
    resume: bool | Literal["auto"] = False,
    progress: bool = True,
    track: Tracked = (),
    control: str | Mapping[str, Any] = "fixed",
    emulate: str | None = None,
    samples_per_second: float | None = None,
    tolerate: Literal["auto"] | bool = "auto",
    least_ranks: int | None = None,
    fault: Mapping[str, Any] = NOTHING,
    **settings: Any,
) -> Job:
    """A job of the launcher's ranks.

    Args:
        run: The run folder: checkpoints, telemetry, summary, best weights. None keeps nothing.
        resume: True goes on with the run there, "auto" where there is one.
        progress: Rank 0 shows ranks, progress and a summary.
        track: Trackers beside RUN/metrics.csv: any of "tensorboard", "mlflow" and "wandb", and objects of your own with
            log(values, samples, seconds) and close().
        control: A controller's name, or keys of the recipe's `control`.
        emulate: A cluster profile to imitate, with `samples_per_second` of the whole emulated cluster.
        samples_per_second: See `emulate`.
        tolerate, least_ranks: The recipe's `fault`: whether the job goes on when a rank dies, and with how many.
        fault: Other keys of the recipe's `fault`.
        settings: Keys of the recipe's `run` and `sync`, such as precision="bfloat16", checkpoint_seconds=300,
            delay_bound=0. Without a seed it is that which rank 0's script has given to torch.manual_seed last.
    """
    runs = {name: value for name, value in settings.items() if name in RUN_KEYS}
    recipe = recipe_of_arguments(
        {
            "run": {**runs, "dir": str(run) if isinstance(run, Path) else run},
            "sync": {name: value for name, value in settings.items() if name not in runs},
            "control": {"name": control} if isinstance(control, str) else dict(control),
            "emulation": {"profile": emulate, "samples_per_second": samples_per_second},
            "fault": {"tolerate": tolerate, "least_ranks": least_ranks, **fault},
        }
    )
    return Job(
        recipe,
        plane,
        keep=run is not None,
        seeded="seed" in runs,
        resume=resume,
        stop=stop,
        owns_plane=owns_plane,
        show="text" if progress else "nothing",
        track=track,
    )


def join_session(
    model: torch.nn.Module,
    optimizer: Any,
    dataset: Any,
    plane: Plane,
    owns_plane: bool,
    *,
    batch_size: int = 64,
    epochs: float = 1,
    scheduler: LRScheduler | None = None,
    max_grad_norm: float | None = None,
    evaluate_every: int | None = None,
    seed: int | None = None,
    emulate: str | None = None,
    samples_per_second: float | None = None,
    **sync: Any,
) -> JoinedSession:
    """The small form: a session of one model and one optimizer, without a run folder.

    Args:
        model: On the rank's own device; all ranks start from rank 0's weights.
        optimizer: Of the model's weights.
        dataset: A map-style data set, the same on every rank.
        batch_size: Samples of one slice of all ranks together.
        epochs: Passes over the data set.
        scheduler: A torch scheduler of the optimizer; makes one step for each `batch_size` samples of the job. The loop
            must not step it.
        max_grad_norm: Clip the gradient to this norm before each step.
        evaluate_every: Samples after which all ranks come to rest with the same weights; see `Session.slices`.
        seed: Of the sample order; None: that which rank 0's script has given to torch.manual_seed.
        emulate: A cluster profile to imitate, with `samples_per_second` of the whole emulated cluster.
        samples_per_second: See `emulate`.
        sync: Settings of `hetsync.config.schema.SyncConfig`, such as delay_bound=0.
    """
    parts = prepared_parts(model, optimizer, scheduler)
    seed = plane.broadcast_object(Chance.found().seed if seed is None else seed)
    device = next(model.parameters()).device
    make_current(device)
    recipe = recipe_of_arguments(
        {
            "run": {"epochs": epochs, "evaluate_every": evaluate_every, "seed": seed},
            "data": {"batch_size": batch_size},
            "optimizer": {"max_grad_norm": max_grad_norm},
            "emulation": {"profile": emulate, "samples_per_second": samples_per_second},
            "sync": sync,
        }
    )
    plane.settle(device)
    source = prepared_source(dataset, batch_size)
    total = total_samples(None, epochs, source.epoch_samples)
    cluster = load_cluster(emulate) if emulate is not None else None
    profiles = assumed_profiles(plane, cluster, samples_per_second, device, host="")
    terms = Terms(
        batch_size=batch_size,
        total_samples=total,
        ranks=profiles,
        milestones=rests_at(marks_every(evaluate_every, total), "evaluation", total),
        seed=seed,
    )
    rates: Rates = ScheduleRates(optimizer)
    if scheduler is not None:
        rates = SchedulerRates(optimizer, [scheduler], batch_size, every=1)
    return JoinedSession(
        owns_plane=owns_plane,
        plane=plane,
        trained=Trained(model=parts.model, optimizers=parts.optimizers, rates=[rates]),
        source=source,
        sync=recipe.sync,
        terms=terms,
        device=make_device(cluster, plane.rank, profiles[plane.rank].time, seed, device),
        max_grad_norm=max_grad_norm,
        memory=slice_memory(plane, find_place(plane), device) if cluster is None else None,
    )


RUN_KEYS = {field.name for field in dataclasses.fields(RunConfig)} - {
    "name",
    "dir",
    "samples",
    "epochs",
    "evaluate_every",
    "compile",
    "keep_best",
    "early_stop",
    "track",
}
SYNC_KEYS = {field.name for field in dataclasses.fields(SyncConfig)}


SECTIONS = re.compile(r"\b(?:run|data|optimizer|emulation|sync|fault)\.(\w+)")  # in front of a key
RENAMED = {"run.dir": "run", "emulation.profile": "emulate"}


def recipe_of_arguments(content: Mapping[str, Mapping[str, Any]]) -> Config:
    """As `recipe_of`; a UserError calls keys as `join` does."""
    try:
        return recipe_of(content)
    except UserError as mistake:
        raise UserError(SECTIONS.sub(lambda key: RENAMED.get(key[0], key[1]), str(mistake))) from mistake


def check_settings(form: Any, arguments: Mapping[str, Any]) -> None:
    """UserError for an argument of `join` that there is not."""
    named = [name for name, each in inspect.signature(form).parameters.items() if each.kind is each.KEYWORD_ONLY]
    known = {*named, *SYNC_KEYS, *(RUN_KEYS if form is join_job else ())}
    for name in arguments:
        if name not in known:
            raise UserError(f"hetsync.join has no argument {name}{did_you_mean(name, [*known, 'plane'])}")


def prepared_parts(model: Any, optimizer: Any, scheduler: Any) -> Parts:
    """UserError unless these can be trained with."""
    for name, value, kind, wanted in (
        ("model", model, torch.nn.Module, "a torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer"),
    ):
        if not isinstance(value, kind):
            raise UserError(f"{name} is a {type(value).__name__}: give {wanted}")
    check_needs_no_closure(optimizer, f"optimizer is a {type(optimizer).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError("scheduler is a ReduceLROnPlateau, which wants a metric: give one that goes by steps")
    if scheduler is not None:
        check_scheduler(scheduler, [optimizer])
    parts = Parts()
    parts.models.append(model)
    parts.optimizers.append(optimizer)
    parts.check(next(model.parameters(), torch.empty(0)).device)
    return parts


def prepared_source(dataset: Any, batch_size: Any) -> Source:
    """UserError unless the samples can be addressed, and are no fewer than a batch."""
    if isinstance(dataset, DataLoader):
        raise UserError(
            "dataset is a DataLoader: give its data set (loader.dataset) and batch_size; the order is HetSync's"
        )
    check_dataset(dataset)
    return source_of(dataset, batch_size, None, None, None)[0]
