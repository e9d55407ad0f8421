"""What users are told when something goes wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from jobs import ROOT

from hetsync.errors import complain


def test_a_sentence_leaves_in_one_write() -> None:
    """A launcher that forwards pieces as they come may put words of its own between two of them."""
    code = "import hetsync.errors; hetsync.errors.complain('a sentence')"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    here, there = os.pipe2(os.O_DIRECT)  # in packets: a read returns what one write has written
    with os.fdopen(here, "rb", buffering=0) as listener:
        subprocess.run([sys.executable, "-c", code], stderr=there, env=env, check=True)
        os.close(there)
        written = list(iter(lambda: listener.read(4096), b""))
    assert written == [b"hetsync: a sentence\n"]


def test_a_signals_handler_may_complain_in_the_middle_of_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Busy(io.StringIO):
        def flush(self) -> None:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(sys, "stderr", Busy())
    complain("stopped by SIGUSR1")
    assert capfd.readouterr().err == "hetsync: stopped by SIGUSR1\n"
