"""`hetsync profile`: measures the ranks of a job, under the launcher of the training job that it prepares."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetsync.cli.shared import Verbs, add_recipe_command, on_all_ranks
from hetsync.config.parser import make_parser, parse_recipe
from hetsync.config.schema import Config
from hetsync.errors import early_mistakes

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "profile", "measure the ranks of this job and write a cluster profile", main)


def main(argv: Sequence[str]) -> NoReturn:
    with early_mistakes():
        parser = make_parser("hetsync profile", "Measure every rank and the interconnect, and write a cluster profile.")
        parser.add_argument("--output", metavar="FILE", default="cluster.yaml", help="Where to write the profile.")
        config, told = parse_recipe(parser, argv)
    sys.exit(on_all_ranks(config.run, lambda plane: profile(plane, config, Path(told.output))))


def profile(plane: Plane, config: Config, output: Path) -> int:
    """Collective: measure, write, say where."""
    from hetsync.emulation.cluster import save_cluster
    from hetsync.profiling.report import profile_cluster

    cluster = profile_cluster(plane, config)
    if plane.rank == 0:
        save_cluster(cluster, output)
        print(f"wrote {output}: try it with hetsync-train --emulate {output}")
    return 0
