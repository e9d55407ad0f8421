"""Courses over a run's time: what was done in each of some equal bins, from lines that cover stretches of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetsync.report.run import Columns, Life, Run

Array = NDArray[np.float64]

MOST_BINS, FEWEST_BINS = 200, 8
TASKS_A_BIN = 5


@dataclass(frozen=True)
class Course:
    """Each of shape [bins], by rank where it is a mapping; nan where there was nothing.

    Args:
        edges: Of the bins, [bins + 1], in seconds of the run's clock.
        samples: Finished, of all ranks.
        efficiency: Against what the devices were capable of in that time.
        of_solo, low, high: Against what the ranks reach alone, with the interval by the scatter of the profiles.
        loss: Mean over samples.
        staleness: Mean.
        speeds: Samples a second of computing.
        shares: Samples a slice.
    """

    edges: Array
    samples: Array
    efficiency: Array
    of_solo: Array
    low: Array
    high: Array
    loss: Array
    staleness: Array
    speeds: Mapping[int, Array]
    shares: Mapping[int, Array]

    @property
    def middles(self) -> Array:
        return (self.edges[1:] + self.edges[:-1]) / 2


def course_of(run: Run) -> Course:
    edges = _edges(run)
    ranks = {rank: lines.tasks for rank, lines in run.ranks.items()}
    samples = {rank: spread(tasks, tasks["samples"], edges) for rank, tasks in ranks.items()}
    total = sum(samples.values(), np.zeros(len(edges) - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        solo, error = _solo(run, edges)
        trained = np.where(total.sum() > 0, total, np.nan)
        rate = trained / training_seconds(run, edges)
        of_solo = rate / solo
        speeds = {rank: samples[rank] / spread(t, t["compute_seconds"], edges) for rank, t in ranks.items()}
        told = [_losses(tasks, edges) for tasks in ranks.values()]
        stale = [_staleness(lines.rounds, edges) for lines in run.ranks.values()]
        return Course(
            edges=edges,
            samples=total,
            efficiency=rate / sum(map(np.nan_to_num, speeds.values()), np.zeros(len(edges) - 1)),
            of_solo=of_solo,
            low=of_solo / (1 + error),
            high=of_solo * (1 + error),
            loss=_quotient(told),
            staleness=_quotient(stale),
            speeds=speeds,
            shares={r: samples[r] / spread(t, t["slices"], edges) for r, t in ranks.items()},
        )


def _edges(run: Run) -> Array:
    """From the first task's begin to the last one's end."""
    tasks = [lines.tasks for lines in run.ranks.values() if len(lines.tasks["end"])]
    if not tasks:
        return np.array([0.0, max(run.seconds, 1e-9)])
    bins = int(np.clip(max(len(each["end"]) for each in tasks) / TASKS_A_BIN, FEWEST_BINS, MOST_BINS))
    begin, end = min(each["begin"].min() for each in tasks), max(each["end"].max() for each in tasks)
    return np.linspace(begin, max(end, begin + 1e-9), bins + 1)


def spread(columns: Columns, values: Array, edges: Array) -> Array:
    """How much of the values falls into each bin, where a line's spreads evenly from its begin to its end."""
    if not len(values):
        return np.zeros(len(edges) - 1)
    order = np.argsort(columns["end"], kind="stable")
    ends = columns["end"][order]
    begins = np.maximum(columns["begin"][order], np.concatenate(([-np.inf], ends[:-1])))
    sums = np.concatenate(([0.0], np.cumsum(np.nan_to_num(values[order]))))
    points = np.column_stack((begins, ends)).ravel()
    reached = np.column_stack((sums[:-1], sums[1:])).ravel()
    found: Array = np.diff(np.interp(edges, points, reached))
    return found


def training_seconds(run: Run, edges: Array) -> Array:
    """Seconds of each bin in which the clock of training went, in the mean of the ranks that were there."""
    off = np.zeros(len(edges) - 1)
    for lines in run.ranks.values():
        for record in lines.of("rest", "score"):
            begin, end = record["at"] - record["seconds"], record["at"]
            off += np.clip(np.minimum(end, edges[1:]) - np.maximum(begin, edges[:-1]), 0.0, None)
    there = _parts(run.lives, edges).sum(axis=0)
    return np.diff(edges) - off / np.where(there > 0, there, max(1, len(run.ranks)))


def _parts(lives: Sequence[Life], edges: Array) -> Array:
    """Of each bin, the part in which each was there, [lives, bins]."""
    bounds = np.array([(life.begin, life.end) for life in lives]).reshape(-1, 2)
    begins, ends = bounds[:, :1], bounds[:, 1:]
    found: Array = np.clip(np.minimum(ends, edges[1:]) - np.maximum(begins, edges[:-1]), 0.0, None) / np.diff(edges)
    return found


def _solo(run: Run, edges: Array) -> Array:
    """Samples/s that the ranks reach alone, and half of its interval as a part of it, [2, bins]: each by the part of a
    bin that it was there, or as in the summary where no lives are known."""
    parts = _parts(run.lives, edges)
    told = _sums_and_errors([life.profile for life in run.lives], parts)
    rows = [*run.rows.values()]
    return np.where((parts > 0).any(axis=0), told, _sums_and_errors(rows, np.ones((len(rows), 1))))


def _sums_and_errors(ranks: Sequence[Mapping[str, Any]], parts: Array) -> Array:
    """nan where it was not measured. Errors are added up: ranks of one machine err together."""
    told = [[rank.get(f"solo_{name}") for rank in ranks] for name in ("samples_per_second", "uncertainty")]
    rates, errors = np.array(told, dtype=np.float64)[:, :, np.newaxis]  # None becomes nan
    counted = np.where(parts > 0, rates * parts, 0.0)
    sums = np.where((parts > 0).any(axis=0), counted.sum(axis=0), np.nan)
    return np.array([sums, np.where(parts > 0, counted * errors, 0.0).sum(axis=0) / sums])


def _losses(tasks: Columns, edges: Array) -> tuple[Array, Array]:
    """Sums of the bins, and their samples."""
    known = ~np.isnan(tasks["loss"])
    kept = {name: column[known] for name, column in tasks.items()}
    return spread(kept, kept["loss"] * kept["samples"], edges), spread(kept, kept["samples"], edges)


def _staleness(rounds: Columns, edges: Array) -> tuple[Array, Array]:
    known = ~np.isnan(rounds["staleness"])
    counts = rounds["contributions"][known]
    at = rounds["end"][known]
    return (
        np.histogram(at, edges, weights=rounds["staleness"][known] * counts)[0],
        np.histogram(at, edges, weights=counts)[0],
    )


def _quotient(told: list[tuple[Array, Array]]) -> Array:
    if not told:
        return np.array([np.nan])
    sums, weights = (np.sum(each, axis=0) for each in zip(*told, strict=True))
    found: Array = np.where(weights > 1e-9, sums / weights, np.nan)
    return found
