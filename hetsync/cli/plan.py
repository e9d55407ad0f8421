"""`hetsync plan`, on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from hetsync.cli.shared import Verbs, add_recipe_command, on_one_process
from hetsync.config.parser import make_parser, parse_recipe
from hetsync.errors import UserError


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "plan", "place a model's blocks on the devices of a cluster", main)


def main(argv: Sequence[str]) -> NoReturn:
    with on_one_process():
        parser = make_parser("hetsync plan", "Place the recipe's model on the cluster that --emulate names.")
        parser.add_argument("--ranks", type=PositiveInt, help="Ranks; null takes one for each device of the profile.")
        parser.add_argument("--replicas", help="Ranks of each replica, such as '0,2;1,3', in the order of its stages.")
        parser.add_argument("--micro-batches", type=PositiveInt, help="Of each replica; null tries powers of two.")
        parser.add_argument("--search", help="contiguous, data, exact or single; null takes contiguous.")
        parser.add_argument("--output", metavar="FILE", help="Where to write the plan.")
        parser.add_argument("--explain", metavar="PLAN", help="Show this plan instead of searching for one.")
        config, told = parse_recipe(parser, argv)
        config.plan.check_unused("hetsync plan")
        output, shown = (None if path is None else Path(path) for path in (told.output, told.explain))
        # jsonargparse's positive numbers are of a type of their own, which YAML does not know.
        ranks, micro_batches = (None if number is None else int(number) for number in (told.ranks, told.micro_batches))
        replicas = None if told.replicas is None else parse_replicas(told.replicas)
        from hetsync.cli import planning  # loads torch

        if shown is not None:
            _refuse_unused(told)
            planning.explain(config, shown)
        else:
            planning.plan(config, planning.Request(ranks, replicas, micro_batches, told.search or "contiguous"), output)
    sys.exit(0)


def _refuse_unused(told: Namespace) -> None:
    for name in ("ranks", "replicas", "micro_batches", "search", "output"):
        if (value := told[name]) is not None:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} is {value}, but --explain shows a plan as it is: leave one of them out")


def parse_replicas(text: str) -> tuple[tuple[int, ...], ...]:
    """`0,2;1,3` as ((0, 2), (1, 3)). UserError for anything else."""
    try:
        return tuple(tuple(int(rank) for rank in ranks.split(",")) for ranks in text.split(";"))
    except ValueError:
        raise UserError(
            f"--replicas is {text}: give ranks by commas and replicas by semicolons, such as '0,2;1,3'"
        ) from None
