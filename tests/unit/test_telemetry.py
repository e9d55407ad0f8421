"""Telemetry where the disk is full: told once, and training goes on."""

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
