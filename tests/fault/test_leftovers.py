"""A job that was killed by -9 leaves mpirun's files behind: none of them may stop a later job.

python -m pytest tests/fault/test_leftovers.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import SECONDS, Done, environment, finished, local_launcher, mpirun, started

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
TRIES = 100  # another process may come in between and take the id
NOT_STARTED = 213  # of mpirun: "The PMIx server's listener thread failed to start"

pytestmark = pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="process ids cannot be chosen here")


def leave_files_behind(folder: Path) -> int:
    """Kills an mpirun whose files are in this folder; its process id."""
    words = [*mpirun(1), "sleep", "100"]
    with subprocess.Popen(words, env=environment(TMPDIR=str(folder)), start_new_session=True) as job:
        deadline = time.monotonic() + SECONDS
        while not list(folder.rglob(f"pmix.*.tool.{job.pid}")):
            assert time.monotonic() < deadline, f"no contact file in {list(folder.rglob('*'))}"
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGKILL)
    return job.pid


def started_as(pid: int, words: list[str], folder: Path) -> Done:
    """With this process id, and with this folder for what has no better place."""
    for _ in range(TRIES):
        LAST_PID.write_text(str(pid - 1))
        with started(words, folder, {"TMPDIR": str(folder)}) as job:
            if job.pid == pid:
                return finished(job)
    pytest.skip(f"other processes took the id {pid} each time")


def test_a_job_of_the_tests_starts_beside_what_a_killed_one_has_left(tmp_path: Path) -> None:
    pid = leave_files_behind(tmp_path)
    in_the_usual_folder = ["env", "-u", "PRTE_MCA_prte_tmpdir_base", *mpirun(1), "true"]
    refused = started_as(pid, in_the_usual_folder, tmp_path)
    assert refused.status == NOT_STARTED, refused.story  # or else there is nothing to guard against
    done = started_as(pid, [*mpirun(1), "true"], tmp_path)
    assert done.status == 0, done.story


@pytest.mark.thorough
def test_the_local_launcher_gives_mpirun_a_folder_of_its_own(tmp_path: Path) -> None:
    """Its mpirun's process id cannot be chosen; but nothing of it is where another job's files could be."""
    told = ["bash", "-c", 'echo "$TMPDIR $PMIX_SERVER_TMPDIR"']
    words = ["env", "-u", "PRTE_MCA_prte_tmpdir_base", local_launcher(tmp_path), "1", "--", *told]
    path = f"{Path(mpirun(1)[0]).parent}:{os.environ['PATH']}"
    seen = set()
    for _ in range(2):
        with started(words, tmp_path, {"TMPDIR": str(tmp_path), "PATH": path}) as job:
            done = finished(job)
        assert done.status == 0, done.story
        of_the_ranks, of_mpirun = done.out.split()
        assert of_the_ranks == str(tmp_path)
        assert Path(of_mpirun).parent.parent == tmp_path
        seen.add(Path(of_mpirun).parent)
    assert len(seen) == 2
    assert not any(folder.exists() for folder in seen)
