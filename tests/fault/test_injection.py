"""Faults on order between ranks: what becomes of the job, and what it says.

Each case is a job of its own. python -m pytest tests/fault/test_injection.py
"""

from __future__ import annotations

from pathlib import Path

from jobs import Done, command, finished, mpirun, started

ULFM = ["--with-ft", "ulfm"]


def job(folder: Path, ranks: int, faults: str, *words: str) -> Done:
    told = ["--run.dir", "run", "--run.samples", "1500", "--fault.inject", faults, *words]
    with started([*mpirun(ranks), *ULFM, *command(*told)], folder) as process:
        return finished(process)


def test_a_damaged_message_ends_the_job_in_a_sentence(tmp_path: Path) -> None:
    done = job(tmp_path, 2, "[{kind: corrupt, rank: 1, round: 2, when: after}]")
    assert done.status == 1, done.story
    assert any("a message of rank 1 has arrived damaged" in sentence for sentence in done.sentences), done.story
    assert "Traceback" not in done.err, done.story
