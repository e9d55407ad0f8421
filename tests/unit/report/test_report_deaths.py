"""Runs that have outlived deaths, and whose ranks were replaced: who was there when, and who has told it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import Record, death, start, task, tasks, write_lines, write_summary

from hetsync.report.facts import facts_of
from hetsync.report.run import Run, read_run
from hetsync.report.series import Course, course_of

LATER, RESUMED = "2026-11-02T14:00:05+00:00", "2026-11-02T15:00:00+00:00"


def seen(folder: Path) -> tuple[Run, Course]:
    run = read_run(folder)
    return run, course_of(run)


def assert_all_at_work(course: Course) -> None:
    """But for the bins in which a rank has gone, or come."""
    assert course.of_solo == pytest.approx(np.ones(len(course.of_solo)), abs=0.1)
    assert np.median(course.of_solo) == pytest.approx(1.0)


def test_a_rank_counts_until_its_death(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(100), death(5.0, 1)])
    write_lines(tmp_path, 1, [*start(), *tasks(50)])
    assert_all_at_work(seen(tmp_path)[1])


def test_whoever_takes_its_place_counts_from_its_own_profile(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(150), death(5.0, 1)])
    again = [*start("2026-11-02T14:00:10+00:00", solo_samples_per_second=50.0), *tasks(25, compute=0.2)]
    write_lines(tmp_path, 1, [*start(), *tasks(50), *again])
    assert_all_at_work(seen(tmp_path)[1])


def test_a_number_counts_once_where_nobody_has_told_its_death(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(100)])
    write_lines(tmp_path, 1, [*start(), *tasks(50), *start(LATER), *tasks(50)])
    assert_all_at_work(seen(tmp_path)[1])


def test_a_rank_counts_only_for_the_starts_that_it_was_in(tmp_path: Path) -> None:
    for rank in range(2):
        write_lines(tmp_path, rank, [*start(), *tasks(50)])
    write_lines(tmp_path, 0, [death(5.0, 1), *start(RESUMED), *tasks(50)])
    run, course = seen(tmp_path)
    assert_all_at_work(course)
    assert [round(life.end) for life in run.lives] == [5, 10, 5]


def test_rests_are_those_of_the_ranks_that_are_there(tmp_path: Path) -> None:
    """Half of the time after the death, of the one that is left."""
    rests = [{"kind": "rest", "at": 5.0 + at, "reason": "checkpoint", "seconds": 0.5} for at in range(1, 6)]
    work = [task(5.0 + 0.1 * n) for n in range(1, 51) if 0 < n % 10 <= 5]
    write_lines(tmp_path, 0, [*start(), *tasks(50), death(5.0, 1), *work, *rests])
    write_lines(tmp_path, 1, [*start(), *tasks(50)])
    run, course = seen(tmp_path)
    later = course.of_solo[course.edges[:-1] > 5.0]
    assert np.nanmean(later) == pytest.approx(1.0, abs=0.15)
    ((reason, part),) = facts_of(run, course).resting
    assert (reason, part) == ("checkpoint", pytest.approx(0.25))


def changed(at: float, accumulation: int) -> Record:
    return {"kind": "rounds_change", "at": at, "accumulation": accumulation, "reason": f"K = {accumulation}"}


def decided(at: float, accumulation: int) -> Record:
    return {"kind": "control", "at": at, "decision": {"accumulation": accumulation, "delay_bound": 8}, "reason": "so"}


def test_what_the_first_rank_has_told_its_successor_goes_on_with(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(30), changed(1.0, 2), *start(LATER, accumulation=4), *tasks(10)])
    write_lines(tmp_path, 1, [*start(), *tasks(60), death(3.0, 0), decided(4.0, 4), changed(5.5, 2)])
    write_lines(tmp_path, 0, start(RESUMED))
    write_lines(tmp_path, 1, start(RESUMED))
    settings = read_run(tmp_path).settings
    assert [(s.kind, s.accumulation, s.delay_bound) for s in settings] == [
        ("profile", 1, 4),
        ("rounds_change", 2, 4),
        ("control", 4, 8),
        ("rounds_change", 2, 8),
        ("profile", 1, 4),
    ]


def test_k_that_was_taken_back_stays_so_when_a_rank_is_replaced(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(accumulation=2), *tasks(30), changed(1.0, 1)])
    write_lines(tmp_path, 0, [*start(LATER), *tasks(30)])
    write_lines(tmp_path, 1, [*start(accumulation=2), *tasks(80), death(3.0, 0)])
    assert facts_of(*seen(tmp_path)).taken_back == {2}


def test_the_leading_rank_is_the_first_of_those_that_have_been_there_longest(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(30), *start(LATER), *tasks(50)])
    write_lines(tmp_path, 1, [*start(), *tasks(60), death(3.0, 0)])
    write_lines(tmp_path, 2, [*start(), *tasks(100), death(6.0, 1)])
    write_lines(tmp_path, 0, [*start(RESUMED), *tasks(10)])
    run = read_run(tmp_path)
    assert [run.leader_at(second) for second in (0.0, 2.9, 3.1, 5.5, 6.1, 9.9, 10.5)] == [0, 0, 1, 1, 2, 2, 0]


@pytest.mark.parametrize("lines", [[], tasks(10), start()])
def test_somebody_leads_where_little_is_known(tmp_path: Path, lines: list[Record]) -> None:
    write_summary(tmp_path)
    write_lines(tmp_path, 0, lines)
    assert read_run(tmp_path).leader_at(0.5) == 0


def failed_at(at: float, error: str) -> Record:
    return {"kind": "failure", "at": at, "error": error}


@pytest.mark.parametrize("status", ["running", "failed"])
def test_failures_of_earlier_starts_have_not_ended_the_run(tmp_path: Path, status: str) -> None:
    for rank in (0, 2):
        write_lines(tmp_path, rank, [*start(), *tasks(10), failed_at(1.0, "ValueError: odd")])
    for rank in range(2):
        write_lines(tmp_path, rank, [*start(RESUMED), *tasks(10)])
    write_summary(tmp_path, status=status, ranks=2)
    assert facts_of(*seen(tmp_path)).failed is None
    write_lines(tmp_path, 0, [failed_at(1.2, "LostError: rank 1 does not answer")])
    write_lines(tmp_path, 1, [failed_at(1.1, "ValueError: even")])
    assert facts_of(*seen(tmp_path)).failed == "ValueError: even", "the others' failures follow from the first"


def test_the_failure_of_one_whom_the_others_outlived_has_not_ended_the_run(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(60), death(1.0, 1, cause="silent")])
    write_lines(tmp_path, 1, [*start(), *tasks(10), failed_at(5.0, "CutOffError: excluded")])
    write_summary(tmp_path, ranks=2)
    assert facts_of(*seen(tmp_path)).failed is None


@pytest.mark.parametrize("living_first", [True, False])
def test_of_two_of_one_number_the_living_one_is_told(tmp_path: Path, living_first: bool) -> None:
    living: dict[str, Any] = {"rank": 0, "share": 12, "runtime_cpu_fraction": 0.25, "joined_at_round": 50}
    rows = [living, {"rank": 0, "share": 0, "left_at_round": 40}]
    write_summary(tmp_path, status="finished", per_rank=rows if living_first else rows[::-1])
    write_lines(tmp_path, 0, [*start(), *tasks(10), *start(LATER), *tasks(10)])
    run, course = seen(tmp_path)
    assert run.rows[0]["share"] == 12
    assert facts_of(run, course).ranks[0].runtime == 0.25
