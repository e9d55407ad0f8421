"""Command lines: parse, load, run. Whatever goes wrong ends the whole job, with one sentence for a user's mistake."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jsonargparse
import yaml
from jsonargparse.typing import PositiveInt

from hetsync import __version__
from hetsync.config import Config, RunConfig
from hetsync.errors import UserError, complain
from hetsync.mistakes import check_recipe, explain
from hetsync.plane import launched_by_mpi

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane
from hetsync.stop import StopSignal

INTERNAL_ERROR = 1
USER_ERROR = 2
INTERRUPTED = 130
CONFIG_FILE = "recipe.yaml"


class Parser(jsonargparse.ArgumentParser):
    """Complains on rank 0 only: every rank parses the same words."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        end_early(explain(message))

    def print_help(self, *args: Any, **kwargs: Any) -> None:
        if first_rank():
            super().print_help(*args, **kwargs)

    def dump(self, namespace: jsonargparse.Namespace, *args: Any, **kwargs: Any) -> str:
        """For --print_config: the recipe, without what else a command line takes."""
        others = [name for name in namespace.as_dict() if name not in Config.__dataclass_fields__]
        recipe = namespace.clone()
        for name in others:
            recipe.pop(name)
        return super().dump(recipe, *args, **kwargs) if first_rank() else ""


def first_rank() -> bool:
    """Is this rank 0, judged by what MPI launchers tell (before MPI is there)?"""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    told = next((os.environ[name] for name in names if name in os.environ), "0")
    return not launched_by_mpi() or told == "0"


def end_early(sentence: str) -> NoReturn:
    """End for a mistake that every rank sees, before ranks can speak to each other."""
    if first_rank():
        complain(_one_sentence(sentence))
    else:
        time.sleep(1.0)  # mpirun ends the job with the first rank that leaves, which must be the one that speaks
    sys.exit(USER_ERROR)


def _one_sentence(message: str) -> str:
    return " ".join(message.split())


def make_parser(program: str, description: str) -> Parser:
    parser = Parser(prog=program, description=description, version=__version__)
    parser.usage = f"{program} [RECIPE.yaml] [--section.key VALUE ...]"
    parser.add_argument("recipe", nargs="?", help="Recipe to start from; the keys below override it.")
    parser.add_argument("--config", action="config", help=jsonargparse.SUPPRESS)
    parser.add_class_arguments(Config, as_group=True)
    return parser


