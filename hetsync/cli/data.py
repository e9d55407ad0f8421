"""`hetsync data check` and `hetsync data download`, on one process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from hetsync.cli.shared import Verbs, add_verbs, on_one_process


def add_to(verbs: Verbs) -> None:
    data = add_verbs(verbs.add_parser("data", help="check or download data sets", description="Data sets."))
    check = data.add_parser("check", help="say what is there and what is wrong with it, record by record")
    check.add_argument("dataset", metavar="DATASET", help="name of the data set, as in data.name of recipes")
    check.add_argument("path", metavar="PATH", type=Path, help="the folder or file to look at")
    check.add_argument("--all", action="store_true", help="print every problem instead of the first ones")
    check.set_defaults(run=check_files)
    download = data.add_parser("download", help="fetch a data set, as far as its licence allows")
    download.add_argument("dataset", metavar="DATASET", help="name of the data set, as in data.name of recipes")
    download.add_argument("--to", metavar="DIR", type=Path, help="new folder for it (default: data/DATASET)")
    download.set_defaults(run=download_files)


def check_files(told: argparse.Namespace) -> NoReturn:
    with on_one_process():
        from hetsync.cli.data_sets import check

        sys.exit(check(told.dataset, told.path, told.all))


def download_files(told: argparse.Namespace) -> NoReturn:
    with on_one_process():
        from hetsync.cli.data_sets import download

        sys.exit(download(told.dataset, told.to or Path("data") / told.dataset))
