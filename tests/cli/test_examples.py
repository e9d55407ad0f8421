"""The example of a user's own loop, before and after."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
MOST_CHANGED_LINES = 8
LEAST_ACCURACY = 0.93


def accuracies(words: list[str]) -> list[float]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(figure) for figure in re.findall(r"accuracy ([\d.]+)", done.stdout)]


def test_at_most_eight_lines_change() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("before.py", "after.py"))
    code = [line for line in difflib.ndiff(before[1:], after[1:]) if line[0] in "-+" and line[2:].strip()]
    added = [line for line in code if line[0] == "+" and line[2:].strip() not in map(str.strip, before)]
    assert 0 < len(added) <= MOST_CHANGED_LINES


@pytest.mark.parametrize("script", ["before.py", "after.py"])
def test_both_run_in_one_process(script: str) -> None:
    (accuracy,) = accuracies([sys.executable, str(EXAMPLES / script)])
    assert accuracy > LEAST_ACCURACY


def test_after_runs_under_mpirun_and_all_ranks_end_with_the_same_model() -> None:
    launch = str(ROOT / "launch" / "local")
    found = accuracies([launch, "3", "--", sys.executable, str(EXAMPLES / "after.py")])
    assert len(found) == 3
    assert len(set(found)) == 1
    assert found[0] > LEAST_ACCURACY
