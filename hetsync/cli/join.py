"""`hetsync join RUN`: this process takes the place of a rank that has died in a running job."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from hetsync.cli.shared import Verbs, on_one_process
from hetsync.errors import UserError
from hetsync.launchers import ASKS


def add_to(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "join",
        help="take a dead rank's place in a running job",
        description="Take the place of a rank that has died in a running job, or wait until one dies. The job must have"
        " been started without MPI and with fault.replace true. This process runs the command of its ranks, in their"
        " folder: on any host that sees the run folder and reaches rank 0's host.",
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the job's run folder")
    parser.set_defaults(run=run)


def run(told: argparse.Namespace) -> None:
    with on_one_process():
        join(told.run_folder)


def join(folder: Path) -> None:
    """Does not return."""
    from hetsync.train.notice import read

    notice = read(folder)
    try:
        os.chdir(notice.directory)
        # torch tells of a store that has gone, or is none, by twenty lines of its own.
        env = {"TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ, ASKS: json.dumps(notice.asked_at)}
        os.execve(notice.command[0], list(notice.command), env)
    except OSError as error:
        raise UserError(
            f"the job's ranks run {notice.command[0]} in {notice.directory}, which this host has not"
            f" ({error.strerror}): join from one that sees both"
        ) from error
