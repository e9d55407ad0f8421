"""The figures that a run's limits are told from."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from hetsync.report.limits import Facts, RankTime, Slowdown, slowed
from hetsync.report.run import RankLines, Run
from hetsync.report.series import Course, training_seconds


def facts_of(run: Run, course: Course) -> Facts:
    summary = run.summary
    seconds = float(training_seconds(run, course.edges).sum())
    runtime = {rank: row.get("runtime_cpu_fraction") for rank, row in run.rows.items()}
    return Facts(
        ranks=[_rank_time(rank, lines, seconds, runtime.get(rank)) for rank, lines in run.ranks.items()],
        slowdowns=_slowdowns(run, course),
        round_in_slices=_round_in_slices(run),
        delay_bound=_delay_bound(run, float(course.edges[-1])),
        accumulation=run.accumulation,
        taken_back=_taken_back(run),
        resting=_resting(run),
        overruns=summary.get("overrun_fraction", 0.0),
        efficiency=efficiency_of(run, course),
        failed=_failure(run) if summary.get("status") not in ("finished", "stopped") else None,
    )


def _delay_bound(run: Run, end: float) -> int | None:
    """That was in force for longest since the last start."""
    settings = run.settings
    if not settings:
        return run.delay_bound
    starts = [place for place, setting in enumerate(settings) if setting.kind == "profile"]
    settings = settings[starts[-1] if starts else 0 :]
    ends = [*(setting.at for setting in settings[1:]), end]
    seconds = [last - setting.at for setting, last in zip(settings, ends, strict=True)]
    return settings[seconds.index(max(seconds))].delay_bound


def _failure(run: Run) -> str | None:
    """The first since some rank has begun, from which the others' follow. Those whom the others outlive fail alone."""
    starts = {rank: [record["at"] for record in lines.of("start")] for rank, lines in run.ranks.items()}
    newest = max((at for told in starts.values() for at in told), default=0.0)
    found = [
        (record["at"], record["error"])
        for rank, lines in run.ranks.items()
        for record in lines.of("failure")
        if record["at"] >= newest and not any(death >= max(starts[rank], default=0.0) for death in run.deaths[rank])
    ]
    return min(found)[1] if found else None


def efficiency_of(run: Run, course: Course) -> float | None:
    """The summary's, or so far."""
    if "efficiency" in run.summary:
        told: float | None = run.summary["efficiency"]
        return told
    known = np.isfinite(course.efficiency)
    return float(np.mean(course.efficiency[known])) if known.any() else None


def _taken_back(run: Run) -> frozenset[int]:
    """K that the rule has lowered since the last start, and not come back to."""
    found: set[int] = set()
    for before, after in pairwise(run.settings):
        if after.kind != "rounds_change":
            found.clear()
        elif after.accumulation < before.accumulation:
            found.add(before.accumulation)
        else:
            found.discard(after.accumulation)
    return frozenset(found)


def _rank_time(rank: int, lines: RankLines, seconds: float, runtime: float | None) -> RankTime:
    tasks = lines.tasks
    seconds = max(seconds, 1e-9)
    return RankTime(rank, tasks["wait_seconds"].sum() / seconds, tasks["data_seconds"].sum() / seconds, runtime)


def _round_in_slices(run: Run) -> float | None:
    """Of medians over ranks of the ranks' own quotients."""
    found = []
    for lines in run.ranks.values():
        slices, rounds = lines.tasks["slices"].sum(), lines.rounds["rounds"].sum()
        if slices and rounds and (computing := lines.tasks["compute_seconds"].sum()):
            one = float(np.median(lines.rounds["seconds"] / lines.rounds["rounds"]))
            found.append(one / (computing / slices))
    return float(np.median(found)) if found else None


def _resting(run: Run) -> tuple[tuple[str, float], ...]:
    """By reason, in parts of the job's time, in the mean of the ranks that were there."""
    spent: dict[str, float] = defaultdict(float)
    for lines in run.ranks.values():
        for record in lines.of("rest", "score"):
            ranks = len(run.lives_at(record["at"])) or len(run.ranks)
            spent[record.get("reason", "evaluation")] += record["seconds"] / ranks
    spent.pop("end", None)
    return tuple((reason, seconds / max(run.seconds, 1e-9)) for reason, seconds in spent.items())


def _slowdowns(run: Run, course: Course) -> list[Slowdown]:
    found = [
        (number, Slowdown(rank, when(run, float(course.edges[number])), left))
        for rank, speeds in course.speeds.items()
        for number, left in slowed(list(speeds))
    ]
    return [slowdown for _, slowdown in sorted(found, key=lambda each: each[0])]


def when(run: Run, second: float) -> str:
    """To the minute, where there is a time of day."""
    told = run.time_of_day(second)
    return f"{second:.0f} s" if told is None else told.split()[1][:5]
