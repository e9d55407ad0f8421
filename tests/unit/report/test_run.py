"""Run folders as they are read: while they are written, over resumes, and by older versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_folders import round_of, start, task, tasks, write_lines, write_summary

from hetsync.errors import UserError
from hetsync.report.facts import facts_of
from hetsync.report.limits import limits_of
from hetsync.report.lines import LineReader
from hetsync.report.run import FIELDS, read_run
from hetsync.report.series import course_of


def test_a_torn_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = write_lines(tmp_path, 0, [task(1.0)], torn='{"kind": "oth')
    reader = LineReader(path)
    assert [record["at"] for record in reader.read()] == [1.0]
    assert list(reader.read()) == []
    with path.open("a") as file:
        file.write('er", "at": 2.0}\n{"kind"')
    assert [record["at"] for record in reader.read()] == [2.0]
    assert reader.unreadable == 0


def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path, 0, tasks(100))
    told = list(LineReader(path, last_bytes=1000).read())
    assert 1 < len(told) < 10
    assert told[-1]["at"] == 10.0


def test_what_is_no_record_is_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path, 0, [task(1.0)], torn="nonsense\n[1]\n{}\n")
    reader = LineReader(path)
    assert len(list(reader.read())) == 1
    assert reader.unreadable == 3


def test_fields_of_the_wrong_kind_are_counted_too(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), task(0.1, samples="ten"), {"kind": "start", "at": 0.0}, *tasks(3)])
    run = read_run(tmp_path)
    assert run.unreadable == 2
    assert run.ranks[0].tasks["samples"].sum() == 30


@pytest.mark.parametrize("field", FIELDS["piece"])
def test_a_number_that_no_float_holds_is_counted_too(tmp_path: Path, field: str) -> None:
    write_lines(tmp_path, 0, [*start(), {**task(0.1), field: 10**400}, *tasks(3)])
    assert read_run(tmp_path).unreadable == 1


def test_a_file_that_was_begun_anew_is_read_anew(tmp_path: Path) -> None:
    path = write_lines(tmp_path, 0, tasks(3))
    reader = LineReader(path)
    assert len(list(reader.read())) == 3
    path.write_text(json.dumps(task(7.0)) + "\n")
    assert [record["at"] for record in reader.read()] == [7.0]


def test_ranks_stand_on_one_clock_that_stands_still_between_starts(tmp_path: Path) -> None:
    for rank, second in ((0, "00"), (1, "02")):
        write_lines(tmp_path, rank, [*start(f"2026-11-02T14:00:{second}+00:00"), *tasks(50)])
        write_lines(tmp_path, rank, [*start(f"2026-11-04T09:00:{second}+00:00"), *tasks(50)])
    run = read_run(tmp_path)
    assert [moment for each in run.stretches for moment in (each.begin, each.end)] == pytest.approx([0, 7, 7, 14])
    assert run.ranks[0].tasks["end"][[0, 49, 50]] == pytest.approx([0.1, 5.0, 7.1])
    assert run.ranks[1].tasks["end"][[0, 49, 50]] == pytest.approx([2.1, 7.0, 9.1])
    assert run.ranks[1].tasks["begin"][0] == pytest.approx(2.0)
    assert course_of(run).samples.sum() == pytest.approx(2000)


def test_the_first_format_is_read(tmp_path: Path) -> None:
    """Before it had starts and profiles, and where a summary tells the speeds."""
    write_lines(tmp_path, 0, [*tasks(50), round_of(3.0)])
    rank = {"rank": 0, "solo_samples_per_second": 200.0, "solo_uncertainty": 0.0}
    write_summary(tmp_path, status="finished", efficiency=0.5, per_rank=[rank])
    run = read_run(tmp_path)
    course = course_of(run)
    assert run.seconds == pytest.approx(5.0)
    assert run.time_of_day(1.0) is None
    assert course.of_solo == pytest.approx(np.full(len(course.of_solo), 0.5))


def test_lines_of_several_tasks_count_as_these(tmp_path: Path) -> None:
    several = task(5.0, compute=3.0, wait=1.0, samples=300, slices=30, tasks=30, since=1.0)
    rounds = round_of(5.0, 0.9, 2.0, rounds=9, contributions=3, since=1.0)
    write_lines(tmp_path, 0, [*start(), *tasks(10), several, rounds])
    run = read_run(tmp_path)
    lines = run.ranks[0]
    assert lines.tasks["begin"][-1] == 1.0
    assert lines.tasks["tasks"].sum() == 40
    course = course_of(run)
    assert course.samples.sum() == pytest.approx(400)
    assert np.nanmax(course.shares[0]) == pytest.approx(10)
    assert facts_of(run, course).round_in_slices == pytest.approx(0.1 / (4.0 / 40))


def test_efficiency_is_of_what_the_devices_were_capable_of(tmp_path: Path) -> None:
    """One becomes four times slower, and nobody waits; the other waits half of its time throughout."""
    write_lines(tmp_path, 0, [*start(), *tasks(50), *tasks(10, 5.0, compute=0.4)])
    write_lines(tmp_path, 1, [*start(), *tasks(45, compute=0.1, wait=0.1)])
    course = course_of(read_run(tmp_path))
    assert course.efficiency[:3] == pytest.approx(np.full(3, 0.75), rel=1e-3)
    assert course.efficiency[-1] == pytest.approx((25 + 50) / (25 + 100), rel=1e-2)
    assert course.of_solo[-1] < course.of_solo[0]


def test_solo_rates_have_an_interval_and_rests_do_not_count(tmp_path: Path) -> None:
    """Half of the solo rate while it waits as long as it computes; evaluations are not on the clock."""
    rest = {"kind": "score", "at": 4.0, "round": 1, "seconds": 2.0}
    write_lines(tmp_path, 0, [*start(), *tasks(10, compute=0.1, wait=0.1), rest, *tasks(10, 4.0, wait=0.1)])
    course = course_of(read_run(tmp_path))
    trained = np.isfinite(course.of_solo) & (course.samples > 9)
    assert course.of_solo[trained] == pytest.approx(np.full(trained.sum(), 0.5))
    assert course.low[trained] == pytest.approx(course.of_solo[trained] / 1.02)
    assert course.high[trained] == pytest.approx(course.of_solo[trained] * 1.02)


def test_facts_come_from_the_lines(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(100, compute=0.08, data=0.02), round_of(1.0, 0.04), round_of(2.0, 0.04)])
    write_lines(tmp_path, 1, [*start(), *tasks(50), *tasks(25, 5.0, compute=0.2), round_of(2.0, 0.04)])
    run = read_run(tmp_path)
    told = limits_of(facts_of(run, course_of(run)))
    minute = (run.time_of_day(5.0) or "").split()[1][:5]
    assert told[0].startswith(f"Rank 1 slowed at {minute}, to 50% of the speed before")
    assert "Rank 0 waits 20% of the time for data: more data.workers." in told
    assert any(sentence.startswith("Rounds take 40% of a slice: K = 2") for sentence in told)


def by_rule(at: float, accumulation: int) -> dict[str, object]:
    change = {"round": 8, "accumulation": accumulation, "work": 0.4, "waits": 0.0, "reason": f"K = {accumulation}"}
    return {"kind": "rounds_change", "at": at, **change}


def by_a_controller(at: float, accumulation: int, delay_bound: int) -> dict[str, object]:
    decision = {"accumulation": accumulation, "delay_bound": delay_bound, "quorum": 0.5}
    return {"kind": "control", "at": at, "decision": decision, "reason": "so"}


def test_until_the_end_the_settings_are_the_newest_told(tmp_path: Path) -> None:
    write_summary(tmp_path)
    (tmp_path / "recipe.yaml").write_text("sync: {accumulation: auto, delay_bound: 4}\n")
    run = read_run(tmp_path)
    assert facts_of(run, course_of(run)).accumulation == 1
    for lines, expected in (
        (start(accumulation=2), 2),
        ([*tasks(10), round_of(1.0, 0.04), by_rule(0.5, 4)], 4),
        ([by_a_controller(0.6, 8, 2)], 8),
        (start(accumulation=8), 8),
    ):
        write_lines(tmp_path, 0, lines)
        run = read_run(tmp_path)
        assert facts_of(run, course_of(run)).accumulation == expected
    assert "K = 16 (sync.accumulation 16) makes fewer" in limits_of(facts_of(run, course_of(run)))[0]


def test_decisions_are_those_of_the_rule_and_of_controllers(tmp_path: Path) -> None:
    died = {"kind": "control", "at": 0.5, "died": "was ended"}
    lines = [*start(delay_bound=4), by_rule(0.2, 2), by_a_controller(0.4, 4, 8), died, by_rule(0.6, 2)]
    write_lines(tmp_path, 0, lines)
    told = [(each.at, each.accumulation, each.delay_bound, each.reason) for each in read_run(tmp_path).settings]
    assert told == [(0.0, 1, 4, None), (0.2, 2, 4, "K = 2"), (0.4, 4, 8, "so"), (0.6, 2, 8, "K = 2")]


@pytest.mark.parametrize(
    ("changes", "taken_back"), [([2], ()), ([2, 1], (2,)), ([2, 4, 2, 1, 2], (4,)), ([2, 1, None], ())]
)
def test_what_the_rule_has_taken_back_is_known(
    tmp_path: Path, changes: list[int | None], taken_back: tuple[int, ...]
) -> None:
    write_lines(tmp_path, 0, start())
    for number, accumulation in enumerate(changes):
        write_lines(tmp_path, 0, start() if accumulation is None else [by_rule(number / 10, accumulation)])
    run = read_run(tmp_path)
    assert facts_of(run, course_of(run)).taken_back == frozenset(taken_back)


def test_a_failure_is_told_unless_the_run_went_on_to_its_end(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(10), {"kind": "failure", "at": 1.0, "error": "LostError: gone"}])
    write_summary(tmp_path)
    run = read_run(tmp_path)
    assert limits_of(facts_of(run, course_of(run)))[0] == "The run ended by a failure: LostError: gone."
    write_summary(tmp_path, status="finished", efficiency=1.0)
    run = read_run(tmp_path)
    assert limits_of(facts_of(run, course_of(run))) == ["Nothing: efficiency is 1.000."]


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no run folder .*missing: give one"):
        read_run(tmp_path / "missing")
    with pytest.raises(UserError, match=r"holds no run: there is neither summary\.json nor telemetry"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("[")
    with pytest.raises(UserError, match=r"cannot read .*summary\.json: .*; remove it"):
        read_run(tmp_path)


def test_a_job_that_has_only_begun_has_a_course(tmp_path: Path) -> None:
    write_summary(tmp_path)
    assert course_of(read_run(tmp_path)).samples.sum() == 0
    write_lines(tmp_path, 0, start())
    run = read_run(tmp_path)
    assert limits_of(facts_of(run, course_of(run))) == ["Nothing that takes 5 % of a rank's time was found."]


def test_limits_go_by_the_delay_that_was_in_force_for_longest(tmp_path: Path) -> None:
    """By rule a run begins without, and may end in a look back."""
    delay, back = ({**by_rule(at, 1), "delay_bound": bound} for at, bound in ((1.0, 4), (9.5, 0)))
    write_lines(tmp_path, 0, [*start(delay_bound=0), *tasks(100), delay, back])
    run = read_run(tmp_path)
    assert [setting.delay_bound for setting in run.settings][-2:] == [4, 0]
    assert facts_of(run, course_of(run)).delay_bound == 4
