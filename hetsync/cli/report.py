"""`hetsync report`, on one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetsync.cli.shared import Verbs, on_one_process
from hetsync.extras import require
from hetsync.files import write_atomically


def add_to(verbs: Verbs) -> None:
    what = "make a page that shows a run, or compares several"
    parser = verbs.add_parser("report", help=what, description=f"{what[0].upper()}{what[1:]}: HTML, in one file.")
    parser.add_argument("run_folders", metavar="RUN", type=Path, nargs="+", help="run folders")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="where to write it (default: report.html in the first run folder)"
    )
    parser.set_defaults(run=report)


def report(told: argparse.Namespace) -> None:
    with on_one_process():
        require("report", "hetsync report")
        from hetsync.report.page import page_of

        output = told.output or told.run_folders[0] / "report.html"
        page = page_of(told.run_folders)
        write_atomically(output, page, otherwise="choose another --output")
        print(f"{output}: {len(page.encode()) / 1e6:.1f} MB, for a browser")
