"""`hetsync VERB`: dispatch to one module a command. Neither `--help` nor parsing loads torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hetsync.cli import (
    checkpoint,
    control,
    data,
    doctor,
    join,
    launch,
    plan,
    predict,
    profile,
    report,
    simulate,
    top,
    trace,
    train,
)
from hetsync.cli.shared import WordParser, add_verbs
from hetsync.version import __version__

COMMANDS = (
    train,
    predict,
    plan,
    profile,
    simulate,
    data,
    control,
    checkpoint,
    report,
    top,
    trace,
    doctor,
    launch,
    join,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `hetsync`."""
    parser = WordParser(prog="hetsync", description="Delay-synchronised training on clusters whose devices differ.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = add_verbs(parser)
    for command in COMMANDS:
        command.add_to(verbs)
    words = list(sys.argv[1:] if argv is None else argv)
    told = parser.parse_args(words, argparse.Namespace(command_line=" ".join(["hetsync", *words])))
    told.run(told)
