"""The live table: from the newest lines of files that are being written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_folders import Record, death, round_of, start, task, tasks, write_lines, write_summary

from hetsync.report.facts import facts_of
from hetsync.report.limits import limits_of
from hetsync.report.live import LiveRun, slowest
from hetsync.report.run import read_run
from hetsync.report.series import course_of

NOW = 1_000_000.0


def written(path: Path, seconds_ago: float = 1.0) -> None:
    os.utime(path, (NOW - seconds_ago, NOW - seconds_ago))


def test_a_rank_is_told_by_its_last_lines(tmp_path: Path) -> None:
    write_summary(tmp_path)
    before = tasks(600, compute=0.1)
    path = write_lines(tmp_path, 0, [*start(), *before, *tasks(80, 60.0, compute=0.5), round_of(100.0, staleness=3)])
    written(path)
    (row,) = LiveRun(tmp_path).rows(NOW)
    assert row.place == "node, cpu"
    assert (row.share, row.rate, row.speed) == (10, pytest.approx(20.0), pytest.approx(0.2))
    assert (row.computing, row.waiting, row.staleness) == (pytest.approx(1.0), 0.0, 3.0)
    assert row.why == "its device runs at 20% of its profile"


def test_it_goes_on_with_what_is_written_meanwhile(tmp_path: Path) -> None:
    write_summary(tmp_path, ranks=2)
    path = write_lines(tmp_path, 0, [*start(), *tasks(10)], torn='{"kind": "piece", "a')
    run = LiveRun(tmp_path)
    written(path)
    assert run.rows(NOW)[0].waiting == 0.0
    with path.open("a") as file:
        file.write('t": 1.05}\n'.replace('t": 1.05}', 't": 1.05, "kind": "other"}'))
    write_lines(tmp_path, 0, tasks(200, 1.05, compute=0.1, wait=0.1))
    write_lines(tmp_path, 1, [*start(), *tasks(5)])
    for each in (tmp_path / "telemetry").iterdir():
        written(each)
    first, second = run.rows(NOW)
    assert first.waiting == pytest.approx(0.5, abs=0.02)
    assert first.why == "waits for others"
    assert (second.rank, second.why) == (1, "")
    assert slowest([first, second]) == "slowest: rank 1, which waits 0% of its time, others up to 50%"


def test_the_greatest_cause_comes_first(tmp_path: Path) -> None:
    written(write_lines(tmp_path, 0, [*start(), *tasks(100, compute=0.5, wait=0.1, data=0.2)]))
    (row,) = LiveRun(tmp_path).rows(NOW)
    assert row.why == "its device runs at 20% of its profile, waits for data, waits for others"


def test_silence_is_told_while_the_run_is_under_way(tmp_path: Path) -> None:
    write_summary(tmp_path)
    path = write_lines(tmp_path, 0, [*start(), *tasks(10)])
    written(path, 90.0)
    assert LiveRun(tmp_path).rows(NOW)[0].why == "nothing written for 90 s"
    write_lines(tmp_path, 0, [task(70.0, 5.0, samples=500, slices=50, tasks=50, since=10.0)])
    written(path, 80.0)
    assert LiveRun(tmp_path).rows(NOW)[0].why == "", "a line a minute is all that is due"
    write_summary(tmp_path, status="finished")
    written(path, 900.0)
    assert LiveRun(tmp_path).rows(NOW)[0].why == ""


def test_a_failure_is_told_until_the_job_begins_again(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(10), {"kind": "failure", "at": 1.0, "error": "LostError: gone"}])
    run = LiveRun(tmp_path)
    assert run.rows()[0].why == "failed: LostError: gone"
    write_lines(tmp_path, 0, [*start(), *tasks(2)])
    assert run.rows()[0].why == ""


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsync.report.live.TAIL_BYTES", 5000)
    path = write_lines(tmp_path, 0, [*start(share=7), *tasks(5000)])
    assert path.stat().st_size > 500_000
    (row,) = LiveRun(tmp_path).rows()
    assert row.place == "node, cpu", "the profile stands at the file's begin"
    assert row.rate == pytest.approx(100.0)


def test_the_place_is_that_of_the_newest_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsync.report.live.TAIL_BYTES", 5000)
    monkeypatch.setattr("hetsync.report.lines.BLOCK_BYTES", 3000)
    resumed = start(host="other", solo_samples_per_second=200.0)
    write_lines(tmp_path, 0, [*start(), *tasks(200), *resumed, *tasks(200)])
    (row,) = LiveRun(tmp_path).rows()
    assert (row.place, row.speed) == ("other, cpu", pytest.approx(0.5))


@pytest.mark.parametrize("passed_over", [0, 200])
def test_before_a_start_has_a_profile_nothing_is_told_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_over: int
) -> None:
    monkeypatch.setattr("hetsync.report.live.TAIL_BYTES", 5000)
    begun, _ = start()
    write_lines(tmp_path, 0, [*start(), *tasks(200), begun, *tasks(passed_over)])
    (row,) = LiveRun(tmp_path).rows()
    assert (row.place, row.speed) == ("", None)


def test_the_share_is_the_newest(tmp_path: Path) -> None:
    several = task(9.0, compute=8.0, samples=480, slices=80, tasks=80, since=1.0)
    nothing = task(9.1, samples=0, slices=0)
    write_lines(tmp_path, 0, [*start(), *tasks(10), several, nothing])
    assert LiveRun(tmp_path).rows()[0].share == 6


FOREIGN = [
    task(1.0, samples="ten"),
    task(1.0, compute=None),  # type: ignore[arg-type]
    task(1.0, samples=10**400),
    task(float("inf")),
    task(1.0, since="now"),
    round_of(1.0, staleness="old"),  # type: ignore[arg-type]
    {"kind": "piece", "at": 1.0},
    {"kind": "profile", "at": 1.0, "host": 7},
    {"kind": "failure", "at": 1.0},
    {"kind": "rest", "at": 1.0, "reason": "end", "seconds": None},
    {"kind": "rounds_change", "at": 1.0, "accumulation": "two", "reason": ""},
    {"kind": "control", "at": 1.0, "decision": [2], "reason": ""},
    {"kind": "control", "at": 1.0, "decision": {"delay_bound": 2}, "reason": ""},
    {"kind": "evaluation", "at": 1.0},
    {"kind": "start", "at": 0.0, "wall_clock": "today"},
    {"kind": "death", "at": 1.0, "rank": None, "round": 1},
    {"kind": "join", "at": 1.0, "rank": 1},
    {"kind": "damage", "at": 1.0, "rank": 1, "round": "last"},
    {"kind": "left_out", "at": 1.0, "rank": 1, "round": 3, "samples": None},
    {"kind": "rollback", "at": 1.0, "rank": 1, "round": 3, "samples": 8},
]


@pytest.mark.parametrize("line", FOREIGN, ids=lambda line: f"{line}"[:70])
def test_lines_of_somebody_else_are_counted(tmp_path: Path, line: Record) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(10), line, *tasks(10, 1.0)])
    run = LiveRun(tmp_path)
    (row,) = run.rows()
    assert (row.rate, run.unreadable) == (pytest.approx(10.0 * 10), 1)
    whole = read_run(tmp_path)
    assert whole.unreadable == 1
    limits_of(facts_of(whole, course_of(whole)))


def test_progress_is_that_of_the_newest_figures(tmp_path: Path) -> None:
    write_summary(tmp_path)
    write_lines(tmp_path, 0, start())
    (tmp_path / "metrics.csv").write_text("samples,seconds,name,value\n640,2.5,train/loss,1.0\n700,2")
    run = LiveRun(tmp_path)
    run.rows()
    assert run.progress() == "running: 640 of 1,000 samples"
    write_summary(tmp_path, status="finished", samples_applied=1000)
    run.rows()
    assert run.progress() == "finished: 1,000 of 1,000 samples"
    assert run.over


@pytest.mark.parametrize(
    ("line", "seconds_ago", "told"),
    [
        ({"kind": "failure", "at": 9.0, "error": "UserError: nan"}, 1.0, "failed: "),
        (None, 601.0, "has died, as it seems: "),
        (None, 599.0, None),
    ],
)
def test_a_run_that_writes_nothing_more_is_over(
    tmp_path: Path, line: Record | None, seconds_ago: float, told: str | None
) -> None:
    """Its summary says running for ever."""
    write_summary(tmp_path)
    written(write_lines(tmp_path, 0, [*start(), *tasks(10), *([line] if line else [])]), seconds_ago)
    run = LiveRun(tmp_path)
    run.rows(NOW)
    assert run.over == (told is not None)
    assert told is None or run.progress().startswith(told)


def test_ranks_of_an_earlier_start_are_gone(tmp_path: Path) -> None:
    write_summary(tmp_path, ranks=1)
    for rank in range(2):
        written(write_lines(tmp_path, rank, [*start(), *tasks(10)]))
    assert [row.rank for row in LiveRun(tmp_path).rows(NOW)] == [0]


def failed_at(at: float, error: str = "UserError: nan") -> Record:
    return {"kind": "failure", "at": at, "error": error}


def shown(folder: Path, **seconds_ago: float) -> LiveRun:
    """As it is looked at where all ranks have just written, but for `rank_1` and others."""
    for number, path in enumerate(sorted((folder / "telemetry").iterdir())):
        written(path, seconds_ago.get(f"rank_{number}", 1.0))
    run = LiveRun(folder)
    run.rows(NOW)
    return run


def test_a_job_that_was_resumed_on_fewer_ranks_has_not_failed(tmp_path: Path) -> None:
    write_lines(tmp_path, 2, [*start(), *tasks(10), failed_at(1.0)])
    for rank in range(2):
        write_lines(tmp_path, rank, [*start(), *tasks(10)])
        write_lines(tmp_path, rank, [*start("2026-11-02T14:10:00+00:00"), *tasks(10)])
    write_summary(tmp_path, ranks=2, ranks_at_start=2)
    run = shown(tmp_path, rank_0=9.0, rank_1=9.0, rank_2=600.0)  # in long tasks
    assert [row.why for row in run.rows(NOW)] == ["", ""]
    assert not run.over
    assert run.progress().startswith("running: ")


@pytest.mark.parametrize("again_at", ["14:10:00", "14:00:02"])
def test_a_rank_that_has_not_written_since_the_job_began_again_has_not_failed(tmp_path: Path, again_at: str) -> None:
    """Its first lines come two seconds after the job's begin."""
    write_lines(tmp_path, 1, [*start(), *tasks(10), failed_at(1.0)])
    write_lines(tmp_path, 0, [*start(), *tasks(10), *start(f"2026-11-02T{again_at}+00:00"), *tasks(10)])
    write_summary(tmp_path, ranks=2, ranks_at_start=2)
    run = shown(tmp_path, rank_0=9.0, rank_1=9.0)
    assert (run.over, run.rows(NOW)[1].why) == (False, "")


