"""A run as its folder tells it: all ranks on one clock, over resumes."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetsync.config.checks import fits
from hetsync.config.yaml_files import read_yaml
from hetsync.errors import UserError, brief
from hetsync.files import RECIPE, SUMMARY
from hetsync.report.lines import LineReader, Record, began
from hetsync.report.summary import read_summary

Columns = dict[str, NDArray[np.float64]]

NAN = float("nan")
PIECE = ("samples", "slices", "compute_seconds", "data_seconds", "wait_seconds", "loss")
FIELDS = {
    "piece": ("at", "since", "tasks", *PIECE),
    "round": ("at", "since", "rounds", "contributions", "seconds", "staleness"),
}
DEFAULTS = dict.fromkeys(("tasks", "rounds", "contributions"), 1.0)  # the others: unknown
ROUNDING = 1e-6  # seconds; more than those since 1970 lose as floats


@dataclass(frozen=True)
class Stretch:
    """What one start of the job covers of the run's clock, which stands still between one's end and the next.

    Args:
        end: A moment after its last line, so that this is no line of the next.
        wall_clock: At its begin, in seconds since 1970; None for simulated runs, and those before format 2.
    """

    begin: float
    end: float
    wall_clock: float | None


@dataclass(frozen=True)
class Life:
    """A process as one of the ranks.

    Args:
        begin: That of the job's start, or, where it has taken the place of another, of training in it.
        end: At its death, or at that of the job's start.
        profile: Its record.
    """

    rank: int
    begin: float
    end: float
    profile: Record


@dataclass(frozen=True)
class Setting:
    """K and D from a moment on.

    Args:
        at: The moment, on the run's clock.
        kind: Of the record that told it: `profile` at a start, `accumulation` by rule, `control` by a controller.
        delay_bound: D; None: no bound.
        reason: None at a start.
    """

    at: float
    kind: str
    accumulation: int
    delay_bound: int | None
    reason: str | None


@dataclass
class RankLines:
    """Seconds are of the run's clock.

    Args:
        tasks: A column a field of `piece`, with `begin` and `end`.
        rounds: The same of `round`.
        others: Records of all other kinds.
    """

    tasks: Columns = field(default_factory=dict)
    rounds: Columns = field(default_factory=dict)
    others: list[Record] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Record]:
        return [record for record in self.others if record["kind"] in kinds]


@dataclass(frozen=True)
class Run:
    folder: Path
    summary: dict[str, Any]
    recipe: dict[str, Any]
    ranks: dict[int, RankLines]
    stretches: tuple[Stretch, ...]
    unreadable: int  # lines

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def seconds(self) -> float:
        return self.stretches[-1].end if self.stretches else 0.0

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """The summary's of each rank: where one has died and was replaced, the living one's."""
        told = sorted(self.summary.get("per_rank", []), key=lambda row: row.get("left_at_round") is None)
        return {row["rank"]: row for row in told}

    def told(self, *kinds: str) -> list[Record]:
        """By any rank, in the order of time. Most kinds only the leading rank tells: once it has died, another one."""
        return list(merge(*(lines.of(*kinds) for lines in self.ranks.values()), key=itemgetter("at")))

    @cached_property
    def lives(self) -> list[Life]:
        """None are known of simulated runs, and of those before format 2."""
        return [life for rank, lines in self.ranks.items() for life in self._lives(rank, lines.of("profile"))]

    def _lives(self, rank: int, profiles: list[Record]) -> list[Life]:
        found: list[Life] = []
        later = [profile["at"] for profile in profiles[1:]]
        for number, profile in enumerate(profiles):
            at = profile["at"]
            stretch = self.stretches[self.stretch_at(at)]
            begin = at if found and found[-1].begin >= stretch.begin else stretch.begin
            ends = [stretch.end, *later[number : number + 1], *(death for death in self.deaths[rank] if death > at)]
            found.append(Life(rank, begin, min(ends), profile))
        return found

    @cached_property
    def deaths(self) -> Mapping[int, list[float]]:
        """The moments of each rank's."""
        found: dict[int, list[float]] = defaultdict(list)
        for record in self.told("death"):
            found[record["rank"]].append(record["at"])
        return found

    def lives_at(self, second: float) -> list[Life]:
        return [life for life in self.lives if life.begin <= second < life.end]

    def leader_at(self, second: float) -> int:
        """The rank that has been there longest, the first of these."""
        there = [(life.begin, life.rank) for life in self.lives_at(second)]
        return min(there)[1] if there else min(self.ranks)

    @property
    def delay_bound(self) -> int | None:
        """At its start."""
        told = [record["delay_bound"] for lines in self.ranks.values() for record in lines.of("profile")]
        return told[0] if told else self.asked("sync", "delay_bound", int, self.summary.get("delay_bound"))

    @property
    def settings(self) -> list[Setting]:
        """Those of each start, and what was decided since, in the order of time."""
        found: list[Setting] = []
        bound = self.delay_bound
        for record in self._told_of_settings():
            if "died" not in record:
                told = record.get("decision", record)
                bound = told.get("delay_bound", bound)  # older runs' rule does not tell it
                found.append(Setting(record["at"], record["kind"], told["accumulation"], bound, record.get("reason")))
        return found

    def _told_of_settings(self) -> Iterable[Record]:
        """All ranks tell a profile: the first one's counts, unless it has only taken a dead one's place."""
        first = min(self.ranks, default=0)
        kinds = ("rounds_change", "control")
        told = (lines.of(*kinds, "profile") if n == first else lines.of(*kinds) for n, lines in self.ranks.items())
        for record in merge(*told, key=itemgetter("at")):
            if record["kind"] != "profile" or not self._is_replaced(first, record["at"]):
                yield record

    def _is_replaced(self, rank: int, second: float) -> bool:
        """Has it died before, in the same start of the job?"""
        begin = self.stretches[self.stretch_at(second)].begin
        return any(begin <= death < second for death in self.deaths[rank])

    @property
    def accumulation(self) -> int:
        """K at its end, or so far."""
        if "accumulation" in self.summary:
            told: int = self.summary["accumulation"]
            return told
        if settings := self.settings:
            return settings[-1].accumulation
        found: int = self.asked("sync", "accumulation", int, 1)
        return found

    def asked(self, section: str, key: str, kind: type, otherwise: Any = None) -> Any:
        """What the recipe says, where that is of the kind."""
        of_section = self.recipe.get(section)
        said = of_section.get(key) if isinstance(of_section, dict) else None
        return said if fits(said, kind) else otherwise

    def stretch_at(self, second: float) -> int:
        return max(0, sum(stretch.begin <= second for stretch in self.stretches) - 1)

    def time_of_day(self, second: float) -> str | None:
        """As this machine's clock shows it."""
        if not self.stretches:
            return None
        stretch = self.stretches[self.stretch_at(second)]
        if stretch.wall_clock is None:
            return None
        return datetime.fromtimestamp(stretch.wall_clock + second - stretch.begin).strftime("%Y-%m-%d %H:%M:%S")


