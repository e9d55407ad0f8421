"""All who kept the books die at once: the others go back to the newest checkpoint, in place.

Each case is a job of its own. python -m pytest tests/fault/test_books_lost.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Done, command, finished, mpirun, started, summary_of

BATCH = 64
SAMPLES = 40 * BATCH
CHECKPOINTS = 10 * BATCH


def job(folder: Path, ranks: int, round_number: int, *words: str) -> Done:
    """Rank 0 dies in this round, and the two other keepers as soon as the plane is mended."""
    dies = ", ".join(f"{{kind: die, rank: {rank}, when: recovery}}" for rank in (1, 2))
    told = ["--run.dir", "run", "--run.samples", SAMPLES, "--run.checkpoint_every", CHECKPOINTS]
    told += ["--sync.shares", "equal", "--sync.quorum", "1.0", "--fault.least_ranks", "1"]  # rounds of a batch
    told += ["--fault.inject", f"[{{kind: die, rank: 0, round: {round_number}}}, {dies}]", *words]
    with started([*mpirun(ranks), "--with-ft", "ulfm", *command(*told)], folder) as process:
        return finished(process)


@pytest.mark.parametrize("bound", [pytest.param("0", marks=pytest.mark.thorough), "4"])
def test_the_others_go_back_in_place(tmp_path: Path, bound: str) -> None:
    """Ranks that differed at the end would end the job."""
    done = job(tmp_path, 5, 16, "--sync.delay_bound", bound, "--run.evaluate_every", str(4 * BATCH))
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert sorted(failure["rank"] for failure in summary["failures"]) == [0, 1, 2]
    (rollback,) = summary["rollbacks"]
    assert (rollback["cause"], rollback["rank"]) == ("books_lost", 0)
    assert rollback["checkpoint_samples"] > 0
    assert rollback["checkpoint_samples"] % CHECKPOINTS == 0
    assert f"go back to the checkpoint of {rollback['checkpoint_samples']} samples" in done.out, done.story


@pytest.mark.thorough
def test_where_there_is_no_checkpoint_one_sentence_says_so(tmp_path: Path) -> None:
    done = job(tmp_path, 4, 2)
    assert done.status == 1, done.story
    (sentence,) = [each for each in done.sentences if "fault fired" not in each]
    assert "all ranks that kept the books have gone" in sentence
    assert "there is no checkpoint yet to go back to" in sentence
