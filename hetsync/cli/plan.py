"""`hetsync plan`: on one process, or under a launcher on the ranks that are there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from hetsync.cli.shared import Verbs, add_recipe_command, on_all_ranks, on_one_process
from hetsync.config.checks import at_least
from hetsync.config.parser import make_parser, parse_recipe
from hetsync.config.schema import Config
from hetsync.errors import UserError, brief
from hetsync.files import check_writable
from hetsync.launchers import launched_by_torch, ranks_started

SEARCHING = [
    "ranks",
    "replicas",
    "micro_batches",
    "search",
    "evaluations",
    "seconds",
    "weights",
    "seed",
    "groups",
    "policy",
    "measure",
]
DEFAULT_STEPS = 400


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "plan", "place a model's blocks on the devices of a cluster", main)


def main(argv: Sequence[str]) -> NoReturn:
    with on_one_process():
        what = "Place the recipe's model on the cluster that --emulate names, or under mpirun on the job's own ranks."
        parser = make_parser("hetsync plan", what)
        parser.add_argument("--ranks", type=PositiveInt, help="Ranks; null takes one for each device of the profile.")
        parser.add_argument("--replicas", help="Ranks of each replica, such as '0,2;1,3', in the order of its stages.")
        parser.add_argument("--micro-batches", metavar="M", help="Of each replica; auto or null tries powers of two.")
        known = "best, contiguous, data, exact, hierarchical, hierarchical-multi, list, local, mincut, ppo-time, random"
        more = "single, tapp, trinity or trinity-nothing"
        parser.add_argument("--search", help=f"{known}, {more}; null takes best.")
        parser.add_argument("--evaluations", type=PositiveInt, help="Plans to be tried, at most; null takes 1000.")
        parser.add_argument(
            "--seconds",
            type=PositiveFloat,
            help="For the search, of this process; null is no limit, under mpirun half of run.timeout_seconds.",
        )
        parser.add_argument("--weights", metavar="T,C,M", help="Of time, bytes and memory; null takes 1,0,0.")
        parser.add_argument("--seed", type=NonNegativeInt, help="Of what searches draw; null takes 0.")
        parser.add_argument("--groups", type=PositiveInt, help="Into which blocks are contracted; null takes 64.")
        parser.add_argument("--output", metavar="FILE", help="Where to write the plan.")
        parser.add_argument(
            "--policy", metavar="FILE", help="What trinity begins with, or shipped, as best does; null: it learns anew."
        )
        parser.add_argument("--measure", action="store_true", help="Under mpirun: run the five best, take the fastest.")
        parser.add_argument("--pretrain", action="store_true", help="Learn a policy, on random models and clusters.")
        parser.add_argument("--steps", type=PositiveInt, help="Updates of --pretrain; null takes 400.")
        parser.add_argument("--explain", metavar="PLAN", help="Show this plan instead of searching for one.")
        parser.add_argument(
            "--list",
            nargs="?",
            const="*",
            metavar="PATTERN",
            help="Show the blocks of the recipe's model, by whose names plans call them: all, or those like layer3.*",
        )
        config, told = parse_recipe(parser, argv)
        config.plan.check_unused("hetsync plan")
        config.fault.check_uninjected("hetsync plan")
        output, shown = (None if path is None else Path(path) for path in (told.output, told.explain))
        alone = ranks_started() == 1 and launched_by_torch() < 2
        if output is not None and alone:  # else rank 0 says so, once ranks can speak
            check_writable(output)
        if not alone and (told.pretrain or shown is not None or told.list is not None):
            option = "--pretrain" if told.pretrain else "--explain" if shown is not None else "--list"
            raise UserError(f"{option} is for one process, and there are several: start it without a launcher")
        for option, number in (("--seed", told.seed), ("--evaluations", told.evaluations)):
            at_least(option, None if number is None else int(number), 0)
        if told.pretrain:
            _refuse_beside("--pretrain", told, [name for name in (*SEARCHING, "explain", "list") if name != "seed"])
            if config.emulation.profile is not None:
                raise UserError(
                    f"--emulate is {config.emulation.profile}, but --pretrain learns on random models and clusters:"
                    " leave one of them out"
                )
            _pretrain(told, output, shlex.join(["hetsync", "plan", *argv]))
            status = 0
        elif told.steps is not None:
            raise UserError(f"--steps is {told.steps}, but only --pretrain takes it: leave it out, or add --pretrain")
        elif shown is not None:
            _refuse_beside("--explain", told, [*SEARCHING, "output", "list"])
            from hetsync.cli import planning  # loads torch

            planning.explain(config, shown)
            status = 0
        elif told.list is not None:
            _refuse_beside("--list", told, [*SEARCHING, "output"])
            from hetsync.cli import planning  # loads torch

            planning.list_blocks(config, told.list)
            status = 0
        else:
            status = _search(config, told, output, alone)
    sys.exit(status)


def _search(config: Config, told: Namespace, output: Path | None, alone: bool) -> int:
    replicas = None if told.replicas is None else parse_replicas(told.replicas)
    micro_batches = None if told.micro_batches is None else parse_micro_batches(told.micro_batches)
    weights = None if told.weights is None else parse_weights(told.weights)
    if told.measure and alone:
        raise UserError(
            "--measure runs plans on their ranks, and there is one: start hetsync plan under mpirun, a rank for each"
            " device"
        )
    from hetsync.cli import planning  # loads torch

    # jsonargparse's positive numbers are of types of their own, which YAML does not know.
    ranks, groups = (None if number is None else int(number) for number in (told.ranks, told.groups))
    evaluations = planning.MOST_EVALUATIONS if told.evaluations is None else int(told.evaluations)
    seconds = None if told.seconds is None else float(told.seconds)
    request = planning.Request(
        ranks=ranks,
        replicas=replicas,
        micro_batches=micro_batches,
        search=told.search or "best",
        evaluations=evaluations,
        seconds=seconds,
        weights=weights,
        seed=int(told.seed or 0),
        groups=groups,
        policy=None if told.policy is None else Path(told.policy),
    )
    if alone:
        return planning.plan(config, request, output)
    from hetsync.cli.planning_ranks import plan_on_ranks

    return on_all_ranks(config, lambda plane: plan_on_ranks(plane, config, request, output, told.measure))


def _pretrain(told: Namespace, output: Path | None, command: str) -> None:
    if output is None:
        raise UserError("--pretrain learns a policy, but --output does not say where to write it: give it")
    import torch

    from hetsync.plan.search.pretraining import pretrain

    torch.set_num_threads(1)  # the network is small, and its sums shall not depend on the machine
    steps = DEFAULT_STEPS if told.steps is None else int(told.steps)
    pretrain(output, steps, int(told.seed or 0), command, lambda line: print(line, flush=True))
    print(f"wrote {output}")


def _refuse_beside(option: str, told: Namespace, names: Sequence[str]) -> None:
    does = {
        "--explain": "shows a plan as it is",
        "--list": "shows the model's blocks",
        "--pretrain": "learns on random models and clusters",
    }[option]
    for name in names:
        if (value := told[name]) is not None and value is not False:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but {option} {does}: leave one of them out")


def parse_replicas(text: str) -> tuple[tuple[int, ...], ...]:
    """`0,2;1,3` as ((0, 2), (1, 3)). UserError for anything else."""
    try:
        return tuple(tuple(int(rank) for rank in ranks.split(",")) for ranks in text.split(";"))
    except ValueError:
        raise UserError(
            f"--replicas is {text}: give ranks by commas and replicas by semicolons, such as '0,2;1,3'"
        ) from None


def parse_micro_batches(text: str) -> int | None:
    """A number, or None for auto. UserError for anything else."""
    if text == "auto":
        return None
    if text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    raise UserError(f"--micro-batches is {brief(text)}: give a whole number above 0, or auto")


def parse_weights(text: str) -> tuple[float, ...]:
    """`1,0,0.5` as numbers. UserError for anything else."""
    try:
        return tuple(float(weight) for weight in text.split(","))
    except ValueError:
        raise UserError(
            f"--weights is {brief(text)}: give three numbers by commas, of time, bytes and memory, such as 1,0,0"
        ) from None
