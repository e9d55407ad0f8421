"""`hetsync trace`, on one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetsync.cli.shared import Verbs, on_one_process
from hetsync.files import write_atomically


def add_to(verbs: Verbs) -> None:
    what = "write a run's timeline for Perfetto or chrome://tracing"
    parser = verbs.add_parser("trace", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument("--output", metavar="FILE", type=Path, help="where to write it (default: trace.json in RUN)")
    parser.set_defaults(run=trace)


def trace(told: argparse.Namespace) -> None:
    with on_one_process():
        from hetsync.report.run import read_run
        from hetsync.report.trace import trace_of

        output = told.output or told.run_folder / "trace.json"
        text = trace_of(read_run(told.run_folder))
        write_atomically(output, text, otherwise="choose another --output")
        print(f"{output}: {len(text.encode()) / 1e6:.1f} MB; open it at ui.perfetto.dev, or in chrome://tracing")