def look_ahead(parser: Parser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """What the words say without their recipe; --print_config would print that."""
    return parser.parse_args([word for word in argv if not word.startswith("--print_config")])


def parse_recipe(
    parser: Parser, argv: Sequence[str], kept: Path | None = None
) -> tuple[Config, jsonargparse.Namespace]:
    """The effective recipe, and whatever else the parser takes. Raises UserError; exits for --help and the like.

    The keys on the command line override the recipe named there, which overrides the one `kept` in a run's folder.
    """
    words = list(argv)
    recipes = [kept] if kept is not None else []
    if (named := look_ahead(parser, argv).recipe) is not None:
        words.remove(named)
        recipes.append(Path(named))
    for recipe in recipes:
        if not recipe.is_file():
            raise UserError(f"recipe {recipe} does not exist: give a path to a YAML file")
        check_recipe(recipe)
    parsed = parser.parse_args([*(f"--config={recipe}" for recipe in recipes), *words])
    made = parser.instantiate(parsed)
    return Config(**{name: made[name] for name in Config.__dataclass_fields__}), parsed


def parse(argv: Sequence[str]) -> tuple[Config, Path | None]:
    """What `hetsync-train` is asked for: the effective recipe, and the run folder to resume."""
    parser = make_parser(
        "hetsync-train", "Train a PyTorch model on ranks of unequal speed: mpirun -np N hetsync-train ..."
    )
    parser.add_argument("--resume", metavar="RUN", help="Go on from the newest checkpoint in this run folder.")
    resume = look_ahead(parser, argv).resume
    if resume is None:
        return parse_recipe(parser, argv)[0], None
    kept = Path(resume) / CONFIG_FILE
    if not kept.is_file():
        raise UserError(f"--resume {resume}: there is no {CONFIG_FILE} in it; give the folder of a run")
    return parse_recipe(parser, argv, kept)[0], Path(resume)


def train_main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `hetsync-train`."""
    stop = StopSignal()
    with _early_mistakes():
        config, resume = parse(sys.argv[1:] if argv is None else argv)
    sys.exit(on_all_ranks(config.run, lambda plane: train(plane, config, resume, stop)))


def train(plane: Plane, config: Config, resume: Path | None, stop: StopSignal) -> int:
    """Collective: one training job, from its recipe to its summary; returns the exit status."""
    from hetsync import checkpoint
    from hetsync.disk import write_atomically
    from hetsync.runs import run_folder
    from hetsync.trainer import Trainer

    folder = run_folder(plane, config.run, resume)
    loaded = checkpoint.load_newest(folder) if resume is not None else None
    if plane.rank == 0:
        write_atomically(folder / CONFIG_FILE, yaml.safe_dump(asdict(config), sort_keys=False))
    return Trainer(config, plane, folder, loaded).train(stop)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `hetsync VERB`."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbs = {"profile": profile_main, "data": data_main, "simulate": simulate_main, "control": control_main}
    if words and words[0] in verbs:
        verbs[words[0]](words[1:])
    asked = bool(words) and words[0] in ("-h", "--help")
    usage = (
        "usage: hetsync VERB ...; verbs: profile (measure the ranks of this job and write a cluster profile),"
        " data (check or download data sets), simulate (a job on a virtual cluster), control (train a policy that tunes"
        " jobs); to train a model, see hetsync-train --help"
    )
    if not asked:
        end_early(usage)
    if first_rank():
        complain(usage)
    sys.exit(0)


def profile_main(argv: Sequence[str]) -> NoReturn:
    """`hetsync profile`, under mpirun like the training job that it prepares."""
    with _early_mistakes():
        parser = make_parser("hetsync profile", "Measure every rank and the interconnect, and write a cluster profile.")
        parser.add_argument("--output", metavar="FILE", default="cluster.yaml", help="Where to write the profile.")
        config, parsed = parse_recipe(parser, argv)
    sys.exit(on_all_ranks(config.run, lambda plane: profile(plane, config, Path(parsed.output))))


def profile(plane: Plane, config: Config, output: Path) -> int:
    """Collective: measure, write, say where."""
    from hetsync.profiling.cluster import save_cluster
    from hetsync.profiling.report import profile_cluster

    cluster = profile_cluster(plane, config)
    if plane.rank == 0:
        save_cluster(cluster, output)
        print(f"wrote {output}: try it with hetsync-train --emulate {output}")
    return 0


def data_main(argv: Sequence[str]) -> NoReturn:
    """`hetsync data check` and `hetsync data download`, on one process."""
    parser = _VerbParser(prog="hetsync data", description="Check or download data sets.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser("check", help="say what is there and what is wrong with it, record by record")
    check.add_argument("dataset", metavar="DATASET", help="name of the data set, as in data.name of recipes")
    check.add_argument("path", metavar="PATH", type=Path, help="the folder or file to look at")
    check.add_argument("--all", action="store_true", help="print every problem instead of the first ones")
    download = verbs.add_parser("download", help="fetch a data set, as far as its licence allows")
    download.add_argument("dataset", metavar="DATASET", help="name of the data set, as in data.name of recipes")
    download.add_argument("--to", metavar="DIR", type=Path, help="new folder for it (default: data/DATASET)")
    words = parser.parse_args(argv)
    with _early_mistakes():
        from hetsync.data import commands

        try:
            if words.verb == "check":
                sys.exit(commands.check(words.dataset, words.path, words.all))
            sys.exit(commands.download(words.dataset, words.to or Path("data") / words.dataset))
        except KeyboardInterrupt:
            complain("interrupted")
            sys.exit(INTERRUPTED)


class _VerbParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        end_early(f"{message}; see {self.prog} --help")


def simulate_main(argv: Sequence[str]) -> NoReturn:
    """`hetsync simulate`, on one process."""
    with _early_mistakes():
        parser = make_parser("hetsync simulate", "Simulate a training job on the cluster that --emulate names.")
        parser.add_argument("--ranks", type=PositiveInt, help="Ranks; null takes one for each device of the profile.")
        parser.add_argument("--gradients", action="store_true", help="Train the recipe's model on every virtual rank.")
        parser.add_argument("--script", metavar="FILE", help="YAML list of slow-downs, leaves and joins.")
        parser.add_argument("--calibrate", metavar="RUN", help="Model progress as it was in this run folder.")
        config, asked = parse_recipe(parser, argv)
        from hetsync.simulate.command import simulate

        paths = [None if path is None else Path(path) for path in (asked.script, asked.calibrate)]
        try:
            simulate(config, asked.ranks, asked.gradients, *paths)
        except KeyboardInterrupt:
            complain("interrupted")
            sys.exit(INTERRUPTED)
    sys.exit(0)


def control_main(argv: Sequence[str]) -> NoReturn:
    """`hetsync control train`, on one process and its simulators."""
    parser = _VerbParser(prog="hetsync control", description="Policies of the controller: control.name ppo.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    train = verbs.add_parser("train", help="learn a policy on simulated jobs")
    train.add_argument("--output", metavar="FILE", type=Path, required=True, help="where to write the policy")
    train.add_argument("--steps", type=int, default=40_000, help="decisions to learn from (default: %(default)s)")
    train.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    train.add_argument("--cluster", metavar="PROFILE", help="learn on clusters like this one; default: any")
    train.add_argument("--recipe", metavar="FILE", type=Path, help="learn on jobs like this one; default: any")
    words = parser.parse_args(argv)
    with _early_mistakes():
        if words.steps < 1 or words.seed < 0:
            raise UserError(f"--steps is {words.steps} and --seed {words.seed}: give at least 1, and at least 0")
        from hetsync.control.command import train_policy

        command = " ".join(["hetsync", "control", *argv])
        try:
            train_policy(words.output, words.steps, words.seed, words.cluster, words.recipe, command)
        except KeyboardInterrupt:
            complain("interrupted")
            sys.exit(INTERRUPTED)
    sys.exit(0)


def on_all_ranks(run: RunConfig, job: Callable[[Plane], int]) -> int:
    """Open the plane, run a rank's part, and see to it that no failure leaves other ranks waiting."""
    with _early_mistakes():
        from hetsync.plane import open_plane

        plane = open_plane(run.plane, run.timeout_seconds)
    try:
        status = job(plane)
        plane.close()
        return status
    except BaseException as failure:
        _end_job(plane, failure)


def _end_job(plane: Plane, failure: BaseException) -> NoReturn:
    """Say what happened and end all ranks."""
    if isinstance(failure, SystemExit):
        raise failure
    status, sentence = _verdict(failure)
    if sentence is None:
        traceback.print_exception(failure)
        sentence = "failed, so the job ends"
    if status == USER_ERROR and plane.rank > 0:
        # Rank 0 has most likely found the same mistake, and its word ends this process too.
        time.sleep(1.0)
    where = "" if status == USER_ERROR and plane.rank == 0 else f"rank {plane.rank}: "
    complain(f"{where}{_one_sentence(sentence)}")
    plane.abort(status)
    os._exit(status)


def _verdict(failure: BaseException) -> tuple[int, str | None]:
    """Exit status, and what to say in place of a traceback."""
    import torch

    from hetsync.plane.base import LateError
    from hetsync.sync.watch import StalledError

    if isinstance(failure, UserError):
        return USER_ERROR, str(failure)
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            USER_ERROR,
            f"cannot write: {failure.strerror}; free space and go on with --resume",
        )
    if isinstance(failure, torch.cuda.OutOfMemoryError):
        return USER_ERROR, "out of GPU memory: lower data.batch_size, or this rank's share by sync.pins"
    if isinstance(failure, StalledError | LateError):
        return INTERNAL_ERROR, str(failure)
    if isinstance(failure, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    return INTERNAL_ERROR, None


@contextlib.contextmanager
def _early_mistakes() -> Iterator[None]:
    try:
        yield
    except UserError as mistake:
        end_early(str(mistake))
