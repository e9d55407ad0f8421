from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetsync import shortage as shortages
from hetsync.shortage import can_start_threads, killed_for_memory, shortage

IN_LITTLE_SHARED_MEMORY = """
import torch
from torch.utils.data import TensorDataset
from hetsync.data.workers import FetchProcesses
from hetsync.errors import UserError

if __name__ == "__main__":
    try:
        FetchProcesses(TensorDataset(torch.zeros(1_000_000)), None, 1)
    except UserError as mistake:
        print(mistake)
"""
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
OF_THREADS = (
    "from hetsync.shortage import can_start_threads, no_processes; print(can_start_threads(16), no_processes())"
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("unable to allocate shared memory(shm) for file </t>: No space left on device (28)"), "/dev/shm"),
        (
            RuntimeError("unable to allocate shared memory(shm) for file </t>: No such file or directory (2)"),
            "/dev/shm",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "/dev/shm"),
        (RuntimeError("can't start new thread"), "no more threads"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no more threads"),
        (RuntimeError("Resource temporarily unavailable"), "no more threads"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), None),
        (RuntimeError("unable to open shared memory object </t>: Too many open files (24)"), None),
    ],
)
def test_what_has_run_out_is_named(error: Exception, says: str | None) -> None:
    told = shortage(error)
    assert told is None if says is None else told is not None and says in told


@pytest.mark.parametrize(("before", "says"), [(3, None), (2, "killed 1 process of"), (0, "killed 3 processes of")])
def test_only_kills_of_this_job_are_told(monkeypatch: pytest.MonkeyPatch, before: int, says: str | None) -> None:
    monkeypatch.setattr(shortages, "memory_kills", lambda: 3)
    told = killed_for_memory(before)
    assert told is None if says is None else told is not None and says in told


def test_threads_that_can_be_started_are_counted_once() -> None:
    assert can_start_threads(16)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="takes root, to mount a small one")
def test_full_shared_memory_is_told_by_its_name(tmp_path: Path) -> None:
    """It was taken for a data set that does not pickle."""
    (tmp_path / "script.py").write_text(IN_LITTLE_SHARED_MEMORY)
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "-m", "bash", "-c", mount, "-", sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    if "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("/dev/shm is full"), done.stderr
    assert "--shm-size" in done.stdout
    assert "lambda" not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes root, to become another user")
def test_a_limit_of_processes_is_told_with_its_number() -> None:
    limited = 'ulimit -u 6 && exec "$@"'
    words = [*NOBODY, "bash", "-c", limited, "-", "/usr/bin/env", f"PYTHONPATH={Path(__file__).parents[2]}"]
    words += ["python3", "-c", OF_THREADS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        pytest.skip(f"another user cannot read this installation: {done.stderr[-200:]}")
    assert done.stdout.startswith("False no more threads or processes can be started (ulimit -u is 6")
