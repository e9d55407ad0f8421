"""launch/mps, with stubs in the place of the MPS daemon and of launch/local."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DAEMON = """#!/bin/bash
if [[ ${1:-} == -d ]]; then echo started >>"$LOG"; touch "$CUDA_MPS_PIPE_DIRECTORY/control"; else cat >>"$LOG"; fi
exit "${DAEMON_STATUS:-0}"
"""
LOCAL = """#!/bin/bash
echo "ranks $1" >>"$LOG"
for ((rank = 0; rank < $1; rank++)); do OMPI_COMM_WORLD_LOCAL_RANK=$rank "${@:3}" || exit; done
"""

HANGS_UP = """#!/bin/bash
trap 'echo hung up >>"$LOG"; exit 129' HUP
sleep 1 # until it is waited for
kill -HUP "$PPID"
for ((seconds = 0; seconds < 20; seconds++)); do sleep 1; done
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def mps(
    folder: Path, *words: str, daemon: bool = True, local: str = LOCAL, **variables: str
) -> subprocess.CompletedProcess[str]:
    program(folder / "launch" / "local", local)
    shutil.copy(ROOT / "launch" / "mps", folder / "launch" / "mps")
    if daemon:
        program(folder / "bin" / "nvidia-cuda-mps-control", DAEMON)
    told = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "LOG": str(folder / "log"), "TMPDIR": str(folder), **variables}
    return subprocess.run(
        [folder / "launch" / "mps", *words],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SHOW = ["--", "sh", "-c", 'test -e "$CUDA_MPS_PIPE_DIRECTORY/control" && echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"']


def test_every_rank_gets_its_part_and_the_daemon_ends_with_the_job(tmp_path: Path) -> None:
    done = mps(tmp_path, "100,50,25", *SHOW)
    assert (done.returncode, done.stdout.split()) == (0, ["100", "50", "25"]), done.stderr
    assert (tmp_path / "log").read_text().split("\n")[:3] == ["started", "ranks 3", "quit"]
    assert not list(tmp_path.glob("hetsync-mps-*"))


def test_a_jobs_status_is_passed_on_and_its_daemon_ended(tmp_path: Path) -> None:
    assert mps(tmp_path, "100,50", "--", "sh", "-c", "exit 7").returncode == 7
    assert "quit" in (tmp_path / "log").read_text()


def test_a_lost_terminal_is_told_to_the_job_and_its_daemon_ends_after_it(tmp_path: Path) -> None:
    done = mps(tmp_path, "100,50", local=HANGS_UP)
    assert done.returncode == 129, done.stderr
    assert (tmp_path / "log").read_text().split("\n")[:3] == ["started", "hung up", "quit"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["100,0"], "100,0 has '0': give whole numbers from 1 to 100, one a rank."),
        (["100,half"], "100,half has 'half'"),
        (["101"], "101 has '101'"),
        (["50", "--"], "-- is to be followed by a program."),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = mps(tmp_path, *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "log").exists()


def test_without_mps_one_sentence_says_so(tmp_path: Path) -> None:
    done = mps(tmp_path, "100,50", daemon=False)
    assert done.returncode == 2
    assert done.stderr.startswith("mps: no nvidia-cuda-mps-control in PATH: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_daemon_that_does_not_start_ends_the_job(tmp_path: Path) -> None:
    done = mps(tmp_path, "100,50", *SHOW, DAEMON_STATUS="1")
    assert done.returncode == 2
    assert "the MPS daemon did not start" in done.stderr
    assert not list(tmp_path.glob("hetsync-mps-*"))
