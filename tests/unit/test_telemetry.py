"""Telemetry where the disk is full: told once, and training goes on."""

import itertools
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from hetsync import errors, telemetry
from hetsync.telemetry import Telemetry

SENTENCE = "rank-0000.jsonl: No space left on device; training goes on without its records"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.0)
    return tmp_path / "telemetry" / "rank-0000.jsonl"


def numbers(path: Path) -> list[int]:
    return [record["number"] for record in records(path) if record["kind"] != "start"]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def full(path: Path) -> Path:
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    return path


def test_records_come_in_order_after_those_of_earlier_starts(path: Path) -> None:
    for start in (0, 3):
        told = Telemetry(path)
        for number in range(start, start + 3):
            told.record("piece", number=number)
        told.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 5]


def test_each_start_says_when_it_was(path: Path) -> None:
    before = datetime.now(timezone.utc)
    for _ in range(2):
        told = Telemetry(path)
        told.record("piece", number=0)
        told.record("piece", number=1)
        told.close()
    starts = [record for record in records(path) if record["kind"] == "start"]
    moments = [datetime.fromisoformat(start["wall_clock"]) for start in starts]
    assert [record["kind"] for record in records(path)] == ["start", "piece", "piece"] * 2
    assert {start["at"] for start in starts} == {0.0}
    assert before <= moments[0] <= moments[1] <= datetime.now(timezone.utc)


def test_nothing_is_made_before_there_is_something_to_tell(path: Path) -> None:
    Telemetry(path).close()
    assert not path.parent.exists()


def test_a_full_disk_is_told_once_a_minute(
    full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Telemetry(full)
    for number in range(3):
        told.record("piece", number=number)
    assert capsys.readouterr().err == f"hetsync: cannot write {full.parent}/{SENTENCE}\n"
    monkeypatch.setattr(errors, "REPEAT_SECONDS", 0.0)
    told.record("piece", number=3)
    assert SENTENCE in capsys.readouterr().err


def test_a_full_disk_at_the_end_is_told(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Telemetry(full)
    told.record("piece", number=0)
    told.close()
    assert SENTENCE in capsys.readouterr().err


def test_when_there_is_space_again_what_was_kept_is_written(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Telemetry(full)
    told.record("piece", number=0)
    assert SENTENCE in capsys.readouterr().err
    full.unlink()
    told.record("piece", number=1)
    told.close()
    assert numbers(full) == [0, 1]


def test_no_line_is_torn(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk takes the first half of what is written."""
    told = Telemetry(path)
    told.record("piece", number=0)
    real = telemetry._write

    def half(file: object, block: bytes) -> int:
        return real(file, block[: len(block) // 2])  # type: ignore[arg-type]

    monkeypatch.setattr(telemetry, "_write", half)
    told.record("piece", number=1)
    assert SENTENCE in capsys.readouterr().err
    assert numbers(path) == [0]
    monkeypatch.undo()
    told.close()
    assert numbers(path) == [0, 1]


# A bounded size.

DAY = 86_400.0
TASKS_A_SECOND = 2


class Clock:
    """Of a process that has run for long."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def work(self, told: Telemetry, seconds: float) -> int:
        """A task and a round each half second; returns how many."""
        count = int(seconds * TASKS_A_SECOND)
        for number in range(count):
            self.now += 1 / TASKS_A_SECOND
            spent = {"compute_seconds": 0.375, "data_seconds": 0.025, "wait_seconds": 0.1}
            told.record("piece", piece=number, samples=8, slices=1, version=number, loss=float(number % 2), **spent)
            told.record("round", round=number, seconds=0.0625, staleness=None if number % 4 else 2)
        return count


@pytest.fixture
def clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(telemetry, "STRETCH_BYTES", 2**14)
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 60.0)
    return Clock()


def test_lines_become_rarer_as_a_file_grows_and_lose_nothing(path: Path, clock: Clock) -> None:
    told = Telemetry(path, clock)
    count = clock.work(told, DAY / 4)
    told.close()
    lines = [record for record in records(path) if record["kind"] == "piece"]
    assert "tasks" not in lines[0]
    assert len(lines) < 1500 < count
    steps = [later["at"] - sooner["at"] for sooner, later in itertools.pairwise(lines[:-1])]
    assert steps == sorted(steps)
    assert steps[-1] == telemetry.LONGEST_INTERVAL
    assert sum(line.get("tasks", 1) for line in lines) == count
    assert sum(line["samples"] for line in lines) == 8 * count
    assert sum(line["compute_seconds"] for line in lines) == pytest.approx(0.375 * count)
    assert lines[-1]["loss"] == pytest.approx(0.5, abs=0.1)
    assert [line["since"] for line in lines[-5:]] == [line["at"] for line in lines[-6:-1]]
    rounds = [record for record in records(path) if record["kind"] == "round"]
    assert sum(line.get("rounds", 1) for line in rounds) == count
    assert sum(line["seconds"] for line in rounds) == pytest.approx(0.0625 * count)
    contributions = [line.get("contributions", int(line["staleness"] is not None)) for line in rounds]
    assert sum(contributions) == count // 4
    assert {line["staleness"] for line in rounds} <= {2, None}


def test_a_resumed_run_goes_on_as_rarely(path: Path, clock: Clock) -> None:
    for _ in range(2):
        told = Telemetry(path, clock)
        clock.work(told, DAY / 12)
        told.close()
    found = records(path)
    second = [record["kind"] for record in found].index("start", 1)
    lines = [record for record in found[second:] if record["kind"] == "piece"]
    assert lines[0]["tasks"] > 10
    assert lines[0]["since"] == 0.0


def test_lines_come_in_the_order_of_the_records(path: Path, clock: Clock) -> None:
    told = Telemetry(path, clock)
    spent = {"compute_seconds": 0.25, "data_seconds": 0.0, "wait_seconds": 0.0}
    told.record("piece", piece=0, samples=8, slices=1, version=0, loss=1.0, **spent)
    shares = [8, 8]
    told.record("shares", shares=shares)
    shares[0] = 9  # a line tells what was
    told.record("round", round=0, seconds=0.5, staleness=1)
    told.close()
    found = records(path)
    assert [record["kind"] for record in found] == ["start", "piece", "shares", "round"]
    assert found[2]["shares"] == [8, 8]


def test_a_start_tells_the_format(path: Path) -> None:
    told = Telemetry(path)
    told.record("piece", number=0)
    told.close()
    assert records(path)[0]["format"] == telemetry.FORMAT == 2


def test_what_is_not_finite_is_a_text_that_strict_readers_take(path: Path) -> None:
    told = Telemetry(path)
    told.record("evaluation", perplexity=float("inf"), scores=[float("nan"), 0.5])
    told.close()
    lines = path.read_text().splitlines()
    record = json.loads(lines[-1], parse_constant=pytest.fail)
    assert (record["perplexity"], record["scores"]) == ("inf", ["nan", 0.5])
