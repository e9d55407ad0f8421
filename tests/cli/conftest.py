"""Commands in this process, each test in a folder of its own, with what its module's MINE holds as `mine`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import CACHE

from hetsync.plane.local import LocalPlane


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(request.module.MINE)
    handler = signal.getsignal(signal.SIGUSR1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.setattr(LocalPlane, "abort", lambda plane, code: sys.exit(code))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)
    signal.signal(signal.SIGUSR1, handler)
