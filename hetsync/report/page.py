"""The page: one HTML file with everything in it, for one run or several compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment
from markupsafe import Markup

from hetsync.console import duration
from hetsync.report.facts import efficiency_of, facts_of
from hetsync.report.figures import (
    COLOURS,
    NAMES,
    Figure,
    Line,
    bars_figure,
    lines_figure,
    time_range,
    timeline_figure,
)
from hetsync.report.limits import limits_of
from hetsync.report.lines import Record, outlived
from hetsync.report.predicted import predicted_figures
from hetsync.report.predictions import Predictions, read_predictions
from hetsync.report.run import Run, Setting, read_run
from hetsync.report.series import Course, course_of
from hetsync.report.table import Table
from hetsync.report.timeline import round_rows_of, rows_of
from hetsync.version import __version__

MOST_LISTED = 500  # rows of a table
SAMPLES, CLOCK_LABEL = "samples", "time of the run"


@dataclass(frozen=True)
class Tile:
    key: str
    name: str
    value: str


@dataclass
class Section:
    """What the page has of one run; plots by their names."""

    name: str
    about: str
    tiles: list[Tile]
    limits: list[str]
    predictions: Predictions
    timeline: str | None = None
    timeline_note: str = ""
    plots: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    predicted: list[str] = field(default_factory=list)  # plots of it
    recipe: str = ""


@dataclass(frozen=True)
class Seen:
    """A run with what is drawn of it."""

    name: str
    run: Run
    course: Course


def page_of(folders: Sequence[Path]) -> str:
    """UserError where one of them is no run folder."""
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    seen = [Seen(name, run, course_of(run)) for name, run in zip(names, runs, strict=True)]
    plots: dict[str, Figure] = {}
    sections = [_section(each, plots, f"run{number}") for number, each in enumerate(seen)]
    comparison = _comparison(seen, plots) if len(seen) > 1 else None
    return _rendered(", ".join(names), sections, comparison, plots)


def _names(runs: Sequence[Run]) -> list[str]:
    """By folder; where two are called the same, by path."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def _rendered(
    title: str, sections: list[Section], comparison: dict[str, Any] | None, plots: Mapping[str, Figure]
) -> str:
    script, placed = components(dict(plots)) if plots else ("", {})
    package = files("hetsync.report")
    template = Environment(autoescape=True).from_string((package / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        runs=sections,
        comparison=comparison,
        plots={name: Markup(place) for name, place in placed.items()},
        key=[(NAMES[part], COLOURS[part]) for part in NAMES],
        resources=Markup(Resources(mode="inline", components=["bokeh"]).render()),
        script=Markup(script),
        paint=Markup((package / "paint.js").read_text(encoding="utf-8")),
        version=__version__,
    )


# One run.


def _section(seen: Seen, plots: dict[str, Figure], prefix: str) -> Section:
    run, course = seen.run, seen.course
    limits, predictions = limits_of(facts_of(run, course)), read_predictions(run.folder)
    section = Section(seen.name, _about(run), _tiles(run, course), limits, predictions)
    shared = time_range(run.seconds)  # zoomed together
    rows, rounds = rows_of(run), round_rows_of(run)
    if rows.first[-1]:
        section.timeline = f"{prefix}-timeline"
        plots[section.timeline] = timeline_figure(rows, rounds, shared, run.delay_bound == 0, sorted(run.ranks))
        section.timeline_note = _timeline_note(rows.joined, rounds.joined)
    for figures, places in (
        (_figures(seen, shared), section.plots),
        (predicted_figures(predictions), section.predicted),
    ):
        named = {f"{prefix}-{name}": plot for name, plot in figures.items()}
        plots |= named
        places += named
    section.tables = [table for table in (_ranks(run), _decisions(run), _events(run)) if table.rows]
    section.recipe = yaml.safe_dump(run.recipe, sort_keys=False) if run.recipe else ""
    return section


def _about(run: Run) -> str:
    summary = run.summary
    model, data = (run.asked(part, "name", str) for part in ("model", "data"))
    ranks = summary.get("ranks", len(run.ranks))
    told = [
        f"{model} on {data}" if model and data else None,
        f"{ranks} rank{'s' if ranks != 1 else ''}",
        "simulated" if summary.get("simulated") else None,
        f"devices emulated by {summary['emulate']}" if summary.get("emulate") else None,
        summary.get("plane"),
        f"began {run.time_of_day(0.0)}" if run.time_of_day(0.0) else None,
        f"{len(run.stretches)} starts" if len(run.stretches) > 1 else None,
        str(run.folder),
    ]
    return " · ".join(filter(None, told))


def _tiles(run: Run, course: Course) -> list[Tile]:
    summary = run.summary
    efficiency = efficiency_of(run, course)
    expected = summary.get("samples_expected")
    staleness = summary.get("staleness")
    tiles = [
        Tile("status", "status", str(summary.get("status", "no summary"))),
        Tile("efficiency", "efficiency", "not measured" if efficiency is None else f"{efficiency:.3f}"),
        Tile("samples", "samples" + (f" of {expected:,}" if expected else ""), f"{_samples(run, course):,.0f}"),
        Tile("seconds", "time of the run", duration(run.seconds)),
    ]
    if "samples_per_second" in summary:
        tiles.insert(2, Tile("samples_per_second", "samples a second", f"{summary['samples_per_second']:,.1f}"))
    if (of_solo := summary.get("solo_fraction")) is not None:
        interval = summary.get("solo_fraction_interval")
        between = f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval and interval[0] != interval[1] else ""
        tiles.append(Tile("solo_fraction", f"of what the ranks reach alone{between}", f"{of_solo:.3f}"))
    if staleness:
        bound = summary.get("delay_bound")
        name = f"mean staleness in rounds, at most {staleness['max']} (D = {'none' if bound is None else bound})"
        tiles.append(Tile("staleness", name, f"{staleness['mean']:.2f}"))
    return tiles + [Tile(f"metric-{name}", name, f"{value:.4f}") for name, value in summary.get("metrics", {}).items()]


def _samples(run: Run, course: Course) -> float:
    if run.summary.get("status") in ("finished", "stopped") and "samples_applied" in run.summary:
        return float(run.summary["samples_applied"])
    return float(course.samples.sum())


def _timeline_note(joined: int, rounds_joined: int) -> str:
    note = (
        "Drag to zoom, with the hand to move; the arrows reset. Zoomed out, neighbours are drawn together, their parts"
        " one above the other; the strip below each rank is communication, beside computing."
    )
    kinds = [f"{several} {what}" for several, what in ((joined, "tasks"), (rounds_joined, "rounds")) if several > 1]
    if kinds:
        note += f" To keep the page small, up to {' and '.join(kinds)} are one row; the run's telemetry has more."
    return note


def _figures(seen: Seen, shared: Any) -> dict[str, Figure]:
    run, course = seen.run, seen.course
    middles = course.middles
    time = {"x_label": CLOCK_LABEL, "x_range": shared, "of_time": True}
    found: dict[str, Figure] = {}

    def draw(name: str, title: str, lines: Sequence[Line], **options: Any) -> None:
        if any(np.isfinite(line.y).any() for line in lines):
            found[name] = lines_figure(title, lines, name=name, **options)

    line = Line("efficiency", middles, course.efficiency)
    draw("efficiency", "Efficiency", [line], **time, from_zero=True, reference=1.0)
    line = Line("of solo rates", middles, course.of_solo, course.low, course.high)
    draw("solo-fraction", "Part of what the ranks reach alone", [line], **time, from_zero=True, reference=1.0)
    stale = [Line("mean staleness", middles, course.staleness)]
    draw("staleness", "Staleness, in rounds", stale, **time, from_zero=True)
    draw("loss", "Training loss", [Line("training loss", middles, course.loss)], **time)
    draw("loss-by-samples", "Training loss, by samples", [_loss(seen, "training loss")], x_label=SAMPLES)
    for metric in _metrics(run):
        by_samples, by_seconds = _metric(seen, metric, metric)
        draw(f"metric-{metric}", f"Evaluated: {metric}", [by_seconds], x_label="seconds of training")
        draw(f"metric-{metric}-by-samples", f"Evaluated: {metric}, by samples", [by_samples], x_label=SAMPLES)
    speeds = [Line(f"rank {rank}", middles, speed) for rank, speed in course.speeds.items()]
    shares = [Line(f"rank {rank}", middles, share) for rank, share in course.shares.items()]
    draw("speeds", "Samples a second of computing", speeds, **time, from_zero=True)
    draw("shares", "Shares: samples a slice", shares, **time, from_zero=True)
    if histogram := run.summary.get("staleness", {}).get("histogram"):
        found["histogram"] = bars_figure("Contributions by staleness", histogram, "rounds", "histogram")
    if _decided(run):
        at = np.array([setting.at for setting in run.settings] + [run.seconds])
        accumulations = [setting.accumulation for setting in run.settings]
        bounds = [np.nan if setting.delay_bound is None else setting.delay_bound for setting in run.settings]
        steps = [Line(name, at, np.array([*y, y[-1]]), steps=True) for name, y in (("K", accumulations), ("D", bounds))]
        draw("settings", "Accumulation and delay bound", steps, **time, from_zero=True)
    return found


def _loss(seen: Seen, name: str) -> Line:
    return Line(name, np.cumsum(seen.course.samples), seen.course.loss)


def _metrics(run: Run) -> list[str]:
    """Names of those with a course to draw: infinities have no place, and a single evaluation is told by tiles."""
    known = ("kind", "at", "samples_applied", "train_seconds")
    evaluations = run.told("evaluation")
    if len(evaluations) < 2:
        return []
    told = ((name, value) for record in evaluations for name, value in record.items() if name not in known)
    return sorted({name for name, value in told if _drawable(value)})


def _drawable(value: Any) -> bool:
    return value is not None and bool(np.isfinite(float(value)))


def _metric(seen: Seen, metric: str, name: str) -> tuple[Line, Line]:
    """By samples, and by seconds of training."""
    told = [record for record in seen.run.told("evaluation") if _drawable(record.get(metric))]
    values = np.array([record[metric] for record in told], dtype=float)
    samples, seconds = (np.array([record[key] for record in told]) for key in ("samples_applied", "train_seconds"))
    return Line(name, samples, values), Line(name, seconds, values)


# Its tables.


def _ranks(run: Run) -> Table:
    heads = (
        "rank",
        "host",
        "device",
        "share",
        "samples",
        "alone /s",
        "computing",
        "waiting",
        "loading",
        "communicates",
    )
    rows, told = [], run.rows
    for rank, lines in sorted(run.ranks.items()):
        profile = told.get(rank) or next(iter(lines.of("profile")[-1:]), {})
        tasks = lines.tasks
        seconds = max(run.seconds, 1e-9)
        parts = [tasks[f"{part}_seconds"].sum() / seconds for part in ("compute", "wait", "data")]
        fractions = [profile.get(f"{part}_fraction") for part in ("compute", "wait", "data")]
        if None not in fractions and len(run.stretches) == 1:  # not of one that has died
            parts = fractions
        alone = profile.get("solo_samples_per_second")
        rows.append(
            [
                str(rank),
                profile.get("host") or "",
                profile.get("device") or "",
                str(profile.get("share", "")),
                f"{tasks['samples'].sum():,.0f}",
                "" if alone is None else f"{alone:,.1f}",
                *(f"{part:.1%}" for part in parts),
                f"{lines.rounds['seconds'].sum() / seconds:.1%}",
            ]
        )
    started = run.summary.get("ranks_at_start", run.summary.get("ranks", len(rows)))
    note = "" if rows and len(rows) >= started else "Not every rank has left its telemetry."
    return Table("ranks", "Ranks", heads, rows, numbers=heads[3:], note=note)


def _decided(run: Run) -> list[Setting]:
    return [setting for setting in run.settings if setting.reason is not None]


def _decisions(run: Run) -> Table:
    rows = []
    for setting in _decided(run):
        bound = "none" if setting.delay_bound is None else setting.delay_bound
        rows.append([_moment(run, setting.at), *map(str, (setting.accumulation, bound, setting.reason))])
    heads = ("when", "K", "D", "why")
    return _listed("decisions", "Decisions on K and D", heads, rows, numbers=("K", "D"))


def _events(run: Run) -> Table:
    """What did not go its usual way, and rests."""
    found = [(stretch.begin, "all", "the job was started again") for stretch in run.stretches[1:]]
    for rank, lines in run.ranks.items():
        for record in lines.of("rest"):
            if rank == run.leader_at(record["at"]):  # all tell it
                reason, seconds = record["reason"], record["seconds"]
                found.append((record["at"] - seconds, "all", f"at rest ({reason}, {seconds:.2f} s)"))
        for record in lines.others:
            if (what := _befallen(record)) is not None:
                who = "all" if record["kind"] == "rollback" else str(record.get("rank", rank))
                found.append((record["at"], who, what))
    if run.summary.get("status") == "running":
        found.append((run.seconds, "all", "the last line so far: the job is under way, or has died"))
    if run.unreadable:
        found.append((run.seconds, "", f"lines of telemetry that cannot be read, and are left out: {run.unreadable}"))
    rows = [[_moment(run, at), who, what] for at, who, what in sorted(found, key=lambda event: event[0])]
    return _listed("events", "Failures, resumes and rests", ("when", "rank", "what"), rows)


def _befallen(record: Record) -> str | None:
    """What a record tells of mishaps, and of how the others went on."""
    match record:
        case {"kind": "failure", "error": error}:
            return f"failed: {error}"
        case {"kind": "control", "died": died}:
            return f"the controller {died}"
        case {"kind": "death"}:
            back = record.get("samples_returned")
            return outlived(record) + (f", and {back:,} samples of it went out again" if back else "")
        case {"kind": "join", "round": number}:
            host = f", on {record['host']}," if record.get("host") else ""
            return f"another process{host} took its place from round {number} on"
        case {"kind": "damage", "round": number}:
            after = record.get("recovered_seconds")
            told = f"a message of it came damaged or not at all: round {number} began anew"
            return told + ("" if after is None else f", after {after:.2f} s")
        case {"kind": "left_out", "round": number, "samples": samples}:
            return f"gradients were not finite in round {number}: its {samples:,} samples were left out"
        case {"kind": "rollback", "samples": samples, "checkpoint_samples": there}:
            again = f"{samples:,} samples were trained on again"
            return f"back to the checkpoint of {there:,} samples, as {_cause(record)}: {again}"
    return None


def _cause(rollback: Record) -> str:
    if rollback.get("cause") == "books_lost":
        return "all ranks that kept the books had died"
    if rollback.get("told"):
        return str(rollback["told"])
    return f"gradients of rank {rollback['rank']} were not finite in round {rollback['round']}"


def _listed(name: str, title: str, heads: Sequence[str], rows: list[list[str]], numbers: Sequence[str] = ()) -> Table:
    """With no more rows than a page bears."""
    more = len(rows) - MOST_LISTED
    note = f"The last {MOST_LISTED} of {len(rows):,}; telemetry has all." if more > 0 else ""
    return Table(name, title, heads, rows[-MOST_LISTED:], numbers, note)


def _moment(run: Run, second: float) -> str:
    told = run.time_of_day(second)
    return f"{second:,.1f} s" + (f" ({told})" if told else "")


# Several runs.


def _comparison(seen: Sequence[Seen], plots: dict[str, Figure]) -> dict[str, Any]:
    drawn: dict[str, Figure] = {}
    efficiency = [Line(s.name, s.course.middles, s.course.efficiency) for s in seen]
    if any(np.isfinite(line.y).any() for line in efficiency):
        drawn["efficiency"] = lines_figure(
            "Efficiency", efficiency, CLOCK_LABEL, of_time=True, from_zero=True, reference=1.0
        )
    learning = [s for s in seen if np.isfinite(s.course.loss).any()]
    if learning:
        by_time = [Line(s.name, s.course.middles, s.course.loss) for s in learning]
        drawn["loss"] = lines_figure("Training loss", by_time, CLOCK_LABEL, of_time=True)
        drawn["loss-by-samples"] = lines_figure(
            "Training loss, by samples", [_loss(s, s.name) for s in learning], SAMPLES
        )
    for metric in sorted({metric for s in seen for metric in _metrics(s.run)}):
        lines = [_metric(s, metric, s.name) for s in seen if metric in _metrics(s.run)]
        drawn[f"metric-{metric}"] = lines_figure(
            f"Evaluated: {metric}", [line for _, line in lines], "seconds of training"
        )
        drawn[f"metric-{metric}-by-samples"] = lines_figure(
            f"Evaluated: {metric}, by samples", [line for line, _ in lines], SAMPLES
        )
    plots |= {f"compared-{name}": plot for name, plot in drawn.items()}
    return {"table": _compared(seen), "plots": [f"compared-{name}" for name in drawn]}


def _compared(seen: Sequence[Seen]) -> Table:
    metrics = sorted({name for s in seen for name in s.run.summary.get("metrics", {})})
    heads = ("run", "status", "ranks", "D", "K", "efficiency", "samples/s", "seconds", *metrics)
    rows = []
    for each in seen:
        summary = each.run.summary
        efficiency = efficiency_of(each.run, each.course)
        rate = summary.get("samples_per_second")
        bound = summary.get("delay_bound", each.run.delay_bound)
        rows.append(
            [
                each.name,
                str(summary.get("status", "")),
                str(summary.get("ranks", len(each.run.ranks))),
                "none" if bound is None else str(bound),
                str(each.run.accumulation),
                "" if efficiency is None else f"{efficiency:.3f}",
                "" if rate is None else f"{rate:,.1f}",
                f"{each.run.seconds:,.1f}",
                *(f"{summary['metrics'][name]:.4f}" if name in summary.get("metrics", {}) else "" for name in metrics),
            ]
        )
    return Table("comparison", "Compared", heads, rows, numbers=heads[2:])
