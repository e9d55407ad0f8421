"""`hetsync simulate`, on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse.typing import PositiveInt

from hetsync.cli.shared import Verbs, add_recipe_command, on_one_process
from hetsync.config.parser import make_parser, parse_recipe


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "simulate", "run a job on a virtual cluster", main)


def main(argv: Sequence[str]) -> NoReturn:
    with on_one_process():
        parser = make_parser("hetsync simulate", "Simulate a training job on the cluster that --emulate names.")
        parser.add_argument("--ranks", type=PositiveInt, help="Ranks; null takes one for each device of the profile.")
        parser.add_argument("--gradients", action="store_true", help="Train the recipe's model on every virtual rank.")
        parser.add_argument("--script", metavar="FILE", help="YAML list of slow-downs, leaves and joins.")
        parser.add_argument("--calibrate", metavar="RUN", help="Model progress as it was in this run folder.")
        config, told = parse_recipe(parser, argv)
        config.plan.check_unused("hetsync simulate")
        config.fault.check_uninjected("hetsync simulate")
        from hetsync.cli.simulated_job import simulate  # loads torch

        paths = [None if path is None else Path(path) for path in (told.script, told.calibrate)]
        simulate(config, told.ranks, told.gradients, *paths)
    sys.exit(0)
