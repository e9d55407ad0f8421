"""What `hetsync data` does: says what files hold and what is wrong with them, and fetches data sets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from hetsync.config.imports import import_object
from hetsync.console import plain_console
from hetsync.data.catalogue import CATALOGUE, Entry
from hetsync.data.download import download as fetch
from hetsync.data.findings import Findings
from hetsync.errors import UserError

SHOWN = 20  # problems in full, unless all are asked for


def check(name: str, path: Path, every: bool) -> int:
    """Print counts, and problems as they are found; returns 1 where there are any, else 0."""
    entry = _entry(name)
    if entry.check is None:
        raise UserError(f"{name} has no files to check: {entry.terms}")
    if not path.exists():
        raise UserError(f"{path} does not exist: give the folder or file with the {name} data")
    console = plain_console(soft_wrap=True)
    told = 0

    def tell(where: str, what: str) -> None:
        nonlocal told
        told += 1
        if every or told <= SHOWN:
            console.print(f"{where}: {what}")

    findings = Findings(tell)
    import_object("data set", entry.check)(path, findings)
    if told > SHOWN and not every:
        console.print(f"... and {told - SHOWN:,} more problems; --all prints them")
    console.print(_table(f"{name} in {path}", findings.counts))
    if not told:
        console.print("nothing is wrong")
        return 0
    console.print(_table("problems", findings.problems))
    return 1


def download(name: str, folder: Path) -> int:
    """Fetch what may be fetched into a new folder; returns 0."""
    entry = _entry(name)
    if not entry.downloads:
        layout = f"; its folder must hold {entry.layout}" if entry.layout else ""
        raise UserError(f"{name} is not for download: {entry.terms}{layout}")
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn()) as display:
        tasks: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = display.add_task(file)
            display.update(tasks[file], completed=done, total=total)

        fetch(entry.downloads, folder, show)
    print(f"{name} is in {folder}; {entry.terms}")
    return 0


def _entry(name: str) -> Entry:
    if name not in CATALOGUE:
        raise UserError(f"there is no data set {name}: use one of {', '.join(sorted(CATALOGUE))}")
    return CATALOGUE[name]


def _table(title: str, counts: Counter[str]) -> Table:
    table = Table("", "", title=Text(title), title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for what, number in counts.items():
        table.add_row(Text(what), f"{number:,}")
    return table
