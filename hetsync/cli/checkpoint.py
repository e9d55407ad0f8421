"""`hetsync checkpoint verify`, on one process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from hetsync.cli.shared import Verbs, add_verbs
from hetsync.errors import early_mistakes


def add_to(verbs: Verbs) -> None:
    what = "verify the checkpoints of a run"
    checkpoint = add_verbs(verbs.add_parser("checkpoint", help=what, description="Look at the checkpoints of a run."))
    verify = checkpoint.add_parser("verify", help="compare each with its digests; exit status 1 where one is damaged")
    verify.add_argument("run_folder", metavar="RUN", type=Path, help="the run folder")
    verify.set_defaults(run=verify_checkpoints)


def verify_checkpoints(told: argparse.Namespace) -> NoReturn:
    with early_mistakes():
        from hetsync.train import checkpoint

        found = checkpoint.verify(told.run_folder)
    for name, _, verdict in found:
        print(f"{name} {verdict}")
    sys.exit(0 if all(sound for _, sound, _ in found) else 1)
