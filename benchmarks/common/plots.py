"""Plots into files, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def can_plot() -> bool:
    """Says on stderr that there will be no plots, where there will be none."""
    installed = importlib.util.find_spec("matplotlib") is not None
    if not installed:
        print("no plots: matplotlib is not installed (extra bench)", file=sys.stderr)
    return installed


def headless_pyplot() -> Any:
    """matplotlib's, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
