"""The controller's process dies, or cannot begin, or its job is killed and resumed.

Each case is jobs of their own, under mpirun. python -m pytest tests/fault
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from jobs import SECONDS, command, descendants, finished, run, started, summary_of

from hetsync.train.checkpoint import complete

RANKS = 2
SAMPLES = 3600
CLUSTER = "name: two\nsource: none\ndevices: [{name: a, speed: 2}, {name: b, speed: 1}]\n"


def recipe(folder: Path, controller: str, samples_per_second: int = 1200) -> list[str]:
    (folder / "two.yaml").write_text(CLUSTER)
    return [
        *("--run.dir", "run", "--run.samples", str(SAMPLES), "--run.checkpoint_every", "300"),
        *("--emulate", "two.yaml", "--emulation.samples_per_second", str(samples_per_second)),
        *("--control.name", controller, "--control.interval_seconds", "0.2", "--sync.rebalance", "false"),
    ]


def controllers(job: subprocess.Popen[str]) -> list[int]:
    """Ids of processes that Python has spawned."""
    found = []
    for pid in descendants(job):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in words:
            found.append(pid)
    return found


def until(job: subprocess.Popen[str], what: str, wanted: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not wanted():
        assert job.poll() is None, finished(job).story
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_killed_controller_is_reported_once_and_the_job_reaches_its_last_sample(tmp_path: Path) -> None:
    with started(command(*recipe(tmp_path, "random"), ranks=RANKS), tmp_path) as job:
        until(job, "there is no controller", lambda: controllers(job))
        (controller,) = controllers(job)
        os.kill(controller, signal.SIGKILL)
        done = finished(job)
    assert done.status == 0, done.story
    (sentence,) = done.sentences
    assert "the controller was ended by SIGKILL: training goes on without it, with accumulation" in sentence
    assert "Traceback" not in done.err, done.story
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["samples_applied"]) == ("finished", SAMPLES)
    assert summary["control"]["died"] == "was ended by SIGKILL"
    assert summary["staleness"]["max"] <= summary["control"]["delay_bound"][1]
    telemetry = (tmp_path / "run" / "telemetry" / "rank-0000.jsonl").read_text().splitlines()
    told = [record for record in map(json.loads, telemetry) if record["kind"] == "control" and "died" in record]
    assert len(told) == 1


def test_a_policy_that_cannot_be_read_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "old.safetensors").write_text("nothing")
    words = [*recipe(tmp_path, "ppo", 300), "--control.policy", "old.safetensors"]
    done = run(*words, folder=tmp_path, ranks=RANKS)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert "control.policy" in done.sentences[0]
    assert "Traceback" not in done.err, done.story


def test_stopped_by_a_signal_to_all_and_resumed_with_the_settings_that_were_in_force(tmp_path: Path) -> None:
    """By the schedule it is K <= 4 and D <= 4 from the first window on, whatever the recipe begins with."""
    far = ["--sync.accumulation", "8", "--sync.delay_bound", "16"]

    def tuned() -> bool:
        found = complete(tmp_path / "run" / "checkpoints")
        return bool(found) and json.loads((found[-1] / "state.json").read_text())["progress"]["accumulation"] < 8

    with started(command(*recipe(tmp_path, "schedule", 200), *far, ranks=RANKS), tmp_path) as job:
        until(job, "it was not tuned", tuned)
        (controller,) = controllers(job)
        os.kill(controller, signal.SIGUSR1)  # as some launchers do
        job.send_signal(signal.SIGUSR1)
        done = finished(job)
    assert done.status == 85, done.story
    assert done.sentences == []
    assert gone(controller)
    stopped = summary_of(tmp_path / "run")
    assert stopped["control"]["died"] is None
    assert stopped["control"]["accumulation"][1] == 8
    done = run("--resume", "run", "--emulation.samples_per_second", "1200", folder=tmp_path, ranks=RANKS)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == SAMPLES
    assert summary["control"]["accumulation"][1] <= 4
    assert summary["control"]["delay_bound"][1] <= 4
