"""What a user changes in a public script is kept without a line of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.public_scripts.__main__ import EDITS, judged_by, shares
from benchmarks.public_scripts.cases import CASES
from benchmarks.public_scripts.edits import edited

LINES = st.lists(st.sampled_from(["a", "b", "", "    c", "1d", "2,3c"]), max_size=12)


@pytest.mark.skipif(shutil.which("diff") is None, reason="needs diff")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=LINES, after=LINES)
def test_what_diff_writes_comes_to_the_converted_script(before: list[str], after: list[str], tmp_path: Path) -> None:
    texts = ["".join(f"{line}\n" for line in lines) for lines in (before, after)]
    for name, text in zip(("before", "after"), texts, strict=True):
        (tmp_path / name).write_text(text)
    words = ["diff", "-e", tmp_path / "before", tmp_path / "after"]
    commands = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    assert edited(texts[0], commands) == texts[1]


def test_other_commands_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'s/a/b/' is no command"):
        edited("a\n", "s/a/b/\n")


def test_every_case_has_its_edits() -> None:
    assert {f"{case.name}.ed" for case in CASES} == {path.name for path in EDITS.iterdir()}


def test_shares_are_unequal_and_whole() -> None:
    assert shares(32, 2) == {0: 22, 1: 10}
    assert sum(shares(33, 3).values()) == 33


@pytest.mark.parametrize(
    ("delayed", "passed"), [([0.30, 0.31, 0.33], True), ([0.34, 0.35, 0.36], False), ([0.1, 0.1, 9.0], True)]
)
def test_delayed_metrics_are_judged_by_the_spread_of_seeds(delayed: list[float], passed: bool) -> None:
    """One process has 0.28 to 0.30: a median up to its worst and as much again is within its seeds."""
    assert judged_by([0.28, 0.29, 0.30], delayed, falls=True) == passed
    assert judged_by([-0.28, -0.29, -0.30], [-metric for metric in delayed], falls=False) == passed
