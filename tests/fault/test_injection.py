"""Faults on order between ranks: what becomes of the job, and what it says.

Each case is a job of its own. python -m pytest tests/fault/test_injection.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Done, command, finished, mpirun, started, summary_of

ULFM = ["--with-ft", "ulfm"]


def job(folder: Path, ranks: int, faults: str, *words: str, samples: int = 1500) -> Done:
    told = ["--run.dir", "run", "--run.samples", str(samples), "--fault.inject", faults, *words]
    with started([*mpirun(ranks), *ULFM, *command(*told)], folder) as process:
        return finished(process)


def test_a_damaged_message_ends_the_job_in_a_sentence(tmp_path: Path) -> None:
    """Where a death would."""
    done = job(tmp_path, 2, "[{kind: corrupt, rank: 1, round: 2, when: after}]", "--fault.tolerate", "false")
    assert done.status == 1, done.story
    assert any("a message of rank 1 has arrived damaged" in sentence for sentence in done.sentences), done.story
    assert "Traceback" not in done.err, done.story


def test_what_can_be_outlived_is(tmp_path: Path) -> None:
    """A sum that comes late, gradients that are nan for once, a rank that stops for a moment, a death, another in the
    recovery from it, and a rank that stops for ever; a message that arrives damaged, and others that do not arrive, in
    training and in a recovery."""
    faults = (
        "[{kind: delay, rank: 1, round: 2, seconds: 0.2}, {kind: not_finite, rank: 1, round: 3},"
        " {kind: stop, rank: 2, round: 4, seconds: 0.5}, {kind: die, rank: 3, round: 8},"
        " {kind: die, rank: 4, when: recovery}, {kind: stop, rank: 5, round: 10}, {kind: corrupt, rank: 1, round: 6},"
        " {kind: drop, rank: 1, round: 7}, {kind: drop, rank: 2, when: recovery}]"
    )
    skip = ["--fault.not_finite", "skip"]
    # Equal shares: one that is nearly all of the batch, by a profile of a busy moment, would leave few rounds;
    # and samples for more than those that faults name, since a busy machine makes rounds large.
    done = job(tmp_path, 6, faults, *skip, "--fault.silent_seconds", "2", "--sync.shares", "equal", samples=3000)
    assert done.status == 0, done.story
    assert done.err.count("fault fired") == 13, done.story  # the plane tells of delays and messages, too
    assert "rank 5 (process " in done.err, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"]
    told = [(failure["rank"], failure["kind"]) for failure in summary["failures"]]
    assert sorted(each for each in told if each[1] != "damaged") == [
        (1, "not_finite"),
        (3, "died"),
        (4, "died"),
        (5, "silent"),
    ]
    assert (1, "damaged") in told


@pytest.mark.thorough
def test_a_synchronous_round_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    """Or anchors would differ at the end, which ends the job; what rounding keeps is not spoiled either."""
    words = ["--sync.delay_bound", "0", "--sync.wire", "int8", "--fault.not_finite", "skip"]
    done = job(tmp_path, 2, "[{kind: not_finite, rank: 1, round: 3}]", *words)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"]
    (failure,) = summary["failures"]
    assert (failure["rank"], failure["kind"], failure["samples_returned"]) == (1, "not_finite", 64)
