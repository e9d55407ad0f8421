"""Jobs whose ranks do not come together: one sentence, and all end in time, whoever has started them.

python -m pytest tests/fault
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, ranks_alone, started

JOB_SECONDS = 60.0
TIMEOUT_SECONDS = 8.0
RANKS = 3

# Rank 1 is made to differ before it opens its plane.
SCRIPT = """
import os, sys, time
import hetsync.plane.greeting
from hetsync.plane import open_plane
from hetsync.plane.ending import opening

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
name, tolerate = "auto", True
if rank == 1:
    print("differs", flush=True)
    {fault}
with opening():
    plane = open_plane(name, {seconds}, tolerate)
print("opened", plane.rank, flush=True)
plane.close()
"""
BY = ["hand", "mpirun", "ulfm"]


def job(folder: Path, by: str, fault: str) -> Done:
    """By hand each rank ends by itself, without a launcher to end the others; the job's status is then their least."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(fault=fault, seconds=TIMEOUT_SECONDS))
    words, env = [sys.executable, str(script)], {"PYTHONPATH": str(ROOT)}
    if by == "hand":
        with ranks_alone(RANKS, words, folder, env) as ranks:
            ended = [finished(rank, JOB_SECONDS) for rank in ranks]
        done = Done(min(each.status for each in ended), "", "")
        done.out, done.err = "".join(each.out for each in ended), "".join(each.err for each in ended)
    else:
        flags = ["--with-ft", "ulfm"] if by == "ulfm" else []
        with started([*mpirun(RANKS), *flags, *words], folder, env) as process:
            done = finished(process, JOB_SECONDS)
    assert "differs" in done.out, "the fault has struck"
    return done


DIFFERENCES = [
    ("hetsync.plane.greeting.version_with_commit = lambda: '0.0.9'", "has HetSync 0.0.9, but rank 0 on "),
    ("name = 'local'", "hetsync: rank 1: run.plane is local, but 3 ranks were started"),
    ("tolerate = False", "hetsync: fault.tolerate is False on rank 1, but True on rank 0: give all ranks the same"),
]


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("by", "fault", "sentence"),
    [
        pytest.param(by, *difference, marks=[] if at == place else pytest.mark.thorough)
        for at, by in enumerate(BY)
        for place, difference in enumerate(DIFFERENCES)
    ],
)
def test_a_rank_that_differs_ends_all_with_one_sentence(tmp_path: Path, by: str, fault: str, sentence: str) -> None:
    done = job(tmp_path, by, fault)
    assert done.status == 2, done.story
    assert "opened" not in done.out
    (said,) = done.sentences
    assert sentence in said, done.story
    assert "Traceback" not in done.err, done.story


@pytest.mark.each_value(1)
@pytest.mark.parametrize("by", ["mpirun", pytest.param("ulfm", marks=pytest.mark.thorough), "hand"])
def test_a_rank_that_never_comes_ends_all(tmp_path: Path, by: str) -> None:
    done = job(tmp_path, by, "time.sleep(30); sys.exit(2)  # or till it is ended")
    assert done.status in (1, 2), done.story
    (said,) = done.sentences
    assert f"waited {TIMEOUT_SECONDS:.0f} s for " in said, done.story
    assert ("rank 1 to come" if by == "hand" else "to start MPI") in said, done.story