def test_a_failure_since_the_job_began_again_ends_it(tmp_path: Path) -> None:
    for rank in range(2):
        again = start(f"2026-11-02T14:10:0{rank}+00:00")
        write_lines(tmp_path, rank, [*start(), *tasks(10), failed_at(1.0), *again, *tasks(10)])
    write_lines(tmp_path, 0, [failed_at(2.0, "ValueError: odd")])
    write_summary(tmp_path, ranks=2, ranks_at_start=2)
    run = shown(tmp_path, rank_0=6.0, rank_1=6.0)
    assert [row.why for row in run.rows(NOW)] == ["failed: ValueError: odd", ""]
    assert run.progress().startswith("failed: ")


def test_a_rank_that_the_others_outlive_ends_nothing(tmp_path: Path) -> None:
    """One that is excluded fails alone, and may say so before the others' lines are there."""
    write_summary(tmp_path, ranks=3, ranks_at_start=3)
    for rank in range(3):
        write_lines(tmp_path, rank, [*start(), *tasks(10, wait=0.1 * (rank != 1))])
    write_lines(tmp_path, 1, [failed_at(1.0, "CutOffError: excluded")])
    run = shown(tmp_path)
    assert (run.over, run.rows(NOW)[1].why) == (False, "failed: CutOffError: excluded")
    write_lines(tmp_path, 0, [death(5.0, 1, cause="slow"), *tasks(30, 5.0)])
    for seconds in (1.0, 9.0):
        run = shown(tmp_path, rank_0=seconds, rank_1=100.0, rank_2=seconds)
        assert not run.over
    rows = run.rows(NOW)
    assert rows[1].why == "was excluded, as it was slow: the others went on from round 40"
    assert (rows[1].place, rows[1].rate) == ("node, cpu", None)
    assert (slowest(rows) or "").startswith("slowest: rank 0, ")
    write_lines(tmp_path, 1, [*start("2026-11-02T14:00:20+00:00"), *tasks(10)])
    assert shown(tmp_path).rows(NOW)[1].why == "", "another process has taken its place"


def test_deaths_are_known_that_were_told_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsync.report.live.TAIL_BYTES", 5000)
    write_lines(tmp_path, 0, [*start(), *tasks(20), death(2.0, 1), *tasks(300, 2.0)])
    write_lines(tmp_path, 1, [*start(), *tasks(20), failed_at(2.0)])
    run = shown(tmp_path, rank_0=9.0, rank_1=30.0)
    assert run.rows(NOW)[1].why == "died: the others went on from round 40"
    assert not run.over


def test_ranks_keep_their_numbers_when_another_has_died(tmp_path: Path) -> None:
    """The summary's `ranks` are those that are left."""
    rows = [{"rank": 0}, {"rank": 1, "left_at_round": 40}, {"rank": 2}]
    write_summary(tmp_path, status="finished", ranks=2, ranks_at_start=3, per_rank=rows)
    for rank in range(3):
        write_lines(tmp_path, rank, [*start(), *tasks(10)])
    write_lines(tmp_path, 0, [death(5.0, 1)])
    told = [(row.rank, row.why) for row in shown(tmp_path).rows(NOW)]
    assert told == [(0, ""), (1, "died: the others went on from round 40"), (2, "")]
