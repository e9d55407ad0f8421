"""launch/slurm.sbatch on a real SLURM: asked to stop, a job checkpoints, is requeued, resumes, finishes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = Path(__file__).with_name("slurm_lab.sh")
SAMPLES = 6000

pytestmark = pytest.mark.skipif(
    "HETSYNC_TEST_SLURM" not in os.environ,
    reason="starts SLURM daemons: set HETSYNC_TEST_SLURM=1 (takes two minutes)",
)


def _missing() -> str | None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    needed = ("slurmctld", "slurmd", "sbatch", "munged")
    absent = [name for name in needed if not shutil.which(name, path=path)]
    if absent:
        return f"not installed here: {', '.join(absent)}"
    return "SLURM's daemons need root" if os.geteuid() != 0 else None


@pytest.fixture(scope="module")
def slurm() -> Iterator[Callable[..., str]]:
    """Runs one of SLURM's commands against a cluster of this test's own; returns its output."""
    reason = _missing()
    if reason:
        pytest.skip(reason)
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: there are sockets in it
    environment = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
    subprocess.run([LAB, "up", base], check=True, timeout=60)

    def command(*words: str) -> str:
        done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    try:
        yield command
    finally:
        subprocess.run([LAB, "down", base], check=True, timeout=120)
        shutil.rmtree(base, ignore_errors=True)


def _submit(slurm: Callable[..., str], folder: Path, *arguments: str) -> str:
    setting = f"ALL,HETSYNC_ROOT={ROOT},RUN_DIR={folder / 'run'}"
    options = ["--parsable", f"--export={setting}", f"--output={folder / 'out'}", f"--chdir={folder}"]
    return slurm("sbatch", *options, str(ROOT / "launch" / "slurm.sbatch"), *arguments)


def _state(slurm: Callable[..., str], job: str) -> dict[str, str]:
    words = slurm("scontrol", "--oneliner", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _wait(what: str, seconds: float, reached: Callable[[], bool], output: Path) -> None:
    end = time.monotonic() + seconds
    while not reached():
        said = output.read_text() if output.exists() else "nothing"
        assert time.monotonic() < end, f"no {what} after {seconds:.0f} s; the job said:\n{said}"
        time.sleep(0.5)


def _start_requeued(slurm: Callable[..., str], job: str, output: Path) -> None:
    """SLURM holds a requeued job back for two minutes; this does not."""
    _wait("requeued job", 40, lambda: _state(slurm, job)["JobState"] == "PENDING", output)
    slurm("scontrol", "update", f"jobid={job}", "StartTime=now")


def test_stopped_job_is_requeued_and_resumes(slurm: Callable[..., str], tmp_path: Path) -> None:
    output, run = tmp_path / "out", tmp_path / "run"
    arguments = ["--emulate", "quickstart", "--run.samples", str(SAMPLES), "--run.checkpoint_every", "1000"]
    job = _submit(slurm, tmp_path, *arguments)
    _wait("checkpoint", 90, lambda: any(run.glob("checkpoints/samples-*")), output)
    slurm("scancel", "--batch", "--signal=USR1", job)
    _start_requeued(slurm, job, output)

    stopped_at = max(int(path.name.removeprefix("samples-")) for path in run.glob("checkpoints/samples-*"))
    assert 0 < stopped_at < SAMPLES
    assert "stopped on request and requeued" in output.read_text()

    _wait("end", 90, lambda: _state(slurm, job)["JobState"] == "COMPLETED", output)
    assert _state(slurm, job)["Restarts"] == "1"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples_applied"] == SAMPLES


def test_request_before_training_begins_loses_nothing(slurm: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = _submit(slurm, tmp_path, "--emulate", "quickstart", "--run.samples", "1000")
    _wait("start", 60, lambda: output.exists() and "restart 0" in output.read_text(), output)
    time.sleep(1.0)
    slurm("scancel", "--batch", "--signal=USR1", job)
    _start_requeued(slurm, job, output)
    _wait("end", 90, lambda: _state(slurm, job)["JobState"] == "COMPLETED", output)


def test_failed_job_is_not_requeued(slurm: Callable[..., str], tmp_path: Path) -> None:
    job = _submit(slurm, tmp_path, "--run.samples", "0")
    _wait("failure", 60, lambda: _state(slurm, job)["JobState"] == "FAILED", tmp_path / "out")
    assert _state(slurm, job)["ExitCode"] == "2:0"
    assert "requeued" not in (tmp_path / "out").read_text()
