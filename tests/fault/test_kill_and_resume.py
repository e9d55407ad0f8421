"""Killed at any moment, asked to stop at any moment: a resumed run ends as the uninterrupted one would have.

Each case is jobs of their own, under mpirun. python -m pytest tests/fault
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import SECONDS, command, descendants, finished, kill, run, started, summary_of

from hetsync.checkpoint import complete

RANKS = 2
SAMPLES = 4000
STOPPED = 85
CLUSTER = "name: two\nsource: none\ndevices: [{name: a, speed: 2}, {name: b, speed: 1}]\n"


def recipe(folder: Path, bound: int) -> list[str]:
    """Emulated devices make it last some seconds, whatever machine this is."""
    (folder / "two.yaml").write_text(CLUSTER)
    return [
        *("--run.dir", "run", "--run.samples", str(SAMPLES)),
        *("--run.checkpoint_every", "300", "--run.keep_checkpoints", "2"),
        *("--emulate", "two.yaml", "--emulation.samples_per_second", "1200"),
        *("--sync.delay_bound", str(bound), "--sync.rebalance", "false"),
        *("--model.options.batch_norm", "true"),
    ]


def final_weights(folder: Path) -> bytes:
    return (folder / "run" / "checkpoints" / f"samples-{SAMPLES:012d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = run(*recipe(folder, 0), folder=folder, ranks=RANKS)
    assert done.status == 0, done.story
    return folder


def rank_of(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = [v.partition(b"=")[2] for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
    return int(found[0]) if found else None


def process_of_rank(job: subprocess.Popen[str], rank: int) -> int:
    (pid,) = [pid for pid in descendants(job) if rank_of(pid) == rank]
    return pid


def wait_until_saved(job: subprocess.Popen[str], folder: Path, seconds: float) -> None:
    """Until a checkpoint is there, and then for a moment more."""
    deadline = time.monotonic() + SECONDS
    while not complete(folder / "run" / "checkpoints"):
        assert job.poll() is None, "the job ended before it saved"
        assert time.monotonic() < deadline, "nothing was saved in time"
        time.sleep(0.01)
    time.sleep(seconds)


def moment() -> float:
    """Another one every time; pytest shows it where the test fails."""
    seconds = random.uniform(0, 1.5)
    print(f"struck {seconds} s after the first checkpoint")
    return seconds


def resumed(folder: Path) -> dict[str, Any]:
    before = max(complete(folder / "run" / "checkpoints")).name
    done = run("--resume", "run", folder=folder, ranks=RANKS)
    assert done.status == 0, done.story
    summary = summary_of(folder / "run")
    assert summary["status"] == "finished"
    assert summary["samples_applied"] == SAMPLES
    own = sum(rank["samples"] for rank in summary["per_rank"])
    assert own == SAMPLES - int(before.partition("-")[2])  # not one more than was missing
    return summary


def accuracy(folder: Path) -> float:
    value: float = summary_of(folder / "run")["metrics"]["accuracy"]
    return value


def test_the_whole_job_is_killed(tmp_path: Path, uninterrupted: Path) -> None:
    with started(command(*recipe(tmp_path, 0), ranks=RANKS), tmp_path) as job:
        wait_until_saved(job, tmp_path, moment())
        assert job.poll() is None
        kill(job)
    assert not (tmp_path / "run" / "summary.json").exists()
    resumed(tmp_path)
    assert final_weights(tmp_path) == final_weights(uninterrupted)


@pytest.mark.parametrize("rank", [1])
def test_one_rank_is_killed(tmp_path: Path, uninterrupted: Path, rank: int) -> None:
    with started(command(*recipe(tmp_path, 4), ranks=RANKS), tmp_path) as job:
        wait_until_saved(job, tmp_path, moment())
        os.kill(process_of_rank(job, rank), signal.SIGKILL)
        done = finished(job, seconds=30)
    assert done.status not in (0, STOPPED), done.story
    summary = resumed(tmp_path)
    assert summary["staleness"]["max"] <= 4
    assert accuracy(tmp_path) > accuracy(uninterrupted) - 0.06


@pytest.mark.parametrize(("to", "bound"), [("rank 0", 0), ("mpirun", 4)])
def test_asked_to_stop(tmp_path: Path, uninterrupted: Path, to: str, bound: int) -> None:
    with started(command(*recipe(tmp_path, bound), ranks=RANKS), tmp_path) as job:
        wait_until_saved(job, tmp_path, moment())
        os.kill(job.pid if to == "mpirun" else process_of_rank(job, 0), signal.SIGUSR1)
        done = finished(job, seconds=60)
    assert done.status == STOPPED, done.story
    assert "Traceback" not in done.err
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "stopped"
    saved = max(complete(tmp_path / "run" / "checkpoints")).name
    assert saved == f"samples-{summary['samples_applied']:012d}"
    assert 0 < summary["samples_applied"] < SAMPLES
    resumed(tmp_path)
    assert accuracy(tmp_path) > accuracy(uninterrupted) - 0.06
