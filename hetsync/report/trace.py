"""A run's timeline in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetsync.files import json_text
from hetsync.report.run import RankLines, Run

MAIN, COMMUNICATION = 0, 1  # threads of a rank, which is a process there
Event = dict[str, Any]


def trace_of(run: Run) -> str:
    """JSON; times are in microseconds of the run's clock."""
    events = [event for rank in sorted(run.ranks) for event in _rank(run, rank)]
    other = {"run": str(run.folder), "status": run.summary.get("status"), "began": run.time_of_day(0.0)}
    return json_text({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _rank(run: Run, rank: int) -> Iterator[Event]:
    lines = run.ranks[rank]
    profile = next(iter(lines.of("profile")), {})
    place = ", ".join(filter(None, (profile.get("host"), profile.get("device"))))
    yield _named("process_name", rank, MAIN, f"rank {rank}" + (f" ({place})" if place else ""))
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": MAIN, "args": {"sort_index": rank}}
    yield _named("thread_name", rank, MAIN, "main")
    yield _named("thread_name", rank, COMMUNICATION, "communication")
    yield from _tasks(lines, rank, run.delay_bound == 0)
    yield from _rounds(lines, rank)
    for record in lines.of("rest", "score"):
        name = f"rest: {record['reason']}" if record["kind"] == "rest" else "evaluation"
        yield _slice(rank, MAIN, name, record["at"] - record["seconds"], record["seconds"], {})
    for record in lines.of("rounds_change", "control", "failure", "evaluation"):
        args = {key: value for key, value in record.items() if key not in ("kind", "at")}
        yield _instant(rank, record["kind"], record["at"], args)


def _tasks(lines: RankLines, rank: int, synchronous: bool) -> Iterator[Event]:
    """The parts of each, one after the other; ranks wait before a task at D ≥ 1, after it at D = 0."""
    names = ("loading", "computing", "waiting") if synchronous else ("waiting", "loading", "computing")
    of = {"loading": "data_seconds", "computing": "compute_seconds", "waiting": "wait_seconds"}
    tasks = {name: column.tolist() for name, column in lines.tasks.items()}
    for number, (begin, end) in enumerate(zip(tasks["begin"], tasks["end"], strict=True)):
        parts = [(name, tasks[of[name]][number]) for name in names]
        at = max(begin, end - sum(seconds for _, seconds in parts))
        args = {name: tasks[name][number] for name in ("samples", "slices", "tasks")}
        for name, seconds in parts:
            if seconds > 0:
                yield _slice(rank, MAIN, name, at, seconds, args if name == "computing" else {})
            at += seconds


def _rounds(lines: RankLines, rank: int) -> Iterator[Event]:
    rounds = {name: column.tolist() for name, column in lines.rounds.items()}
    for end, seconds, count, stale in zip(*(rounds[n] for n in ("end", "seconds", "rounds", "staleness")), strict=True):
        args = {"rounds": count} if stale != stale else {"rounds": count, "staleness": stale}  # nan: gave nothing
        yield _slice(rank, COMMUNICATION, "round", end - seconds, seconds, args)


def _named(what: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(rank: int, thread: int, name: str, begin: float, seconds: float, args: dict[str, Any]) -> Event:
    ts, dur = round(max(0.0, begin) * 1e6, 1), round(seconds * 1e6, 1)
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": ts, "dur": dur, "args": args}


def _instant(rank: int, name: str, at: float, args: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "p", "name": name, "pid": rank, "tid": MAIN, "ts": round(at * 1e6, 1), "args": args}
