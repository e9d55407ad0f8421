"""`hetsync profile`: the ranks of a job, measured under its launcher or taken from a file, and what they reach."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetsync.cli.shared import Verbs, add_recipe_command, on_all_ranks
from hetsync.config.parser import make_parser, parse_recipe
from hetsync.config.schema import Config
from hetsync.errors import UserError, early_mistakes

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane

OUTPUT = "cluster.yaml"


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "profile", "measure the ranks of this job, and say what HetSync gains on them", main)


def main(argv: Sequence[str]) -> NoReturn:
    with early_mistakes():
        what = (
            "Measure every rank and the interconnect, write a cluster profile, and say what HetSync gains there and"
            " which devices make the job slower."
            " With --emulate the ranks are those of a profile, and nothing is measured."
        )
        parser = make_parser("hetsync profile", what)
        parser.add_argument("--output", metavar="FILE", help=f"Where to write the profile; null takes {OUTPUT}.")
        parser.add_argument("--json", action="store_true", help="Print all of it as JSON.")
        config, told = parse_recipe(parser, argv)
        config.plan.check_unused("hetsync profile")
        config.fault.check_uninjected("hetsync profile")
        given = config.emulation.profile
        if given is not None and told.output is not None:
            raise UserError(f"--output is {told.output}, but --emulate {given} measures nothing: leave one of them out")
    if given is not None:
        sys.exit(on_all_ranks(config, lambda plane: profile_given(plane, config, given, told.json)))
    sys.exit(on_all_ranks(config, lambda plane: profile(plane, config, Path(told.output or OUTPUT), told.json)))


def profile(plane: Plane, config: Config, output: Path, as_json: bool) -> int:
    """Collective: measure, write, say what was found."""
    from hetsync.cli.profile_report import answer_of, show
    from hetsync.data.ledger import total_samples
    from hetsync.emulation.cluster import save_cluster
    from hetsync.profiling.report import profile_cluster
    from hetsync.simulate.scenario import Traffic
    from hetsync.sync.optimizers import build_optimizer, loses_by_delay

    found = profile_cluster(plane, config)
    if plane.rank == 0:
        save_cluster(found.cluster, output)
        traffic = Traffic.of(found.model, config.sync.bucket_bytes)
        adaptive = loses_by_delay([build_optimizer(config.optimizer, found.model)])
        samples = total_samples(config.run.samples, config.run.epochs, found.epoch_samples)
        show(answer_of(config, found.cluster, found.ranks, traffic, adaptive, samples), as_json)
        if not as_json:
            print(f"wrote {output}: try it with hetsync-train --emulate {output}")
    return 0


def profile_given(plane: Plane, config: Config, name: str, as_json: bool) -> int:
    """What there is to say of a cluster that is not there; rank 0 alone."""
    from hetsync.cli.profile_report import answer_of, show
    from hetsync.emulation.cluster import load_cluster
    from hetsync.simulate.recipe import build, scenario_of

    if plane.rank == 0:
        job = scenario_of(config, load_cluster(name), None, *build(config))
        show(answer_of(config, job.cluster, job.ranks, job.traffic, job.adaptive, job.total_samples), as_json)
    return 0
