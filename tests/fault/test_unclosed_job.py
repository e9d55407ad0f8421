"""Scripts that never close their job, under mpirun and alone: it ends as it would have, and truthfully."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, finished, mpirun, started, summary_of

SCRIPT = """
import sys, torch, hetsync
from torch.utils.data import TensorDataset

def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(240, 4), torch.randint(3, (240,)))
    job = hetsync.join(run="run", delay_bound={bound}, progress=False, timeout_seconds=30.0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.prepare(model, optimizer)
    loader = job.loader(data, 24)
    for epoch in job.epochs(2):
        for number, (inputs, labels) in enumerate(loader):
            job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            job.step()
            {in_loop}
        {at_rest}
    {after}

main()
"""
NOT_OVER = "the script has ended before its training"


def run(folder: Path, ranks: int, script: str) -> Done:
    (folder / "script.py").write_text(script)
    launcher = mpirun(ranks) if ranks > 1 else []
    with started([*launcher, sys.executable, "script.py"], folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process)


def job(bound: int = 4, in_loop: str = "pass", at_rest: str = "pass", after: str = "pass") -> str:
    return SCRIPT.format(bound=bound, in_loop=in_loop, at_rest=at_rest, after=after)


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("ranks", "bound", "at_rest", "after"),
    [
        (1, 4, "pass", "pass"),
        pytest.param(2, 4, "pass", "pass", marks=pytest.mark.thorough),
        (2, 0, "pass", "sys.exit(0)"),
        (2, 4, "job.stop()", "pass"),
    ],
)
def test_it_is_closed_where_training_is_over(tmp_path: Path, ranks: int, bound: int, at_rest: str, after: str) -> None:
    done = run(tmp_path, ranks, job(bound, at_rest=at_rest, after=after))
    assert done.status == 0, done.story
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert summary_of(tmp_path / "run")["samples_applied"] == (240 if "stop" in at_rest else 480)
    assert not (tmp_path / "run" / "job.lock").exists()


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("ranks", "bound", "in_loop", "status"),
    [
        (2, 4, "pass", 0),
        (1, 0, "pass", 0),
        (1, 0, "if number == 3: sys.exit(0)", 2),
        (2, 0, "if number == 3: sys.exit(0)", 2),
    ],
)
def test_epochs_that_nobody_counts_end_with_the_script(
    tmp_path: Path, ranks: int, bound: int, in_loop: str, status: int
) -> None:
    done = run(tmp_path, ranks, job(bound, in_loop=in_loop).replace("job.epochs(2)", "range(2)"))
    assert done.status == status, done.story
    assert (NOT_OVER in done.err) == bool(status)


def test_a_stop_by_a_signal_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, 1, job(in_loop="import os; os.kill(os.getpid(), 10)"))
    assert done.status == 85, done.story
    assert summary_of(tmp_path / "run")["status"] == "stopped"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_an_exception_ends_all_ranks(tmp_path: Path, ranks: int) -> None:
    done = run(tmp_path, ranks, job(in_loop=f"number == 3 and job.rank == {ranks - 1} and 1 / 0"))
    assert done.status == 1, done.story
    assert done.err.count("Traceback") == 1, done.story
    assert done.sentences == (["hetsync: rank 1: failed, so the job ends"] if ranks > 1 else [])
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert summary_of(tmp_path / "run")["samples_applied"] == 0


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("ranks", "in_loop", "sentence"),
    [
        (2, "job.prepare(model)", "job.prepare was called after the loop had begun"),
        pytest.param(1, "number == 3 and sys.exit()", NOT_OVER, marks=pytest.mark.thorough),
        (2, "number == 3 and sys.exit()", NOT_OVER),
        (2, "if number == 3: return", NOT_OVER),
        pytest.param(1, "if number == 3: return", NOT_OVER, marks=pytest.mark.thorough),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, ranks: int, in_loop: str, sentence: str) -> None:
    done = run(tmp_path, ranks, job(in_loop=in_loop))
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert sentence in done.sentences[0]
    assert "Traceback" not in done.err, done.story
    assert summary_of(tmp_path / "run")["status"] == "failed"
