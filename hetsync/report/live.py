"""Who is slow in a run and why, from the newest lines of its ranks' telemetry, while they are being written."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetsync.report.lines import LineReader, Record, began, outlived
from hetsync.report.run import telemetry_of
from hetsync.report.summary import read_summary

WINDOW_SECONDS = 30.0  # of a rank's newest lines
TAIL_BYTES = 2**17  # of a file: so much is read at first
SILENT_SECONDS = 30.0
SETTLED_SECONDS = 5.0  # without a line of the others, once a rank has failed
DEAD_SECONDS = 600.0  # without a line of any rank: run.timeout_seconds, as it comes
NOTABLE = 0.05  # part of the time
SLOW = 0.8  # of the speed when it was profiled


@dataclass(frozen=True)
class Row:
    """A rank lately. Parts are of its time; what is not known is None.

    Args:
        share: Samples a slice.
        rate: Samples a second.
        speed: Of its device while it computes, as a part of what was profiled.
        silent_seconds: Since its last line was due; 0 where the run is over.
        why: It is slow, in a few words; empty where it is not.
    """

    rank: int
    place: str
    share: int | None
    rate: float | None
    speed: float | None
    computing: float | None
    waiting: float | None
    loading: float | None
    staleness: float | None
    silent_seconds: float
    why: str


class _Rank:
    """Attributes:
    began: The moment of its newest start, in seconds since 1970; 0 where that is not told.
    failure: The moment, and the sentence.
    deaths: That it has told, as the leading rank: the newest of each rank, as `failure`.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.path = path
        self.profile: Record = {}
        self.began = 0.0
        self.failure: tuple[float, str] | None = None
        self.deaths: dict[int, tuple[float, str]] = {}
        self._lines = LineReader(path, TAIL_BYTES)
        self._recent: deque[Record] = deque()
        for record in self._lines.passed_over("start", "profile", "death"):
            self._take(record)

    @property
    def unreadable(self) -> int:
        return self._lines.unreadable

    def follow(self) -> None:
        for record in self._lines.read():
            self._take(record)

    def _take(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "start":  # begun again: at 0
            self._recent.clear()
            self.profile = {}
            self.began = began(record)
            self.failure = None
        elif kind == "profile":
            self.profile = record
        elif kind == "failure":
            self.failure = self.began + record["at"], f"failed: {record['error']}"
        elif kind == "death":
            self.deaths[record["rank"]] = self.began + record["at"], outlived(record)
        elif kind in ("piece", "round", "score", "rest"):
            self._recent.append(record)
            while self._recent[0]["at"] < record["at"] - max(WINDOW_SECONDS, 3 * _covered(record)):
                self._recent.popleft()

    @property
    def _place(self) -> str:
        return ", ".join(filter(None, (self.profile.get("host"), self.profile.get("device"))))

    def row(self, now: float, over: bool, failure: str | None) -> Row:
        tasks = [record for record in self._recent if record["kind"] == "piece"]
        written = self.path.stat().st_mtime if self.path.is_file() else now
        silent = 0.0 if over else max(0.0, now - written - max(map(_covered, self._recent), default=0.0))
        figures = _figures(tasks, self.profile)
        told = [record.get("staleness") for record in self._recent if record["kind"] == "round"]
        stale = [value for value in told if value is not None]
        return Row(
            rank=self.rank,
            place=self._place,
            **figures,
            staleness=sum(stale) / len(stale) if stale else None,
            silent_seconds=silent,
            why=failure or _why(figures, silent),
        )

    def last_row(self, why: str) -> Row:
        """Of one that is gone."""
        return Row(self.rank, self._place, **_figures([], {}), staleness=None, silent_seconds=0.0, why=why)


def _gone(ranks: Sequence[_Rank]) -> dict[int, str]:
    """Those that the others have outlived, and how: no process has begun in their place since."""
    told = sorted((at, dead, how) for rank in ranks for dead, (at, how) in rank.deaths.items())
    newest = {dead: (at, how) for at, dead, how in told}
    begins = {rank.rank: rank.began for rank in ranks}
    return {dead: how for dead, (at, how) in newest.items() if at > begins.get(dead, math.inf)}


def _failures(ranks: Sequence[_Rank]) -> dict[int, str]:
    """Those since a process has begun last: the others are of an earlier start, or the job has outlived them."""
    newest = max((rank.began for rank in ranks), default=0.0)
    return {rank.rank: rank.failure[1] for rank in ranks if rank.failure is not None and rank.failure[0] >= newest}


def _have_ended_it(failures: Container[int], living: Sequence[Row]) -> bool:
    """A failure ends the job, unless the others go on: its death may be told a little later."""
    silent = [row.silent_seconds for row in living if row.rank not in failures]
    return any(row.rank in failures for row in living) and min(silent, default=math.inf) > SETTLED_SECONDS


def _covered(record: Record) -> float:
    """Seconds of which the line tells, where it tells of several tasks."""
    since = record.get("since")
    return 0.0 if since is None else float(record["at"] - since)


def _figures(tasks: Sequence[Record], profile: Record) -> dict[str, Any]:
    if not tasks:
        nothing = ("rate", "speed", "computing", "waiting", "loading")
        return {"share": profile.get("share"), **dict.fromkeys(nothing)}
    sums = {name: sum(task[f"{name}_seconds"] for task in tasks) for name in ("compute", "wait", "data")}
    samples = sum(task["samples"] for task in tasks)
    first, last = tasks[0], tasks[-1]
    spent = sum(first[f"{name}_seconds"] for name in sums)
    seconds = max(last["at"] - first.get("since", first["at"] - spent), 1e-9)
    solo = profile.get("solo_samples_per_second")
    newest = next((task for task in reversed(tasks) if task["slices"]), None)
    return {
        "share": round(newest["samples"] / newest["slices"]) if newest else profile.get("share"),
        "rate": samples / seconds,
        "speed": samples / sums["compute"] / solo if solo and sums["compute"] else None,
        "computing": sums["compute"] / seconds,
        "waiting": sums["wait"] / seconds,
        "loading": sums["data"] / seconds,
    }


def _why(figures: dict[str, Any], silent: float) -> str:
    """What costs most comes first."""
    if silent > SILENT_SECONDS:
        return f"nothing written for {silent:.0f} s"
    told = []
    if figures["speed"] is not None and figures["speed"] < SLOW:
        told.append((1 - figures["speed"], f"its device runs at {figures['speed']:.0%} of its profile"))
    for name, what in (("waiting", "waits for others"), ("loading", "waits for data")):
        if figures[name] is not None and figures[name] >= NOTABLE:
            told.append((figures[name], what))
    return ", ".join(what for _, what in sorted(told, reverse=True))


def slowest(rows: Sequence[Row]) -> str | None:
    """Whom the others wait for: who waits far less than another; None where all wait alike, or hardly."""
    known = [(row.waiting, row.rank) for row in rows if row.waiting is not None]
    if len(known) < 2:
        return None
    least, rank = min(known)
    if max(known)[0] < max(NOTABLE, 2 * least):
        return None
    return f"slowest: rank {rank}, which waits {least:.0%} of its time, others up to {max(known)[0]:.0%}"


class LiveRun:
    """Attributes:
    folder: Of the run.
    summary: As it stands there now.
    """

    def __init__(self, folder: Path) -> None:
        """UserError where this is no run folder."""
        self.folder = folder
        self.summary: dict[str, Any] = {}
        self._ranks: dict[int, _Rank] = {}
        self._silent_seconds = 0.0  # of the rank that wrote last
        self._failed = False
        telemetry_of(folder)

    @property
    def over(self) -> bool:
        """Nothing more will be written, as far as the folder tells: a killed job tells nothing."""
        return self._closed or self._failed or self._silent_seconds > DEAD_SECONDS

    @property
    def _closed(self) -> bool:
        return self.summary.get("status") in ("finished", "stopped")

    @property
    def unreadable(self) -> int:
        """Lines so far that were no records."""
        return sum(rank.unreadable for rank in self._ranks.values())

    def rows(self, now: float | None = None) -> list[Row]:
        """Of all ranks that have written; `now` in seconds since 1970."""
        now = time.time() if now is None else now
        self.summary = read_summary(self.folder)
        for rank, path in telemetry_of(self.folder).items():
            if rank not in self._ranks:
                self._ranks[rank] = _Rank(rank, path)
            self._ranks[rank].follow()
        count = self.summary.get("ranks_at_start", self.summary.get("ranks", len(self._ranks)))
        ranks = [self._ranks[rank] for rank in sorted(self._ranks) if rank < count]  # others are of an earlier start
        gone, failures = _gone(ranks), _failures(ranks)
        living = [rank.row(now, self._closed, failures.get(rank.rank)) for rank in ranks if rank.rank not in gone]
        self._silent_seconds = min((row.silent_seconds for row in living), default=0.0)
        self._failed = self.summary.get("status") == "failed" or _have_ended_it(failures, living)
        rows = [*living, *(rank.last_row(gone[rank.rank]) for rank in ranks if rank.rank in gone)]
        return sorted(rows, key=lambda row: row.rank)

    def progress(self) -> str:
        """The newest line of the figures that rank 0 keeps, in a sentence."""
        status = self.summary.get("status", "no summary")
        if not self._closed and self.over:
            status = "failed" if self._failed else "has died, as it seems"
        expected = self.summary.get("samples_expected")
        latest = _latest_metrics(self.folder / "metrics.csv")
        applied = self.summary.get("samples_applied", 0) if self._closed or latest is None else latest
        return f"{status}: {applied:,.0f}{f' of {expected:,}' if expected else ''} samples"


def _latest_metrics(path: Path) -> float | None:
    """Samples in the last whole line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            whole = file.read().rpartition(b"\n")[0]
        return float(whole.rpartition(b"\n")[2].partition(b",")[0])
    except (OSError, ValueError):
        return None
