"""What users are told when something goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys

from jobs import ROOT


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
