"""`hetsync train`, and `hetsync-train`: one training job, under an MPI launcher, torchrun, or alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetsync.cli.shared import Verbs, add_recipe_command, on_all_ranks
from hetsync.config.parser import look_ahead, make_parser, parse_recipe
from hetsync.config.schema import Config
from hetsync.config.yaml_files import read_yaml
from hetsync.errors import UserError, complain, early_mistakes
from hetsync.files import PLAN, RECIPE
from hetsync.plane.ending import RESUMED
from hetsync.start import loading
from hetsync.stop_signal import StopSignal

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plan.assignment import GivenPlan
    from hetsync.plane.base import Plane
    from hetsync.train.display import Shows


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "train", "train a model: the same as hetsync-train", main)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `hetsync-train`."""
    stop = StopSignal()
    with early_mistakes():
        config, resume, shows = parse(sys.argv[1:] if argv is None else argv)
    status = on_all_ranks(config, lambda plane: train(plane, config, resume, stop, shows), RESUMED)
    stop.over()
    sys.exit(status)


def parse(argv: Sequence[str]) -> tuple[Config, Path | None, Shows]:
    """What is asked for: the effective recipe, the run folder to resume, and how progress is told. UserError for a
    mistake."""
    parser = make_parser(
        "hetsync-train", "Train a PyTorch model on ranks of unequal speed: mpirun -np N hetsync-train ..."
    )
    parser.add_argument("--resume", metavar="RUN", help="Go on from the newest checkpoint in this run folder.")
    parser.add_argument("--quiet", action="store_true", help="Show neither progress nor summary.")
    parser.add_argument("--json", action="store_true", help="Tell progress and summary as JSON, an object a line.")
    asked = look_ahead(parser, argv)
    if asked.quiet and asked.json:
        raise UserError("--quiet and --json exclude each other: give one of them")
    shows: Shows = "nothing" if asked.quiet else "json" if asked.json else "text"
    resume = asked.resume
    if resume is None:
        return parse_recipe(parser, argv)[0], None, shows
    kept = Path(resume) / RECIPE
    if not kept.is_file():
        raise UserError(f"--resume {resume}: there is no {RECIPE} in it; give the folder of a run")
    return parse_recipe(parser, [*_kept_plan(Path(resume), kept), *argv], kept)[0], Path(resume), shows


def _kept_plan(folder: Path, recipe: Path) -> list[str]:
    """As if it was given first: the run's own copy of the plan that its recipe names."""
    content = read_yaml(recipe, f"the recipe {recipe}")
    section = content.get("plan") if isinstance(content, dict) else None
    named = isinstance(section, dict) and section.get("file") is not None
    return ["--plan", str(folder / PLAN)] if named and (folder / PLAN).is_file() else []


def train(plane: Plane, config: Config, resume: Path | None, stop: StopSignal, shows: Shows) -> int:
    """Collective: one training job, from its recipe to its summary; returns the exit status."""
    with loading():
        from hetsync.train.resumption import FinishedError

    try:
        if config.plan.file is None:
            return train_whole(plane, config, None, resume, stop, shows)
        return train_by_plan(plane, config, Path(config.plan.file), resume, stop, shows)
    except FinishedError as finished:
        if plane.rank == 0:
            complain(str(finished))
        return 0


def train_by_plan(plane: Plane, config: Config, path: Path, resume: Path | None, stop: StopSignal, shows: Shows) -> int:
    from hetsync.plan.assignment import given_plan
    from hetsync.train.planned import train_planned

    plan = given_plan(path, plane)
    if plan.file.data_parallel:
        return train_whole(plane, config, plan, resume, stop, shows)
    return train_planned(plane, config, plan, resume, stop, shows)


def train_whole(
    plane: Plane, config: Config, plan: GivenPlan | None, resume: Path | None, stop: StopSignal, shows: Shows
) -> int:
    """Collective: each rank has the whole model. `plan`: a data-parallel one."""
    with loading():
        from hetsync.train.job import Job
        from hetsync.train.loop import StoppedByRequest
        from hetsync.train.run_folder import recorded
        from hetsync.train.trainer import Trainer

    given = config
    if plan is not None:
        from hetsync.train.data_parallel import by_plan

        given = by_plan(config)
    try:
        again = "hetsync-train --resume {}"
        with Job(given, plane, resume=resume or False, stop=stop, show=shows, resume_by=again) as job:
            # Refuses what cannot work; writes nothing but a controller's log.
            trainer = Trainer(config, job, plan)
            assert job.folder is not None
            # A resumed run meets no fault of before once more.
            kept = replace(config, fault=replace(config.fault, inject=[]))
            text = None if plan is None else plan.text
            writes = recorded(job.folder, kept, text, trainer.data.model_options, lambda: job.saved)
            with writes if job.is_main else contextlib.nullcontext():
                trainer.train()
    except StoppedByRequest as stopped:
        return stopped.status
    return 0
