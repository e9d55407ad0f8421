"""The page's figures, by Bokeh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    BoxZoomTool,
    ColumnDataSource,
    CompositeTicker,
    CustomJS,
    CustomJSTickFormatter,
    DataRange1d,
    FixedTicker,
    HoverTool,
    PanTool,
    Range1d,
    ResetTool,
    WheelZoomTool,
    ZoomInTool,
    ZoomOutTool,
)
from bokeh.plotting import figure
from numpy.typing import NDArray

from hetsync.report.timeline import PARTS, Rows

Array = NDArray[np.float64]
Figure = Any  # bokeh's, which is not typed

COLOURS = {"compute": "#4c78a8", "wait": "#e45756", "data": "#b279a2", "rest": "#8f9aa3", "round": "#eda12e"}
NAMES = {
    "compute": "computing",
    "wait": "waiting",
    "data": "loading",
    "rest": "evaluating, saving",
    "round": "communicating",
}
LINES = ("#4c78a8", "#eda12e", "#54a24b", "#e45756", "#b279a2", "#4fb3bf", "#9d755d", "#e377a2", "#7f8c8d", "#b6992d")
LABELLED_RANKS = 24
LEGEND_LINES = 6
HEIGHT = 230

# Seconds as hours, minutes and seconds, with the digits that the distance of ticks asks for.
CLOCK_CODE = """
const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1
const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step)))
const hours = Math.floor(tick / 3600), minutes = Math.floor(tick % 3600 / 60), seconds = (tick % 60).toFixed(digits)
const two = value => String(value).padStart(2, '0')
if (tick < 0) return ''
if (ticks[ticks.length - 1] < 120) return tick.toFixed(digits) + ' s'
return hours ? `${hours}:${two(minutes)}:${two(seconds)}` : `${minutes}:${two(seconds)}`
"""


@dataclass(frozen=True)
class Line:
    """One course.

    Args:
        x, y: Of equal shape; nan is a gap.
        low, high: Of the band around it.
        steps: Each value holds up to the next.
    """

    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    steps: bool = False


def time_range(seconds: float) -> Range1d:
    """That figures of one run share, so that they are zoomed together."""
    seconds = seconds or 1.0
    return Range1d(0, seconds, bounds=(-0.02 * seconds, 1.02 * seconds), min_interval=seconds * 1e-7)


def lines_figure(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    *,
    x_range: Any = None,
    of_time: bool = False,
    from_zero: bool = False,
    reference: float | None = None,
    name: str | None = None,
) -> Figure:
    """Courses with their values under the pointer; a legend where there are few."""
    plot = figure(
        title=title,
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_range=x_range or DataRange1d(),
        y_range=DataRange1d(start=0) if from_zero else DataRange1d(),
        tools=tools(),
        name=name,
    )
    plot.y_range.range_padding = 0.12
    for number, line in enumerate(lines):
        _draw(plot, line, LINES[number % len(LINES)], len(lines), of_time)
    if reference is not None:
        plot.line(
            x=[lines[0].x[0], lines[0].x[-1]],
            y=[reference, reference],
            color="#8f9aa3",
            line_dash="dashed",
            line_width=1,
        )
    plot.xaxis.axis_label = x_label
    if of_time:
        _tell_time(plot)
    tidy(plot, "bottom_right" if from_zero else "top_right")
    return plot


def _draw(plot: Figure, line: Line, colour: str, lines: int, of_time: bool) -> None:
    banded = line.low is not None and bool(np.isfinite(line.low).any())
    columns = {"x": line.x, "y": line.y, "name": [line.name] * len(line.x)}
    source = ColumnDataSource({**columns, "low": line.low, "high": line.high} if banded else columns, name=line.name)
    if banded:
        plot.varea("x", "low", "high", source=source, fill_color=colour, fill_alpha=0.2)
    legend = {"legend_label": line.name} if 1 < lines <= LEGEND_LINES else {}
    style = {"source": source, "color": colour, "line_width": 1.7, "alpha": 0.9 if lines <= LEGEND_LINES else 0.55}
    drawn = (
        plot.step("x", "y", mode="after", **style, **legend) if line.steps else plot.line("x", "y", **style, **legend)
    )
    if len(line.x) <= 50:
        plot.scatter("x", "y", source=source, size=4, color=colour, **legend)
    tips = [("", "@name"), ("seconds" if of_time else "x", "@x{0,0.[000]}"), ("value", "@y{0,0.[0000]}")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips, mode="mouse", line_policy="nearest"))


def bars_figure(title: str, values: Mapping[str, float], x_label: str, name: str) -> Figure:
    plot = figure(
        title=title, x_range=list(values), height=HEIGHT, sizing_mode="stretch_width", tools=tools(), name=name
    )
    source = ColumnDataSource({"x": list(values), "top": list(values.values())}, name=name)
    drawn = plot.vbar("x", top="top", width=0.8, source=source, color=LINES[0])
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=[("", "@x"), ("", "@top{0,0}")]))
    plot.y_range.start = 0
    plot.xaxis.axis_label = x_label
    tidy(plot)
    return plot


def timeline_figure(rows: Rows, rounds: Rows, x_range: Range1d, synchronous: bool, ranks: Sequence[int]) -> Figure:
    """Every rank's time; the browser fills in what is in sight (timeline.js)."""
    each = 30 if len(ranks) <= 16 else 13
    plot = figure(
        title="What every rank did",
        height=80 + max(3, len(ranks)) * each,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_range=Range1d(len(ranks), 0),
        tools=tools(),
        name="timeline",
    )
    layers = [_layer(plot, rows, PARTS, strip=False), _layer(plot, rounds, ("round",), strip=True)]
    code = (files("hetsync.report") / "timeline.js").read_text(encoding="utf-8")
    redraw = CustomJS(args={"layers": layers, "range": x_range, "synchronous": synchronous}, code=code, module=True)
    for end in ("start", "end"):
        x_range.js_on_change(end, redraw)
    plot.tags = [{"redraw": redraw}]
    every = -(-len(ranks) // LABELLED_RANKS)
    labelled = {place + 0.5: f"rank {ranks[place]}" for place in range(0, len(ranks), every)}
    plot.yaxis.ticker = FixedTicker(ticks=list(labelled))
    plot.yaxis.major_label_overrides = labelled
    _tell_time(plot)
    plot.ygrid.visible = False
    tidy(plot)
    return plot


def _layer(plot: Figure, rows: Rows, parts: Sequence[str], strip: bool) -> dict[str, Any]:
    names = ("left", "right", "top", "bottom", "color", "what", "seconds", "rank")
    shown = ColumnDataSource({name: [] for name in names}, name="in sight")
    drawn = plot.quad("left", "right", "top", "bottom", source=shown, fill_color="color", line_color=None)
    tips = [("rank", "@rank"), ("", "@what"), ("seconds", "@seconds{0.[000000]}"), ("from", "@left{0.[000]} s")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    return {
        "rows": ColumnDataSource(rows.columns, name="rounds" if strip else "tasks"),
        "first": rows.first,
        "parts": list(parts),
        "names": [NAMES[part] for part in parts],
        "colours": [COLOURS[part] for part in parts],
        "strip": strip,
        "shown": shown,
    }


def _tell_time(plot: Figure) -> None:
    """Ticks at round seconds, minutes and hours."""
    minute, hour = 60, 3600
    plot.xaxis.ticker = CompositeTicker(
        tickers=[
            AdaptiveTicker(mantissas=[1, 2, 5], base=10, max_interval=0.5),
            AdaptiveTicker(mantissas=[1, 2, 5, 10, 15, 20, 30], base=60, min_interval=1, max_interval=30 * minute),
            AdaptiveTicker(mantissas=[n * hour for n in (1, 2, 4, 8, 12)], base=24, min_interval=hour),
        ],
        desired_num_ticks=6,
    )
    plot.xaxis.formatter = CustomJSTickFormatter(code=CLOCK_CODE)


def tools(dimensions: str = "width") -> list[Any]:
    """The wheel scrolls the page, and zooms with the Ctrl key."""
    return [
        BoxZoomTool(dimensions=dimensions),
        PanTool(dimensions=dimensions),
        ZoomInTool(dimensions=dimensions),
        ZoomOutTool(dimensions=dimensions),
        WheelZoomTool(dimensions=dimensions, modifiers="ctrl"),
        ResetTool(),
    ]


def tidy(plot: Figure, legend_at: str | None = None) -> None:
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.min_border_right = 14
    plot.outline_line_color = None
    plot.background_fill_color = plot.border_fill_color = None  # the page shows through
    plot.grid.grid_line_alpha = 0.5
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    if plot.legend:
        plot.legend.location = legend_at
        plot.legend.click_policy = "hide"
        plot.legend.label_text_font_size = "11px"
        plot.legend.padding = 4
        plot.legend.spacing = 0
        plot.legend.background_fill_alpha = 0.7
