"""Telemetry where the disk is full."""

from pathlib import Path

import pytest

from hetsync.errors import UserError
from hetsync.telemetry import Telemetry

SENTENCE = "cannot write .*rank-0000.jsonl: No space left on device; free space and go on with --resume"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    full = tmp_path / "rank-0000.jsonl"
    full.symlink_to("/dev/full")
    return full


def test_a_record_that_cannot_be_written_is_a_sentence(path: Path) -> None:
    telemetry = Telemetry(path)
    with pytest.raises(UserError, match=SENTENCE):
        telemetry.record("piece", text=100_000 * "more than a buffer holds")


def test_what_is_buffered_is_written_at_the_end_or_a_sentence(path: Path) -> None:
    telemetry = Telemetry(path)
    telemetry.record("piece")
    with pytest.raises(UserError, match=SENTENCE):
        telemetry.close()
    telemetry.close()
