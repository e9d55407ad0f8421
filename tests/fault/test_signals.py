"""A job that is asked to stop by a signal saves, says how to go on, and ends with a status that says why.

python -m pytest tests/fault
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SECONDS, command, finished, local_launcher, program, started, summary_of
from test_kill_and_resume import newest, process_of_rank

SAMPLES = 100_000  # minutes
SIGNALS = 300
STOPPED, TERMINATED, INTERRUPTED, HUNG_UP = 85, 143, 130, 129


def words(*more: str) -> list[str]:
    """Emulated devices make it last."""
    return [
        *("--run.dir", "run", "--run.samples", str(SAMPLES), "--run.checkpoint_every", "300"),
        *("--emulate", "cluster.yaml", "--emulation.samples_per_second", "1000", *more),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text("name: two\nsource: none\ndevices: [{name: a, count: 2, speed: 1}]\n")
    return tmp_path


def trains(job: subprocess.Popen[str], folder: Path) -> None:
    """Waits for the first checkpoint."""
    deadline = time.monotonic() + SECONDS
    while not newest(folder):
        assert job.poll() is None, finished(job).story
        assert time.monotonic() < deadline, "nothing was saved in time"
        time.sleep(0.01)


def assert_saved(folder: Path, said: str) -> None:
    summary = summary_of(folder / "run")
    assert summary["status"] == "stopped"
    assert newest(folder) == summary["samples_applied"] > 0
    assert "hetsync-train --resume" in said


@pytest.mark.each_value(1)
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, TERMINATED),
        pytest.param(signal.SIGINT, INTERRUPTED, marks=pytest.mark.thorough),
        (signal.SIGHUP, HUNG_UP),
    ],  # SIGUSR1: the storm
)
def test_one_process_saves(folder: Path, number: signal.Signals, status: int) -> None:
    """The signal goes to all of its processes, as a terminal sends it; a data worker leaves it to the main process."""
    with started(command(*words("--data.workers", "1")), folder) as job:
        trains(job, folder)
        os.killpg(job.pid, number)
        done = finished(job, seconds=60)
    assert done.status == status, done.story
    assert "Traceback" not in done.err, done.story
    assert_saved(folder, done.out)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_the_second_signal_ends_at_once(folder: Path, number: signal.Signals) -> None:
    """Slices of several seconds: the first alone would take until one is over."""
    slow = words("--data.batch_size", "64", "--emulation.samples_per_second", "4", "--run.checkpoint_every", "null")
    with started(command(*slow), folder) as job:
        deadline = time.monotonic() + SECONDS
        while not list((folder / "run").glob("telemetry/rank-*.jsonl")):
            assert job.poll() is None, finished(job).story
            assert time.monotonic() < deadline, "it has not begun"
            time.sleep(0.05)
        time.sleep(2)
        job.send_signal(number)
        time.sleep(0.5)
        assert job.poll() is None, "the first one ended it"
        job.send_signal(number)
        done = finished(job, seconds=10)
    assert done.status == -number, done.story


def storm(processes: Callable[[], list[int]]) -> None:
    """Hundreds of SIGUSR1 to each, as long as there are any."""
    for _ in range(SIGNALS):
        for pid in processes():
            try:
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                return
        time.sleep(0.003)


@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.thorough), 2])
def test_a_storm_of_signals(folder: Path, ranks: int | None) -> None:
    with started(command(*words(), ranks=ranks), folder) as job:
        trains(job, folder)
        pids = [job.pid] if ranks is None else [process_of_rank(job, rank) for rank in range(ranks)]
        striker = threading.Thread(target=storm, args=(lambda: pids,))
        striker.start()
        done = finished(job, seconds=60)
        striker.join()
    assert done.status == STOPPED, done.story
    assert_saved(folder, done.out)


PROGRAMS = {"PATH": f"{Path(program('hetsync-train')).parent}:{os.environ['PATH']}"}


@pytest.mark.each_value(1)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_search_for_a_plan_ends_with_the_best_so_far(folder: Path, ranks: str) -> None:
    search = [program("hetsync"), "plan", "--emulate", "cluster.yaml", "--search", "random"]
    search += ["--evaluations", "1000000000", "--run.profile_seconds", "0.1", "--output", "plan.yaml"]
    env = {**PROGRAMS, "XDG_CACHE_HOME": str(folder / "cache")}
    with started([local_launcher(folder), ranks, "--", *search], folder, env) as job:
        deadline = time.monotonic() + SECONDS
        while not list(folder.glob("cache/hetsync/plan/*.json")):  # blocks have been measured
            assert job.poll() is None, finished(job).story
            assert time.monotonic() < deadline, "nothing was measured in time"
            time.sleep(0.1)
        time.sleep(3.0)
        os.killpg(job.pid, signal.SIGINT)
        done = finished(job, seconds=60)
    assert done.status == INTERRUPTED, done.story
    assert "this is the best so far" in done.err
    assert "random: the best of " in done.out
    assert (folder / "plan.yaml").exists()


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, TERMINATED),
        (signal.SIGINT, INTERRUPTED),
        (signal.SIGHUP, HUNG_UP),
        (signal.SIGUSR1, STOPPED),
    ],
)
def test_the_local_launcher_lets_signals_through(folder: Path, number: signal.Signals, status: int) -> None:
    """mpirun itself would kill the ranks within half a second."""
    with started([local_launcher(folder), "2", *words()], folder, PROGRAMS) as job:
        trains(job, folder)
        os.killpg(job.pid, number)
        done = finished(job, seconds=60)
    assert done.status == status, done.story
    assert_saved(folder, done.out)
