"""`hetsync top`, on one process: reads the run folder only, so from any node that sees it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table

from hetsync.cli.shared import Verbs, on_one_process
from hetsync.console import plain_console

if TYPE_CHECKING:
    from hetsync.report.live import LiveRun, Row


PIPE_WIDTH = 160  # columns, where no terminal tells


def add_to(verbs: Verbs) -> None:
    what = "watch the ranks of a run: who is slow, and why"
    parser = verbs.add_parser("top", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument("--once", action="store_true", help="show it once, as without a terminal, and end")
    parser.add_argument("--seconds", metavar="S", type=_seconds, default=2.0, help="between two looks (default: 2)")
    parser.set_defaults(run=top)


def _seconds(word: str) -> float:
    seconds = float(word)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{word} is out of bounds: give 0.1 to 3600 seconds")
    return seconds


def top(told: argparse.Namespace) -> None:
    with on_one_process():
        from hetsync.report.live import LiveRun

        run, console = LiveRun(told.run_folder), plain_console()
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        if told.once or not console.is_terminal:
            console.print(_shown(run))
            return
        with Live(_shown(run), console=console, auto_refresh=False) as live:
            while not run.over:
                time.sleep(told.seconds)
                live.update(_shown(run), refresh=True)


def _shown(run: LiveRun) -> Group:
    from hetsync.report.live import slowest

    rows = run.rows()
    table = Table("rank", "place", *_NUMBERS, "why slow", box=None, pad_edge=False)
    for column in table.columns[2 : 2 + len(_NUMBERS)]:
        column.justify = "right"
    for row in rows:
        table.add_row(*_cells(row), style="yellow" if row.why else None)
    left_out = f"lines of telemetry that cannot be read: {run.unreadable}" if run.unreadable else None
    told = (str(run.folder), run.progress(), slowest(rows), left_out)
    return Group("  ".join(filter(None, told)), table)


_NUMBERS = ("share", "/s", "speed", "comp", "wait", "load", "stale")


def _cells(row: Row) -> list[str]:
    def told(value: float | None, form: str) -> str:
        return "" if value is None else f"{value:{form}}"

    parts = (row.speed, row.computing, row.waiting, row.loading)
    numbers = [told(row.share, "d"), told(row.rate, ",.1f"), *(told(part, ".0%") for part in parts)]
    return [str(row.rank), row.place, *numbers, told(row.staleness, ".1f"), row.why]
