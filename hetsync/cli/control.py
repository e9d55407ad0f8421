"""`hetsync control train`: a policy for the clusters and recipes that one has, or for any."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetsync.cli.shared import Verbs, add_verbs, on_one_process
from hetsync.config.parser import read_recipe
from hetsync.config.schema import Config
from hetsync.errors import UserError
from hetsync.extras import require

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.simulate.scenario import Traffic


def add_to(verbs: Verbs) -> None:
    what = "learn a policy that tunes jobs"
    control = add_verbs(verbs.add_parser("control", help=what, description="Policies of the controller."))
    train = control.add_parser("train", help="learn a policy on simulated jobs, for control.name ppo")
    train.add_argument("--output", metavar="FILE", type=Path, required=True, help="where to write the policy")
    train.add_argument("--steps", type=int, default=40_000, help="decisions to learn from (default: %(default)s)")
    train.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    train.add_argument("--cluster", metavar="PROFILE", help="learn on clusters like this one; default: any")
    train.add_argument("--recipe", metavar="FILE", type=Path, help="learn on jobs like this one; default: any")
    train.set_defaults(run=train_policy)


def train_policy(told: argparse.Namespace) -> NoReturn:
    """Learn on simulated jobs like those named, and write the policy."""
    with on_one_process():
        if told.steps < 1 or told.seed < 0:
            raise UserError(f"--steps is {told.steps} and --seed {told.seed}: give at least 1, and at least 0")
        require("control", "learning a policy")
        from hetsync.control.learning.jobs import JobDraw
        from hetsync.control.learning.ppo import train  # loads stable-baselines3
        from hetsync.emulation.cluster import load_cluster

        cluster = load_cluster(told.cluster) if told.cluster is not None else None
        recipe = read_recipe(told.recipe) if told.recipe is not None else None
        draw = JobDraw(cluster, recipe, _traffic_of(recipe) if recipe is not None else None)
        began = time.monotonic()
        made = train(draw, told.output, told.steps, told.seed, told.command_line, lambda line: print(line, flush=True))
        print(f"wrote {told.output}: {made.steps:,} decisions in {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(0)


def _traffic_of(recipe: Config) -> Traffic:
    """What the recipe's model makes travel."""
    from hetsync.simulate.recipe import build
    from hetsync.simulate.scenario import Traffic

    _, model = build(recipe)
    return Traffic.of(model, recipe.sync.bucket_bytes)
