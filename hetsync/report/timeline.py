"""What each rank did when, in the form that the page draws: rows in order of time, neighbours joined where there are
too many for a page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetsync.report.run import Columns, RankLines, Run

MOST_ROWS = 150_000  # of a page; a row is 28 bytes there
MOST_ROUNDS = 100_000
PARTS = ("wait", "data", "compute", "rest")  # in the order in which a task has them at D ≥ 1; seconds of a row


@dataclass(frozen=True)
class Rows:
    """Of all ranks, one after the other.

    Args:
        columns: `begin`, `length`, and seconds of each part, of shape [rows].
        first: The place of each rank's first row, and of the end, [ranks + 1].
        joined: Tasks, rounds or rests that a row stands for at most.
    """

    columns: Columns
    first: list[int]
    joined: int


def rows_of(run: Run) -> Rows:
    """Tasks and rests."""
    return _rows([_tasks_and_rests(lines) for _, lines in sorted(run.ranks.items())], PARTS, MOST_ROWS)


def round_rows_of(run: Run) -> Rows:
    """Rounds under way."""
    ranks = [
        {"begin": lines.rounds["begin"], "end": lines.rounds["end"], "round": lines.rounds["seconds"]}
        for _, lines in sorted(run.ranks.items())
    ]
    return _rows(ranks, ("round",), MOST_ROUNDS)


def _tasks_and_rests(lines: RankLines) -> Columns:
    tasks, rests = lines.tasks, lines.of("rest", "score")
    seconds = np.array([record["seconds"] for record in rests])
    ends = np.array([record["at"] for record in rests])
    none, zero = np.zeros(len(rests)), np.zeros(len(tasks["end"]))
    return {
        "begin": np.concatenate((tasks["begin"], ends - seconds)),
        "end": np.concatenate((tasks["end"], ends)),
        **{part: np.concatenate((tasks[f"{part}_seconds"], none)) for part in PARTS[:-1]},
        "rest": np.concatenate((zero, seconds)),
    }


def _rows(ranks: list[Columns], parts: tuple[str, ...], most: int) -> Rows:
    joined = max(1, -(-sum(len(rank["end"]) for rank in ranks) // most))
    kept = [_joined(rank, parts, joined) for rank in ranks]
    names = ("begin", "length", *parts)
    columns = {name: np.concatenate([rank[name] for rank in kept] or [np.zeros(0)]) for name in names}
    for name in names[1:]:  # begins have microseconds of a week to tell
        columns[name] = columns[name].astype(np.float32)
    return Rows(columns, [0, *np.cumsum([len(rank["begin"]) for rank in kept]).tolist()], joined)


def _joined(rank: Columns, parts: tuple[str, ...], several: int) -> Columns:
    order = np.argsort(rank["begin"], kind="stable")
    starts = np.arange(0, len(order), several)
    begin = rank["begin"][order][starts]
    end = np.maximum.reduceat(rank["end"][order], starts) if len(starts) else begin
    sums = {part: np.add.reduceat(rank[part][order], starts) if len(starts) else begin for part in parts}
    return {"begin": begin, "length": end - begin, **sums}
