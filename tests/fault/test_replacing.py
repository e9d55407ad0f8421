"""Ranks that die, and processes that take their places (`fault.replace`). Each case is a job of its own.

python -m pytest tests/fault
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROOT, SECONDS, Done, command, finished, local_launcher, mpirun, started, summary_of

from hetsync.train.checkpoint import load_newest

SAMPLES = 6 * 512
TRANSPORTS = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "lo"]

SCRIPT = """
import glob, json, os, signal, sys, time, torch, hetsync
from torch.utils.data import DataLoader, TensorDataset

class Centred(torch.nn.Module):
    buffer_rules = {"mean": "mean"}

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, values):
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.1)
        return values - self.mean

torch.manual_seed(0)
bound, deaths, freezes = json.loads(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), *([Centred()] if bound else []), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
loader = DataLoader(TensorDataset(torch.randn(512, 4), torch.randint(3, (512,))), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(3, (64,))), batch_size=8)

def accuracy():
    return sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in test), len(test.dataset)

with hetsync.join(run=sys.argv[2], delay_bound=bound, least_ranks=1, fault={"replace": bool(deaths)}) as job:
    life = len(glob.glob(f"life-{job.rank}-*"))
    open(f"life-{job.rank}-{life}", "x").close()
    model, optimizer, scheduler, loader, test = job.prepare(model, optimizer, scheduler, loader, test)
    batches = 0
    for epoch in job.epochs(6):
        for inputs, labels in loader:
            batches += 1
            if [job.rank, batches, life] in deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            if job.plane.size < job.size:  # samples must last until a process has come up, however busy the machine is
                time.sleep(0.7)
            job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            job.step(optimizer, scheduler)
        job.keep_best(job.evaluate(accuracy))
        if freezes and epoch == 0:
            model[0].requires_grad_(False)
            torch.save(model.state_dict(), f"frozen-{job.rank}")
print(f"rank {job.rank} has ended in life {life} after {batches} batches", flush=True)
"""


def launched(folder: Path, ranks: int) -> list[str]:
    """By launch/local, in whose place mpirun would say 137 where a process has died that was started later."""
    return [local_launcher(folder), "--replace", str(ranks), "--"]


def trained(
    folder: Path, bound: int | None, deaths: list[Any], run: str = "run", ranks: int = 1, freezes: bool = False
) -> Done:
    (folder / "script.py").write_text(SCRIPT)
    program = [sys.executable, "script.py", json.dumps([bound, deaths, freezes]), run]
    words = [*launched(folder, ranks), *program] if ranks > 1 else program
    path = f"{Path(mpirun(1)[0]).parent}:{os.environ['PATH']}"
    with started(words, folder, {"PYTHONPATH": str(ROOT), "PATH": path}) as process:
        return finished(process, 3 * SECONDS)


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("ranks", "bound", "deaths"),
    [
        (3, 0, [[2, 9, 0]]),
        # Of the first rank, which stays the last to have come; the one that has taken its place dies, too.
        (3, 4, [[0, 9, 0], [0, 20, 1]]),
        # Of two at once.
        (4, None, [[1, 9, 0], [3, 9, 0]]),
        # One is left alone, and leads for the first time.
        (2, 4, [[0, 9, 0]]),
    ],
)
def test_another_process_takes_a_dead_ranks_place(
    tmp_path: Path, ranks: int, bound: int | None, deaths: list[Any]
) -> None:
    """Anchors are compared at each rest: ranks that differed would end the job."""
    done = trained(tmp_path, bound, deaths, ranks=ranks)
    assert done.status == 0, done.story
    assert done.out.count("has ended in life") == ranks, done.story
    replaced = {rank: life + 1 for rank, _, life in deaths}
    for rank, life in replaced.items():
        assert f"rank {rank} has ended in life {life}" in done.out, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert (summary["status"], summary["ranks"], summary["ranks_at_start"]) == ("finished", ranks, ranks)
    assert sorted(failure["rank"] for failure in summary["failures"]) == sorted(rank for rank, *_ in deaths)
    assert sorted(join["rank"] for join in summary["joins"]) == sorted(rank for rank, *_ in deaths)
    for failure, join in zip(summary["failures"], summary["joins"], strict=True):
        assert join["round"] >= failure["round"]
    if bound is not None:
        assert summary["staleness"]["max"] <= bound
    rows = summary["per_rank"]
    assert sum("left_at_round" in row for row in rows) == len(deaths)
    assert sum("joined_at_round" in row for row in rows) == len(replaced)
    assert sum(row["samples"] for row in rows) == SAMPLES
    assert sum(summary["shares"]) == 32
    assert all(summary["shares"]), "B is sliced among all again"
    if bound == 0:
        assert trained(tmp_path, 0, [], "alone").status == 0
        theirs, mine = (load_newest(tmp_path / name).model for name in ("run", "alone"))
        assert max(float((theirs[name] - value).abs().max()) for name, value in mine.items()) < 1e-5


@pytest.mark.each_value(1)
@pytest.mark.parametrize("bound", [0, 4])
def test_what_was_frozen_before_a_rank_joins_stays_so(tmp_path: Path, bound: int) -> None:
    """By lines after an epoch to which the newcomer does not come."""
    done = trained(tmp_path, bound, [[1, 27, 0]], ranks=2, freezes=True)
    assert done.status == 0, done.story
    assert [join["rank"] for join in summary_of(tmp_path / "run")["joins"]] == [1], done.story
    before, after = torch.load(tmp_path / "frozen-0"), load_newest(tmp_path / "run").model
    assert {name: torch.equal(after[name], value) for name, value in before.items() if name != "1.mean"} == {
        name: name.startswith("0.") for name in before if name != "1.mean"
    }


@pytest.mark.each_value(1)
@pytest.mark.parametrize(
    ("flags", "words", "told"),
    [
        ([], [], "but a rank's death ends jobs with sums by MPI"),
        (["--with-ft", "ulfm", "--mca", "btl", "self,sm"], [], "add tcp to its --mca btl"),
        (["--with-ft", "ulfm", *TRANSPORTS], ["--fault.tolerate", "false"], "but fault.tolerate is false"),
    ],
)
def test_where_nobody_can_be_replaced_that_is_one_sentence(
    tmp_path: Path, flags: list[str], words: list[str], told: str
) -> None:
    with started([*mpirun(2), *flags, *command("--fault.replace", "true", *words)], tmp_path) as job:
        done = finished(job)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert "fault.replace is true" in done.sentences[0]
    assert told in done.sentences[0]
