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
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from hetsync.config.parser import recipe_of
from hetsync.config.schema import Config, RunConfig, SyncConfig
from hetsync.data.handed_over import check_not_a_worker
from hetsync.errors import UserError, did_you_mean
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.plane.ending import end_loop, opening
from hetsync.stop_signal import StopSignal
from hetsync.train.job import Job
from hetsync.train.trackers import Tracked

NOTHING: Mapping[str, Any] = MappingProxyType({})


def join(*things: Any, plane: Plane | str | None = None, **arguments: Any) -> Job:
    """Collective: this rank's part in the job that torchrun or an MPI launcher started, or in a job of one rank.

    `arguments`: see `join_job`. `plane`: a name as in a recipe's `run.plane`, or a plane of your own, where another
    than the launcher's is wanted.

    Ranks start with equal shares (where nothing was measured) and are re-balanced from their measured speeds. A mistake
    ends the job with one sentence and status 2 (SystemExit on a lone rank).
    """
    own = plane is None or isinstance(plane, str)
    stop = StopSignal(of_script=True) if arguments.get("run") is not None else None
    with opening():
        check_not_a_worker()
        if plane is None or isinstance(plane, str):
            plane = opened(plane or "auto", arguments)
        elif not isinstance(plane, Plane):
            raise UserError(f"plane is a {type(plane).__name__}: give the name of one, or leave it out")
    try:
        check_arguments(things, arguments)
        job = join_job(plane, own, stop, **arguments)
        job.unclosed.watch()
        return job
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


SECTIONS = re.compile(r"\b(?:run|emulation|sync|fault)\.(\w+)")  # in front of a key
RENAMED = {"run.dir": "run", "emulation.profile": "emulate"}


def recipe_of_arguments(content: Mapping[str, Mapping[str, Any]]) -> Config:
    """As `recipe_of`; a UserError calls keys as `join` does."""
    try:
        return recipe_of(content)
    except UserError as mistake:
        raise UserError(SECTIONS.sub(lambda key: RENAMED.get(key[0], key[1]), str(mistake))) from mistake


def check_arguments(things: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """UserError for an argument of `join` that there is not."""
    if things:
        raise UserError(
            "hetsync.join takes no model and no data: give models, optimizers and DataLoaders to job.prepare"
        )
    named = [name for name, each in inspect.signature(join_job).parameters.items() if each.kind is each.KEYWORD_ONLY]
    known = {*named, *SYNC_KEYS, *RUN_KEYS}
    for name in arguments:
        if name not in known:
            raise UserError(f"hetsync.join has no argument {name}{did_you_mean(name, [*known, 'plane'])}")
