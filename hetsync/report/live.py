"""Who is slow in a run and why, from the newest lines of its ranks' telemetry, while they are being written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetsync.report.lines import LineReader, Record
from hetsync.report.run import telemetry_of
from hetsync.report.summary import read_summary

WINDOW_SECONDS = 30.0  # of a rank's newest lines
TAIL_BYTES = 2**17  # of a file: so much is read at first
SILENT_SECONDS = 30.0
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
    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.path = path
        self.profile: Record = {}
        self._lines = LineReader(path, TAIL_BYTES)
        self._recent: deque[Record] = deque()
        self.ending: str | None = None
        if (record := self._lines.passed_over("start", "profile")) is not None:
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
            self.ending = None
        elif kind == "profile":
            self.profile = record
        elif kind == "failure":
            self.ending = f"failed: {record['error']}"
        elif kind in ("piece", "round", "score", "rest"):
            self._recent.append(record)
            while self._recent[0]["at"] < record["at"] - max(WINDOW_SECONDS, 3 * _covered(record)):
                self._recent.popleft()

    def row(self, now: float, over: bool) -> Row:
        tasks = [record for record in self._recent if record["kind"] == "piece"]
        written = self.path.stat().st_mtime if self.path.is_file() else now
        silent = 0.0 if over else max(0.0, now - written - max(map(_covered, self._recent), default=0.0))
        figures = _figures(tasks, self.profile)
        told = [record.get("staleness") for record in self._recent if record["kind"] == "round"]
        stale = [value for value in told if value is not None]
        place = ", ".join(filter(None, (self.profile.get("host"), self.profile.get("device"))))
        return Row(
            rank=self.rank,
            place=place,
            **figures,
            staleness=sum(stale) / len(stale) if stale else None,
            silent_seconds=silent,
            why=self.ending or _why(figures, silent),
        )


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
        telemetry_of(folder)

    @property
    def over(self) -> bool:
        """Nothing more will be written, as far as the folder tells: a killed job tells nothing."""
        return self._closed or self._failed or self._silent_seconds > DEAD_SECONDS

    @property
    def _closed(self) -> bool:
        return self.summary.get("status") in ("finished", "stopped")

    @property
    def _failed(self) -> bool:
        return self.summary.get("status") == "failed" or any(rank.ending for rank in self._ranks.values())

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
        ranks = int(self.summary.get("ranks", len(self._ranks)))  # those of an earlier start may be gone
        rows = [self._ranks[rank].row(now, self._closed) for rank in sorted(self._ranks) if rank < ranks]
        self._silent_seconds = min((row.silent_seconds for row in rows), default=0.0)
        return rows

    def progress(self) -> str:
        """The newest line of the figures that rank 0 keeps, in a sentence."""
        status = self.summary.get("status", "no summary")
        if not self._closed and self.over:
            status = "failed" if self._failed else "has died, as it seems"
        expected = self.summary.get("samples_expected")
        latest = _latest_metrics(self.folder / "metrics.csv")
        if self._closed or latest is None or not expected:
            return f"{status}: {self.summary.get('samples_applied', 0):,} of {expected or 0:,} samples"
        return f"{status}: {latest:,.0f} of {expected:,} samples"


def _latest_metrics(path: Path) -> float | None:
    """Samples in the last whole line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            whole = file.read().rpartition(b"\n")[0]
        return float(whole.rpartition(b"\n")[2].partition(b",")[0])
    except (OSError, ValueError):
        return None
