"""What commands share: a parser that speaks once for all ranks, and how a command runs to its end."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hetsync.config.schema import Config
from hetsync.errors import complain, did_you_mean, early_mistakes, end_early
from hetsync.launchers import first_rank
from hetsync.plane.ending import INTERRUPTED, end_job, opening
from hetsync.start import loading

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane

Verbs = Any  # what argparse's add_subparsers returns, which has no public name


class WordParser(argparse.ArgumentParser):
    """Complains and helps on rank 0 only: every rank parses the same words."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # as recipes' options are written out

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"argument VERB: invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            word, verbs = found[1], found[2].replace("'", "")
            end_early(f"there is no verb {word}{did_you_mean(word, verbs.split(', '))}: use one of {verbs}")
        end_early(f"{message}; see {self.prog} --help")

    def print_help(self, *args: Any, **kwargs: Any) -> None:
        if first_rank():
            super().print_help(*args, **kwargs)


def add_verbs(parser: WordParser) -> Verbs:
    """Where the parser's commands add theirs."""
    title = "verbs, each with a --help of its own"
    return parser.add_subparsers(dest="verb", metavar="VERB", required=True, title=title)


def add_recipe_command(verbs: Verbs, name: str, what: str, main: Callable[[Sequence[str]], None]) -> None:
    """A command whose words, all of them, are for `main` with its recipe parser (config/parser.py)."""
    parser = verbs.add_parser(name, help=what, add_help=False, prefix_chars="\0")  # no word is an option here
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=lambda told: main(told.words))


def on_all_ranks(config: Config, job: Callable[[Plane], int], again: str = "start the command again") -> int:
    """Open the plane, run a rank's part, and see to it that no failure leaves other ranks waiting. `again`: what there
    is to do where a rank has gone."""
    atexit.register(gc.freeze)  # what is left is the system's to free, and not Python's to search for cycles
    with opening(), loading():
        from hetsync.plane import open_plane

        plane = open_plane(config.run.plane, config.run.timeout_seconds, bool(config.fault.tolerate))
    try:
        status = job(plane)
        plane.close()
        return status
    except BaseException as failure:
        end_job(plane, failure, again)


@contextlib.contextmanager
def on_one_process() -> Iterator[None]:
    """Inside, a mistake and an interrupt end the process with one sentence."""
    with early_mistakes():
        try:
            yield
        except KeyboardInterrupt:
            complain("interrupted")
            sys.exit(INTERRUPTED)
