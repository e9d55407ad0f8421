"""What a job writes for processes that are to join it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetsync.start import STARTED_IN
from hetsync.train import notice


def test_the_command_runs_where_the_script_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words may be paths from there, and scripts change their folder."""
    monkeypatch.chdir(tmp_path)
    with notice.posted(tmp_path, {"port": 1}):
        found = notice.read(tmp_path)
    assert (found.directory, found.command[0]) == (STARTED_IN, sys.executable)
    assert Path(STARTED_IN) != tmp_path
    assert not (tmp_path / notice.NAME).exists()
