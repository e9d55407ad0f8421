"""A rank that does not come along ends the job in time, and the last words name it.

Each case is a job of its own, under mpirun. python -m pytest tests/fault
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, started

RANKS = 2
LIMIT = 2

JOB = """
import os, signal, sys, time
from training import train
from hetsync.cli import on_all_ranks
from hetsync.config import RunConfig, SyncConfig
from hetsync.plane.faulty import FaultyPlane, Stall
from hetsync.session import Evaluator

bound, late, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def job(plane):
    scored = []
    faults = [Stall(late, 5)] if how == "stalled" else []

    def on_slice(session, number):
        if plane.rank == late and number == 2:
            if how == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "busy":
                time.sleep(100)
        if plane.rank == late and how == "busy later" and scored and number > 2:
            time.sleep(100)

    class Evaluation(Evaluator):
        def score(self):
            scored.append(plane.rank)
            if plane.rank == late and how == "evaluates":
                time.sleep(100)
            return {}

    train(
        FaultyPlane(plane, faults),
        SyncConfig(bound, 0.25, rebalance=False),
        samples=100000,
        on_slice=on_slice,
        timeout_seconds=LIMIT,
        evaluate_every=1000,
        evaluator=Evaluation(),
    )
    return 0

sys.exit(on_all_ranks(RunConfig(), job))
""".replace("LIMIT", str(LIMIT))


def job(folder: Path, bound: int, late: int, how: str) -> Done:
    words = [*mpirun(RANKS), sys.executable, "-c", JOB, str(bound), str(late), how]
    path = {"PYTHONPATH": f"{ROOT / 'tests' / 'mpi'}:{ROOT}"}
    with started(words, folder, path) as process:
        return finished(process, seconds=90)


@pytest.mark.parametrize(
    ("how", "bound", "late", "story"),
    [
        ("busy", 0, 1, "still on its piece or its evaluation: rank 1 "),
        ("busy later", 4, 1, "still on its piece or its evaluation: rank 1 "),
        ("busy later", 0, 1, "still on its piece or its evaluation: rank 1 "),
        ("busy", 4, 0, "still on its piece or its evaluation: rank 0 |no word from rank 0 "),
        ("evaluates", 4, 1, "still on its piece or its evaluation: rank 1 "),
        ("evaluates", 0, 1, "still on its piece or its evaluation: rank 1 "),
        ("stalled", 4, 1, "rank 1 has not joined it"),
        ("frozen", 4, 1, "no sign of life from rank 1"),
        ("frozen", 0, 0, "no word from rank 0 "),
    ],
)
def test_the_last_words_name_who_is_late(tmp_path: Path, how: str, bound: int, late: int, story: str) -> None:
    done = job(tmp_path, bound, late, how)
    assert done.status not in (0, 85), done.story
    assert "Traceback" not in done.err, done.story
    if how == "stalled":
        assert f"fault fired: Stall(rank={late}, nth=5)" in done.err
    said = [line for line in done.sentences if "nothing moved" in line or "no word" in line]
    assert said, done.story
    assert all(re.search(story, line) for line in said), done.story
