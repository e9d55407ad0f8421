"""What `hetsync test` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich.table import Table
from rich.text import Text

from hetsync.console import plain_console
from hetsync.train.tested import MODEL, RunMetrics


def show(folder: Path, tested: RunMetrics) -> None:
    """The model's metrics, and below them those of naive predictors."""
    title = (
        f"{folder}: {tested.samples:,} samples of the {tested.part} part, {tested.weights} weights, after"
        f" {tested.samples_applied:,} samples of training"
    )
    rows = {name: [f"{value:.4g}" for value in found.values()] for name, found in tested.metrics.items()}
    _print(title, list(tested.metrics[MODEL]), rows)


def show_all(runs: Sequence[RunMetrics]) -> None:
    """Mean and deviation of the model's metrics that all have."""
    names = [name for name in runs[0].metrics[MODEL] if all(name in run.metrics[MODEL] for run in runs)]
    values = [[run.metrics[MODEL][name] for run in runs] for name in names]
    rows = {"mean": [f"{fmean(each):.4g}" for each in values], "deviation": [f"{stdev(each):.2g}" for each in values]}
    _print(f"{len(runs)} runs", names, rows)


def _print(title: str, heads: Sequence[str], rows: dict[str, list[str]]) -> None:
    """A line a metric, a column a predictor: metrics may be many, predictors are few."""
    table = Table("", *rows, title=Text(title), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in zip(heads, *rows.values(), strict=True):
        table.add_row(*line)
    plain_console(soft_wrap=True).print(table)
