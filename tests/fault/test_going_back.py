"""fault.not_finite rollback between ranks: all go back to one checkpoint, and on from there.

Each case is a job of its own. python -m pytest tests/fault/test_going_back.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import Done, command, finished, mpirun, started, summary_of

BATCH = 64
SAMPLES = 48 * BATCH
CHECKPOINTS = 10 * BATCH


def job(folder: Path, ranks: int, faults: str, *words: str, program: Sequence[str] = ()) -> Done:
    """`program`: in place of hetsync-train."""
    every = ["--run.samples", str(SAMPLES), "--run.checkpoint_every", str(CHECKPOINTS)]
    rounds = ["--sync.shares", "equal", "--sync.quorum", "1.0"]  # of a batch or more
    told = ["--run.dir", "run", *every, *rounds, "--fault.not_finite", "rollback", "--fault.inject", faults, *words]
    train, *rest = command(*told)
    with started([*mpirun(ranks), "--with-ft", "ulfm", *(program or [train]), *rest], folder) as process:
        return finished(process)


@pytest.mark.parametrize("bound", ["0", "4"])
def test_all_ranks_go_back_in_place(tmp_path: Path, bound: str) -> None:
    """Ranks that differed at the end would end the job. Of sums that are rounded nothing is kept."""
    words = ["--sync.delay_bound", bound, "--sync.wire", "int8", "--sync.fragments", "2"]
    done = job(tmp_path, 2, "[{kind: not_finite, rank: 1, round: 15}]", *words)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    (rollback,) = summary["rollbacks"]
    assert rollback["rank"] == 1
    assert rollback["checkpoint_samples"] % CHECKPOINTS == 0
    computed = sum(rank["samples"] for rank in summary["per_rank"])
    assert computed == SAMPLES + rollback["samples"]


DYING = """
import os, signal, sys
from hetsync.cli.train import main
from hetsync.train import checkpoint

load, rank = checkpoint.load, int(os.environ["OMPI_COMM_WORLD_RANK"])
def dying(path):
    later = int(path.name.partition("-")[2]) > 640
    if (rank, later) in ((0, False), (3, True)):
        os.kill(os.getpid(), signal.SIGKILL)
    return load(path)
checkpoint.load = dying
main(sys.argv[1:])
"""


def test_deaths_on_the_way_back(tmp_path: Path) -> None:
    """Of the first rank, too, after which another has the books: each as it reads the checkpoint."""
    (tmp_path / "four.yaml").write_text("name: four\nsource: none\ndevices: [{name: a, count: 4, speed: 1}]\n")
    devices = ["--emulate", "four.yaml", "--emulation.samples_per_second", "300"]  # each has a part in rounds 14 and 35
    faults = "[{kind: not_finite, rank: 1, round: 14}, {kind: not_finite, rank: 2, round: 35}]"
    dying = [sys.executable, "-c", DYING]
    done = job(tmp_path, 4, faults, "--fault.least_ranks", "1", *devices, program=dying)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"]
    assert sorted(failure["rank"] for failure in summary["failures"] if failure["kind"] == "died") == [0, 3]
    assert [rollback["rank"] for rollback in summary["rollbacks"]] == [1, 2]


LATE = """
import os, signal, sys, time
from hetsync.cli.train import main
from hetsync.train import checkpoint

load, rank = checkpoint.load, int(os.environ["OMPI_COMM_WORLD_RANK"])
def late(path):
    time.sleep((0.0, 1.5, 0.5)[rank])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.load = load
    return load(path)
checkpoint.load = late
main(sys.argv[1:])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("bound", [pytest.param("0", marks=pytest.mark.thorough), "4"])
def test_a_death_while_some_have_gone_back_has_all_go_back_once_more(tmp_path: Path, bound: str) -> None:
    """Rank 0 has read the checkpoint, and rank 1 has not, when rank 2 dies. Statistics of batches travel, too."""
    words = ["--model.options", "{batch_norm: true}", "--sync.delay_bound", bound]
    done = job(tmp_path, 3, "[{kind: not_finite, rank: 1, round: 15}]", *words, program=[sys.executable, "-c", LATE])
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert summary["rollbacks"]
    assert [failure["rank"] for failure in summary["failures"] if failure["kind"] == "died"] == [2]


def test_where_there_is_no_checkpoint_one_sentence_says_so(tmp_path: Path) -> None:
    done = job(tmp_path, 2, "[{kind: not_finite, rank: 1, round: 2}]")
    assert done.status == 2, done.story
    (sentence,) = [each for each in done.sentences if "fault fired" not in each]
    assert "gradients were not finite on rank 1 in round" in sentence
    assert "there is no checkpoint yet to go back to" in sentence
