"""Figures of what a run has predicted."""

from __future__ import annotations

import numpy as np
from bokeh.models import ColorBar, ColumnDataSource, DataRange1d, HoverTool, LinearColorMapper, NoOverlap
from bokeh.palettes import interp_palette
from bokeh.plotting import figure

from hetsync.report.figures import LINES, Figure, Line, lines_figure, tidy, tools
from hetsync.report.predictions import Array, Confusion, Map, Predictions

HEIGHT = 320  # of all, as they stand side by side
HEAT = tuple(interp_palette((LINES[0], LINES[1], LINES[3]), 64))  # seen on light and on dark
WRONG, RIGHT = LINES[3], LINES[0]
OUTLIERS = 0.02  # of the places, that have no colours of their own


def predicted_figures(shown: Predictions) -> dict[str, Figure]:
    """By names."""
    found: dict[str, Figure] = {}
    if shown.pairs:
        found["predicted"] = pairs_figure(*shown.pairs)
    if shown.map and len(shown.map.error):
        found["map"] = map_figure(shown.map)
    if shown.confusion:
        found["confusion"] = confusion_figure(shown.confusion)
    for curve in shown.curves:
        finite = {name: np.where(np.isfinite(values), values, np.nan) for name, values in curve.values.items()}
        lines = [Line(name, curve.x, values) for name, values in finite.items()]
        if len(curve.x):
            found[curve.name] = lines_figure(curve.title, lines, curve.x_label, from_zero=True, name=curve.name)
            found[curve.name].height = HEIGHT
    return found


def pairs_figure(actual: Array, predicted: Array) -> Figure:
    """Predicted against actual; on the diagonal they are equal."""
    plot = figure(
        title=f"Predicted against actual, of {len(actual):,} rows",
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools=tools("both"),
        name="predicted",
    )
    source = ColumnDataSource({"x": actual, "y": predicted}, name="predicted")
    drawn = plot.scatter("x", "y", source=source, size=4, alpha=0.4, line_color=None, color=LINES[0])
    ends = [min(actual.min(), predicted.min()), max(actual.max(), predicted.max())]
    plot.line(x=ends, y=ends, color="#8f9aa3", line_dash="dashed")
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=[("actual", "@x"), ("predicted", "@y")]))
    plot.xaxis.axis_label, plot.yaxis.axis_label = "actual", "predicted"
    tidy(plot)
    return plot


def map_figure(places: Map) -> Figure:
    """As wide as it is high where the places are."""
    plot = figure(
        title=f"Mean absolute error at {len(places.error):,} places",
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_range=DataRange1d(),
        y_range=DataRange1d(),
        match_aspect=True,
        aspect_scale=max(0.1, float(np.cos(np.radians(places.latitude.mean())))),
        tools=tools("both"),
        name="map",
    )
    colours = LinearColorMapper(palette=HEAT, low=places.error.min(), high=np.quantile(places.error, 1 - OUTLIERS))
    source = ColumnDataSource({"x": places.longitude, "y": places.latitude, "error": places.error}, name="map")
    colour = {"field": "error", "transform": colours}
    drawn = plot.scatter("x", "y", source=source, size=6, alpha=0.8, line_color=None, fill_color=colour)
    tips = [("error", "@error"), ("longitude", "@x{0.[00000]}"), ("latitude", "@y{0.[00000]}")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    plot.add_layout(ColorBar(color_mapper=colours, width=10, background_fill_color=None), "right")
    plot.xaxis.axis_label, plot.yaxis.axis_label = "longitude", "latitude"
    plot.axis.major_label_policy = NoOverlap(min_distance=2)
    tidy(plot)
    return plot


def confusion_figure(confusion: Confusion) -> Figure:
    """The stronger a cell, the more of its label's rows; what is wrong has another colour."""
    classes, rows = confusion.classes, confusion.rows
    each = 26 if len(classes) <= 16 else 14
    plot = figure(
        title="What was taken for what",
        height=110 + max(4, len(classes)) * each,
        sizing_mode="stretch_width",
        x_range=classes,
        y_range=classes[::-1],
        tools=[],
        name="confusion",
    )
    label, guess = np.nonzero(rows)
    counts = rows[label, guess]
    part = counts / rows.sum(axis=1)[label]
    columns = {
        "x": [classes[place] for place in guess],
        "y": [classes[place] for place in label],
        "rows": counts,
        "part": part,
        "alpha": np.sqrt(part),
        "colour": np.where(label == guess, RIGHT, WRONG).tolist(),
    }
    source = ColumnDataSource(columns, name="confusion")
    drawn = plot.rect("x", "y", 1, 1, source=source, fill_color="colour", fill_alpha="alpha", line_color=None)
    tips = [("label", "@y"), ("predicted", "@x"), ("rows", "@rows{0,0}"), ("of the label's", "@part{0.[0]%}")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    plot.xaxis.axis_label, plot.yaxis.axis_label = "predicted", "label"
    if sum(map(len, classes)) > 60:
        plot.xaxis.major_label_orientation = "vertical"
    plot.axis.major_label_policy = NoOverlap(min_distance=2)
    tidy(plot)
    return plot
