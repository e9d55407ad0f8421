"""Errors, deaths and signals among ranks that share a stage: the whole job ends at once, with a sentence and a status.

Each case is a job of its own. python -m pytest tests/fault/test_planned_groups.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import SECONDS, command, finished, mpirun, ranks_alone, started, summary_of
from test_kill_and_resume import newest, process_of_rank

RANKS = 4
SAMPLES = 24_000  # minutes
TERMINATED = 143
MEMBER = 2  # of the ranks that share a stage, not the first
CLUSTER = "name: four\nsource: none\ndevices: [{name: a, count: 4, speed: 1}]\n"
PLAN = """
format: 1
batch_size: 48
replicas:
- micro_batches: 2
  stages:
  - {ranks: [0], blocks: [features]}
  - {ranks: [1, 2], blocks: [classifier]}
- stages: [{ranks: [3], blocks: ['*']}]
"""
DATA = """
import os
from dataclasses import replace

from hetsync import data

calls = 0


def build(**options):
    digits = data.build("digits", options)

    def loss(model, batch):
        global calls
        calls += 1
        if calls > 200 and os.environ.get("OMPI_COMM_WORLD_RANK") == "2":
            raise ValueError("this loss knows no more")
        return digits.loss(model, batch)

    return replace(digits, loss=loss)
"""
bounds = pytest.mark.parametrize("bound", [0, 4])


def job(folder: Path, bound: int, *words: str, samples: int = SAMPLES) -> list[str]:
    """Emulated devices make it last, and its ranks are as fast as each other."""
    (folder / "four.yaml").write_text(CLUSTER)
    (folder / "plan.yaml").write_text(PLAN)
    mine = ["--run.dir", "run", "--run.samples", samples, "--run.checkpoint_every", 480, "--plan", "plan.yaml"]
    mine += ["--data.batch_size", 48, "--emulate", "four.yaml", "--emulation.samples_per_second", 800]
    return command(*mine, "--sync.delay_bound", bound, *words)


def trains(processes: list[subprocess.Popen[str]], folder: Path) -> None:
    """Waits for the first checkpoint."""
    deadline = time.monotonic() + SECONDS
    while not newest(folder):
        ended = [finished(process).story for process in processes if process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline, "nothing was saved in time"
        time.sleep(0.01)


@pytest.mark.each_value(1)
@bounds
def test_a_mistake_of_the_users_on_one_of_them(tmp_path: Path, bound: int) -> None:
    (tmp_path / "faulty.py").write_text(DATA)
    words = job(tmp_path, bound, "--data.name", "faulty:build")
    with started([*mpirun(RANKS), *words], tmp_path, {"PYTHONPATH": str(tmp_path)}) as process:
        done = finished(process)
    assert done.status == 1, done.story
    assert done.sentences == [f"hetsync: rank {MEMBER}: failed, so the job ends"], done.story
    assert "ValueError: this loss knows no more" in done.err, done.story
    assert summary_of(tmp_path / "run")["status"] == "failed"


@pytest.mark.each_value(1)
@bounds
def test_a_death_where_mpi_tells_of_it(tmp_path: Path, bound: int) -> None:
    with started([*mpirun(RANKS), "--with-ft", "ulfm", *job(tmp_path, bound)], tmp_path) as process:
        trains([process], tmp_path)
        os.kill(process_of_rank(process, MEMBER), signal.SIGKILL)
        done = finished(process)
    assert done.status not in (0, -signal.SIGKILL), done.story
    assert any(f"rank {MEMBER} " in each for each in done.sentences), done.story
    assert "Traceback" not in done.err, done.story


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("bound", "dead"),
    [
        (0, {MEMBER}),
        (4, {MEMBER}),
        (4, {0}),  # who decides, and leads
        (4, {3}),  # who is a replica alone
        pytest.param(0, {0}, marks=pytest.mark.thorough),
        pytest.param(4, {1}, marks=pytest.mark.thorough),
        (4, {1, 3}),
    ],
)
def test_a_death_where_ranks_are_alone(tmp_path: Path, bound: int, dead: set[int]) -> None:
    with ranks_alone(RANKS, job(tmp_path, bound), tmp_path) as processes:
        trains(processes, tmp_path)
        for rank in dead:
            processes[rank].kill()
        ends = [finished(process) for process in processes]
    stories = [done.story for done in ends]
    assert [done.status for done in ends] == [-signal.SIGKILL if rank in dead else 1 for rank in range(RANKS)], stories
    said = [sentence for done in ends for sentence in done.sentences]  # who says it first ends the others
    assert any(
        f"rank {rank} has gone" in each or f"lost rank {rank}, which" in each for rank in dead for each in said
    ), stories
    assert not any("Traceback" in done.err for done in ends), stories


@pytest.mark.each_value(1)
@bounds
def test_a_signal_to_one_of_them_saves(tmp_path: Path, bound: int) -> None:
    with started([*mpirun(RANKS), *job(tmp_path, bound)], tmp_path) as process:
        trains([process], tmp_path)
        os.kill(process_of_rank(process, MEMBER), signal.SIGTERM)
        done = finished(process)
    assert done.status == TERMINATED, done.story
    assert "Traceback" not in done.err, done.story
    stopped = summary_of(tmp_path / "run")
    assert stopped["status"] == "stopped"
    assert newest(tmp_path) == stopped["samples_applied"] < SAMPLES

    more = stopped["samples_applied"] + 480
    words = command("--resume", "run", "--run.samples", more, ranks=RANKS)
    with started(words, tmp_path) as process:
        done = finished(process)
    assert done.status == 0, done.story
    assert summary_of(tmp_path / "run")["samples_applied"] == more