def read_run(folder: Path) -> Run:
    """UserError where there is none."""
    paths = telemetry_of(folder)
    summary = read_summary(folder)
    recipe = read_yaml(folder / RECIPE, f"{folder / RECIPE}") if (folder / RECIPE).is_file() else {}
    reading = {rank: _Reading(LineReader(path)) for rank, path in paths.items()}
    ranks, stretches = _on_one_clock(reading)
    unreadable = sum(each.lines.unreadable for each in reading.values())
    return Run(folder, summary, recipe if isinstance(recipe, dict) else {}, ranks, stretches, unreadable)


def telemetry_of(folder: Path) -> dict[int, Path]:
    """By rank. UserError where this is no run folder."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {brief(folder)}: give one that a run has made, such as runs/digits-…")
    paths = sorted((folder / "telemetry").glob("rank-*.jsonl"))
    found = {int(number): path for path in paths if (number := path.stem.partition("-")[2]).isdigit()}
    if not found and not (folder / SUMMARY).is_file():
        raise UserError(f"{brief(folder)} holds no run: there is neither {SUMMARY} nor telemetry in it")
    return found


class _Reading:
    """One rank's file: columns as they come, with the number of the start that each line belongs to."""

    def __init__(self, lines: LineReader) -> None:
        self.lines = lines
        self.starts: list[float | None] = []  # wall clock of each
        self.ends: list[float] = []  # the last `at` of each
        self.others: list[tuple[int, Record]] = []
        self.columns = {kind: {name: array("d") for name in ("start", *FIELDS[kind])} for kind in FIELDS}
        for record in lines.read():
            try:
                self._take(record)
            except (KeyError, TypeError, ValueError, OverflowError):  # a time of day, or a loss, of somebody else's
                lines.unreadable += 1

    def _take(self, record: Record) -> None:
        kind, at = record["kind"], record["at"]
        if kind == "start" or not self.starts:
            self.starts.append(began(record) if kind == "start" else None)
            self.ends.append(at)
        number = len(self.starts) - 1
        self.ends[number] = max(self.ends[number], at)
        if kind in FIELDS:
            told = {name: record.get(name) for name in FIELDS[kind]}
            row = {name: DEFAULTS.get(name, NAN) if value is None else float(value) for name, value in told.items()}
            for name, value in {"start": float(number), **row}.items():
                self.columns[kind][name].append(value)
        else:
            self.others.append((number, record))


