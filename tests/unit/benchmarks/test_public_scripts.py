"""What a user changes in a public script is kept without a line of it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.public_scripts.__main__ import EDITS, Arm, difference, judged_by, shares, with_values
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


def test_values_of_a_script_without_options_are_set_for_each_arm(tmp_path: Path) -> None:
    case = replace(CASES[0], values={"size = 16": "size = {batch}"}, words="--steps {ranks}", batch=12, per_rank=True)
    script = tmp_path / "train.py"
    script.write_text("size = 16\n")
    played, words = with_values(case, Arm(3, 4), script)
    assert played.read_text() == "size = 4\n"
    assert words == ["--steps", "3"]
    with pytest.raises(SystemExit, match=r"main.py of mnist has no 'rate = 1'"):
        with_values(replace(case, values={"rate = 1": "rate = 2"}), Arm(1, None), script)


def test_the_difference_is_that_of_the_tensor_that_differs_most(tmp_path: Path) -> None:
    tensors = {"0": torch.tensor([1.0, -4.0]), "1": torch.tensor([1e-9])}
    save_file(tensors, tmp_path / "one")
    save_file({"0": tensors["0"] + torch.tensor([0.0, 0.4]), "1": -tensors["1"]}, tmp_path / "other")
    assert difference(tmp_path / "one", tmp_path / "one") == 0
    assert difference(tmp_path / "other", tmp_path / "one") == pytest.approx(0.1)
    save_file({"0": tensors["0"]}, tmp_path / "fewer")
    with pytest.raises(SystemExit, match=r"fewer has 1 tensors, .*one 2"):
        difference(tmp_path / "fewer", tmp_path / "one")


@pytest.mark.parametrize(
    ("delayed", "passed"), [([0.30, 0.31, 0.33], True), ([0.34, 0.35, 0.36], False), ([0.1, 0.1, 9.0], True)]
)
def test_delayed_metrics_are_judged_by_the_spread_of_seeds(delayed: list[float], passed: bool) -> None:
    """One process has 0.28 to 0.30: a median up to its worst and as much again is within its seeds."""
    assert judged_by([0.28, 0.29, 0.30], delayed, falls=True) == passed
    assert judged_by([-0.28, -0.29, -0.30], [-metric for metric in delayed], falls=False) == passed
