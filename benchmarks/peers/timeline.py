"""What each rank did over wall time: (kind, start, stop), in seconds on a clock that all ranks share.

`compute` is the device's slice, `wait` a main thread that stands still in a collective or for want of work, `sum` a
collective under way on this rank, from its first bucket on, whatever else the rank does meanwhile, and `rest` its part
of an evaluation with all that belongs to it. What is in none of them is the host's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plots import headless_pyplot

Interval = tuple[str, float, float]
Timeline = Sequence[Interval]  # of one rank
Bar = Mapping[str, Any]  # a job's: workload, cluster, title, peer, batch_seconds, ranks (a timeline each)

COLOURS = {"compute": "tab:blue", "wait": "tab:red", "rest": "lightgray", "sum": "black"}
BATCHES_SHOWN = 12


def from_telemetry(lines: Iterable[Mapping[str, Any]], synchronous: bool) -> list[Interval]:
    """One rank's intervals from a HetSync run's telemetry, from its first slice on.

    Ranks leave a barrier together before that, which puts them on one clock. A synchronous round's line says when its
    work began, not its sum: there only the wait for the sum is told.
    """
    found: list[Interval] = []
    origin: float | None = None
    for line in lines:
        kind, at = line["kind"], line["at"]
        if kind == "piece":
            compute, data, wait = (line[f"{name}_seconds"] for name in ("compute", "data", "wait"))
            if origin is None:
                origin = at - compute - data - wait
            # Synchronous ranks wait after they have computed, the others before.
            end = at - wait if synchronous else at
            found.append(("compute", end - compute, end))
            waited = (end, at) if synchronous else (end - compute - data - wait, end - compute - data)
            found.append(("wait", *waited))
            if synchronous:
                found.append(("sum", *waited))
        elif kind == "round" and not synchronous:
            found.append(("sum", at - line["seconds"], at))
        elif kind in ("score", "rest"):
            found.append(("rest", at - line["seconds"], at))
    return shifted(found, origin or 0.0)


def shifted(timeline: Timeline, origin: float) -> list[Interval]:
    """The same from `origin` on, to a tenth of a millisecond, without what is shorter."""
    moved = [(kind, round(start - origin, 4), round(stop - origin, 4)) for kind, start, stop in timeline]
    return [interval for interval in moved if interval[2] > interval[1]]


def total(timeline: Timeline, kind: str) -> float:
    """Seconds of one kind."""
    return sum(stop - start for name, start, stop in timeline if name == kind)


def half_way(timeline: Timeline) -> float:
    """When the evaluation in the middle of the job began (an event half-way comes about then)."""
    rests = [start for kind, start, _ in timeline if kind == "rest"]
    return rests[(len(rests) - 1) // 2]


def plot(bars: Sequence[Bar], path: Path) -> None:
    """A stretch of one cluster's jobs, a panel each, a line a rank, rank 0 on top."""
    pyplot = headless_pyplot()
    heights = [0.13 * len(bar["ranks"]) + 0.45 for bar in bars]
    figure, axes = pyplot.subplots(
        len(bars), 1, figsize=(9, sum(heights) + 0.6), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, bar in zip(axes[:, 0], bars, strict=True):
        draw(axis, bar)
    axes[-1, 0].set_xlabel("seconds from the middle of the job on", fontsize=8)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    names = ("computing", "waiting", "evaluating", "a sum under way")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=7)
    figure.suptitle(f"{bars[0]['workload']}, {bars[0]['title']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(axis: Any, bar: Bar) -> None:
    middle, length = half_way(bar["ranks"][0]), BATCHES_SHOWN * bar["batch_seconds"]
    for rank, timeline in enumerate(bar["ranks"]):
        for kind, colour in COLOURS.items():
            spans = [(start - middle, stop - start) for name, start, stop in timeline if name == kind]
            below = kind == "sum"
            axis.broken_barh(spans, (rank + 0.72, 0.14) if below else (rank, 0.66), facecolors=colour)
    axis.set_xlim(-length / 4, 3 * length / 4)
    axis.set_ylim(len(bar["ranks"]), 0)
    axis.set_yticks([])
    axis.tick_params(labelsize=7)
    axis.set_ylabel(bar["peer"], rotation=0, ha="right", va="center", fontsize=7)
