"""A visit to a machine that is lent for minutes: parts fail, hang and leave processes behind, and it ends in time."""

from __future__ import annotations

import os
import sys
import tarfile
import time
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.common.local_job import ROOT
from benchmarks.gpu.__main__ import SECONDS, SMALL_FACTOR, Visit, failed_tests, visit
from benchmarks.gpu.kept import LIMIT, table
from benchmarks.gpu.parts import GRACE_SECONDS, MARK, Part, Verdict, marked, run
from benchmarks.gpu.rests import Meter
from benchmarks.gpu.waits import Waits
from hetsync.sync import digests

LONG = 60.0


def part(code: str, limit: float = LONG, name: str = "tried") -> Part:
    return Part(name, "a trial", limit, [sys.executable, "-c", code])


def started(one: Part, folder: Path, seconds: float = LONG) -> tuple[Verdict, str]:
    outcome = run(one, folder, dict(os.environ), time.monotonic() + seconds)
    return outcome.verdict, outcome.last_line


def test_what_it_says_and_how_it_ends_is_kept(tmp_path: Path) -> None:
    assert started(part("print('twelve')\nprint('==== 3 passed ====')"), tmp_path) == (Verdict.PASSED, "3 passed")
    assert started(part("raise SystemExit('no')"), tmp_path) == (Verdict.FAILED, "no")
    assert (tmp_path / "tried.log").read_text() == "no\n"


def test_a_program_that_is_not_there_fails_its_part_alone(tmp_path: Path) -> None:
    absent = Part("tried", "a trial", LONG, ["mpirun-that-nobody-has", "-np", 2])
    assert started(absent, tmp_path) == (
        Verdict.FAILED,
        "mpirun-that-nobody-has cannot be started: No such file or directory",
    )


LEAVES_A_DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("waits", flush=True)
time.sleep(600)
"""


def test_a_late_part_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    began = time.monotonic()
    assert started(part(LEAVES_A_DAEMON, limit=5), tmp_path) == (Verdict.LATE, "waits")
    assert time.monotonic() - began < 5 + GRACE_SECONDS + 10
    assert not list(marked(f"{MARK}={os.getpid()} tried"))


def test_nothing_is_begun_that_could_not_end_in_time(tmp_path: Path) -> None:
    assert started(part("open('begun', 'w')"), tmp_path, seconds=GRACE_SECONDS + 2) == (Verdict.LEFT_OUT, "")
    assert not (tmp_path / "tried.log").exists()


@pytest.mark.parametrize("small", [False, True])
def test_the_limits_of_all_parts_fit_the_visit(small: bool, tmp_path: Path) -> None:
    for second in (False, True):
        planned = Visit(small, tmp_path)
        parts = [planned.mps(), *planned.parts(second)]
        assert len({one.name for one in parts}) == len(parts)
        assert sum(one.limit_seconds for one in parts) < SECONDS * (SMALL_FACTOR if small else 1)
    assert SECONDS <= 9 * 60


@pytest.mark.parametrize("second", [False, True])
def test_the_page_shows_these_parts(second: bool, tmp_path: Path) -> None:
    rows = [[one.name, one.shows, f"{one.limit_seconds:.0f}"] for one in Visit(False, tmp_path).parts(second)]
    assert table(["part", "shows", "seconds, at most"], rows, words=2) in (ROOT / "benchmarks/README.md").read_text()


def test_a_part_that_fails_takes_nothing_of_the_others(tmp_path: Path) -> None:
    tells = f"from pathlib import Path; Path({str(tmp_path)!r}, 'good.md').write_text('what it found')"
    says = "print('tests/gpu/test_a.py::test_b FAILED [ 5%]'); raise SystemExit(1)"
    assert not visit([part(says, name="bad"), part(tells, name="good")], tmp_path, time.monotonic() + LONG)
    with tarfile.open(tmp_path / "gpu.tgz") as packed:
        assert {"gpu/gpu.md", "gpu/bad.log", "gpu/good.log"} <= set(packed.getnames())
    told = (tmp_path / "gpu.md").read_text()
    assert "| bad | a trial | FAILED |" in told
    assert "| good | a trial | passed |" in told
    assert "- `tests/gpu/test_a.py::test_b`" in told
    assert told.endswith("## good\n\nwhat it found\n")


@pytest.mark.thorough
def test_what_parts_before_have_spared_is_a_late_parts(tmp_path: Path) -> None:
    slow = part("import time; time.sleep(7)", limit=5, name="slow")
    assert not visit([slow], tmp_path, time.monotonic() + LONG)
    assert visit([part("", limit=20, name="quick"), slow], tmp_path, time.monotonic() + LONG)


@pytest.mark.thorough
def test_a_part_that_hangs_says_where(tmp_path: Path) -> None:
    told = f"import os; os.environ['{LIMIT}'] = str(float(os.environ['{LIMIT}']) - 2)"  # it has little time here
    hangs = f"{told}\nfrom benchmarks.gpu.kept import tell_where_it_hangs\ntell_where_it_hangs()"
    verdict, _ = started(part(f"{hangs}\ndef stuck():\n    import time; time.sleep(600)\nstuck()", limit=8), tmp_path)
    assert verdict is Verdict.LATE
    assert "in stuck" in (tmp_path / "tried.log").read_text()


def test_failed_tests_are_named_by_what_is_said_before_the_end(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    log.write_text(
        "[gw0] [ 10%] PASSED tests/gpu/test_a.py::test_b\n[gw1] [ 20%] FAILED tests/gpu/test_a.py::test_c[4-own]\n"
    )
    assert failed_tests(log) == {"tests/gpu/test_a.py::test_c[4-own]"}


def test_waits_are_counted_by_thread_and_place() -> None:
    waits = Waits()
    with waits.watched():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another matter", stacklevel=1)
    assert dict(waits.counts) == {("MainThread", "the loop"): 1}


def test_seconds_and_bytes_of_a_rest_are_taken_where_they_are_spent() -> None:
    meter = Meter()
    with meter.watching():
        digests.Digests().of({"weight": torch.zeros(1000)}, [])
    assert meter.bytes == {"hashed": 4000}
    assert meter.seconds["hash"] > 0
