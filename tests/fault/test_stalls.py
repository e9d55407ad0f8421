"""A rank that does not come along ends the job in time, and the last words name it.

Each case is a job of its own, under mpirun. python -m pytest tests/fault
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from jobs import ROOT, Done, finished, mpirun, run, started

RANKS = 2
LIMIT = 2

JOB = """
import os, signal, sys, time
from training import train
from hetsync.cli.shared import on_all_ranks
from hetsync.config.schema import Config, SyncConfig
from hetsync.plane.faulty import FaultyPlane, Stall
from hetsync.train.terms import NoEvaluation

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
        if plane.rank == late and how in ("frozen in a sum", "absent from a sum"):
            session.engine.allreduce = in_a_sum

    def in_a_sum(tensor):
        if how == "frozen in a sum":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)

    def at_rest(outcome):
        if plane.rank == late and how == "saves":
            time.sleep(1.2 * LIMIT)

    class Evaluation(NoEvaluation):
        def score(self, shares):
            scored.append(plane.rank)
            if plane.rank == late and how == "evaluates":
                time.sleep(100)
            return {}

    train(
        FaultyPlane(plane, faults),
        SyncConfig(bound, 0.25, rebalance=False),
        samples=2000 if how == "saves" else 100000,
        rests=[1000],
        at_rest=at_rest,
        on_slice=on_slice,
        timeout_seconds=LIMIT,
        evaluate_every=1000,
        scorer=Evaluation(),
    )
    return 0

sys.exit(on_all_ranks(Config(), job))
""".replace("LIMIT", str(LIMIT))


def job(folder: Path, bound: int, late: int, how: str) -> Done:
    words = [*mpirun(RANKS), sys.executable, "-c", JOB, str(bound), str(late), how]
    path = {"PYTHONPATH": f"{ROOT / 'tests' / 'mpi'}:{ROOT}"}
    with started(words, folder, path) as process:
        return finished(process, seconds=60)


@pytest.mark.each_value(4)
@pytest.mark.parametrize(
    ("how", "bound", "late", "story"),
    [
        ("busy", 0, 1, "still on its task or its evaluation: rank 1 "),
        ("busy later", 4, 1, "still on its task or its evaluation: rank 1 "),
        pytest.param("busy later", 0, 1, "still on its task or its evaluation: rank 1 ", marks=pytest.mark.thorough),
        ("busy", 4, 0, "still on its task or its evaluation: rank 0 |no word from rank 0 "),
        ("evaluates", 4, 1, "still on its task or its evaluation: rank 1 "),
        pytest.param("evaluates", 0, 1, "still on its task or its evaluation: rank 1 ", marks=pytest.mark.thorough),
        ("stalled", 4, 1, "rank 1 has not joined it"),
        ("frozen", 4, 1, "no sign of life from rank 1"),
        ("frozen", 0, 0, "no word from rank 0 "),
        ("frozen in a sum", 4, 1, "no sign of life from rank 1"),
        pytest.param("frozen in a sum", 4, 0, "no word from rank 0 ", marks=pytest.mark.thorough),
        ("absent from a sum", 4, 1, "rank 1 has not joined it"),
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
    if late == 1 and how == "frozen":
        assert re.search(r"; rank 1: process \d+ on \S+, which is stopped", said[0]), done.story
    if late == 1 and how == "busy":
        assert re.search(r"; rank 1: process \d+ on \S+, computing for \d+ s", said[0]), done.story
        assert "in on_slice" in done.err, done.story


def test_rank_0_may_take_its_time_at_rest(tmp_path: Path) -> None:
    """It saves; the others wait for it longer than for each other."""
    done = job(tmp_path, 4, 0, "saves")
    assert done.status == 0, done.story


EXIT = """
import sys
from training import train
from hetsync.cli.shared import on_all_ranks
from hetsync.config.schema import Config, SyncConfig

bound, code = int(sys.argv[1]), eval(sys.argv[2])

def job(plane):
    def on_slice(session, number):
        if plane.rank == plane.size - 1 and number == 3:
            sys.exit(code)

    train(plane, SyncConfig(bound, 0.25, rebalance=False), samples=100000, on_slice=on_slice, timeout_seconds=600)
    return 0

sys.exit(on_all_ranks(Config(), job))
"""


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("ranks", "bound", "code", "status"),
    [(1, 4, "no more data", 1), (RANKS, 4, "no more data", 1), (RANKS, 0, 3, 3), (RANKS, 4, None, 0)],
)
def test_an_exit_on_one_rank_ends_the_job_with_its_code(
    tmp_path: Path, ranks: int, bound: int, code: object, status: int
) -> None:
    words = [*mpirun(ranks), sys.executable, "-c", EXIT, str(bound), repr(code)]
    with started(words, tmp_path, {"PYTHONPATH": f"{ROOT / 'tests' / 'mpi'}:{ROOT}"}) as process:
        done = finished(process, seconds=60)
    assert done.status == status, done.story
    assert "Traceback" not in done.err, done.story
    assert any(f"rank {ranks - 1}" in line and "sys.exit" in line for line in done.sentences) == (ranks > 1), done.story
    assert ("no more data" in done.err) == (code == "no more data")


CHAIN = """
import os, time
from pathlib import Path
from torch import nn

class Norm(nn.BatchNorm1d):
    def forward(self, x):
        saved = any(Path("run/checkpoints").glob("samples-*"))
        if saved and os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["LATE"]:
            time.sleep(100)
        return super().forward(x)

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Norm(16))
        self.last = nn.Sequential(Norm(16), nn.Linear(16, 10))

    def forward(self, x):
        return self.last(self.first(x))
"""


@pytest.mark.each_value(1)
@pytest.mark.parametrize("late", [0, 1])
def test_who_waits_for_a_tensor_of_a_stage_names_its_sender(tmp_path: Path, late: int) -> None:
    """The first stage hangs in a forward pass, or the last: the other waits for activations, or for gradients."""
    (tmp_path / "mine.py").write_text(CHAIN)
    stages = [{"ranks": [0], "blocks": ["first"]}, {"ranks": [1], "blocks": ["last"]}]
    plan = {"format": 1, "batch_size": 64, "replicas": [{"micro_batches": 4, "stages": stages}]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    words = ["--model.name", "mine:Chain", "--plan", "plan.yaml", "--run.dir", "run", "--run.samples", "640"]
    words += ["--run.checkpoint_every", "128", "--run.timeout_seconds", str(4 * LIMIT)]
    done = run(*words, folder=tmp_path, ranks=RANKS, env={"LATE": str(late)})
    assert done.status not in (0, 85), done.story
    assert "Traceback" not in done.err, done.story
    (said,) = done.sentences
    assert f"rank {1 - late}: waited {4 * LIMIT} s for rank {late} (raise run.timeout_seconds" in said, done.story
