"""`hetsync control train`: a policy for the clusters and recipes that one has, or for any."""

from __future__ import annotations

import time
from pathlib import Path

from hetsync.cli import make_parser, parse_recipe
from hetsync.control.jobs import JobDraw
from hetsync.control.ppo import train
from hetsync.profiling.cluster import load_cluster


def train_policy(output: Path, steps: int, seed: int, cluster: str | None, recipe: Path | None, command: str) -> None:
    """Learn on simulated jobs like those named, and write the policy. UserError where something cannot be read."""
    draw = JobDraw(
        load_cluster(cluster) if cluster is not None else None,
        parse_recipe(make_parser("hetsync control train", ""), [str(recipe)])[0] if recipe is not None else None,
    )
    began = time.monotonic()
    made = train(draw, output, steps, seed, command, lambda sentence: print(sentence, flush=True))
    print(f"wrote {output}: {made.steps:,} decisions in {time.monotonic() - began:.0f} s", flush=True)
