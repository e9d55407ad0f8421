"""What is marked `thorough` runs where it is asked for, and only there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("variant", ["always", pytest.param("asked for", marks=pytest.mark.thorough)])
def test_something(variant):
    print("ran", variant)

@pytest.mark.each_value
@pytest.mark.parametrize("colour", ["red", "green"])
@pytest.mark.parametrize(("size", "of"), [(1, "a"), (2, "b"), (3, "c")])
def test_each(colour, size, of):
    print("tried", size, of, colour)

@pytest.mark.each_value(2)
@pytest.mark.parametrize("number", range(5))
def test_some(number):
    print("chosen", number)

@pytest.mark.each_value
def test_of_no_product():
    print("ran alone")
"""
ENVIRONMENT = 'root=$(dirname "$here") interrupted=\nattended() { "$@"; }\n'
CALLED = '#!/bin/sh\necho $PYTEST_ADDOPTS $* >>"$CALLS"\n'
ASKS = pytest.mark.parametrize("asks", [[], ["--thorough"]])


@ASKS
def test_pytest_leaves_it_out_unless_asked(tmp_path: Path, asks: list[str]) -> None:
    (tmp_path / "test_variants.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), "-p", "conftest", "-s", "test_variants.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": ""}
    done = subprocess.run([*words, *asks], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(each in done.stdout for each in ("ran always", "ran alone"))
    assert ("ran asked for" in done.stdout) == bool(asks)
    tried = [line.split("tried ")[1] for line in done.stdout.splitlines() if "tried" in line]
    assert len(tried) == (6 if asks else 3)
    assert {tuple(each.split()[:2]) for each in tried} == {("1", "a"), ("2", "b"), ("3", "c")}
    assert {each.split()[2] for each in tried} == {"red", "green"}
    assert done.stdout.count("chosen") == (5 if asks else 2)


@ASKS
def test_launch_test_asks_in_each_step(tmp_path: Path, asks: list[str]) -> None:
    """By stubs of what it starts."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "test", tmp_path / "launch")
    (tmp_path / "launch" / "environment").write_text(ENVIRONMENT)
    for name in ("launch/local", "python"):
        (tmp_path / name).write_text(CALLED)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    words = [str(tmp_path / "launch" / "test"), *asks, "tests/unit/test_one.py"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in calls.read_text().splitlines() if "pytest" in line]
    assert len(steps) == 6, steps
    assert ["--thorough" in step for step in steps] == 6 * [bool(asks)]
    assert [step.endswith(" tests/unit/test_one.py") for step in steps] == [True, *5 * [False]]