def _on_one_clock(reading: dict[int, _Reading]) -> tuple[dict[int, RankLines], tuple[Stretch, ...]]:
    stretches = _stretches(reading.values())
    return {rank: _shifted(each, stretches) for rank, each in reading.items()}, stretches


def _stretches(reading: Iterable[_Reading]) -> tuple[Stretch, ...]:
    """Times at which some rank had a job, joined where they overlap; between them nothing ran."""
    times: dict[bool, list[tuple[float, float]]] = defaultdict(list)
    for each in reading:
        for start, end in zip(each.starts, each.ends, strict=True):
            times[start is not None].append((start or 0.0, (start or 0.0) + end))
    found: list[Stretch] = []
    for told in (False, True):  # without a time of day: simulated, or before there was one
        for begin, end in _joined(times[told]):
            at = found[-1].end if found else 0.0
            found.append(Stretch(at, at + end - begin + ROUNDING, begin if told else None))
    return tuple(found)


def _joined(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(times):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _shifted(each: _Reading, stretches: Sequence[Stretch]) -> RankLines:
    shifts = np.array([_shift(start, stretches) for start in each.starts])
    lines = RankLines(others=[{**record, "at": record["at"] + shifts[number]} for number, record in each.others])
    lines.tasks = _columns(each.columns["piece"], shifts)
    tasks = lines.tasks
    spent = tasks["compute_seconds"] + tasks["data_seconds"] + tasks["wait_seconds"]
    _add_begin(tasks, spent)
    lines.rounds = _columns(each.columns["round"], shifts)
    _add_begin(lines.rounds, lines.rounds["seconds"])
    return lines


def _shift(start: float | None, stretches: Sequence[Stretch]) -> float:
    if start is None:
        return 0.0
    inside = [s for s in stretches if s.wall_clock is not None and s.wall_clock <= start]
    stretch = inside[-1]
    assert stretch.wall_clock is not None
    return stretch.begin + (start - stretch.wall_clock)  # exact where it begins the stretch


def _columns(columns: dict[str, array[float]], shifts: NDArray[np.float64]) -> Columns:
    found = {name: np.frombuffer(column, dtype=np.float64) for name, column in columns.items()}
    shift = shifts[found.pop("start").astype(int)] if len(shifts) else 0.0
    found["end"] = found.pop("at") + shift
    found["since"] = found["since"] + shift
    return found


def _add_begin(columns: Columns, spent: NDArray[np.float64]) -> None:
    """Of a line that tells of one, by what it took; of several, the end of the line before."""
    since = columns.pop("since")
    columns["begin"] = np.where(np.isnan(since), np.maximum(0.0, columns["end"] - spent), since)
