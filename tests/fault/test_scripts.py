"""Training scripts of users that go wrong under mpirun: one sentence, the right status, nobody left behind."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Done, command, environment, finished, mpirun, started, summary_of

RANKS = 2
SCRIPT = """
import os, sys, torch, hetsync
from torch.utils.data import TensorDataset

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
data = TensorDataset(torch.randn(256, 4), torch.randint(3, (256,)))
settings = {settings}

with hetsync.join(progress=False, **settings) as job:
    job.prepare(model, optimizer)
    for number, (inputs, labels) in enumerate(job.loader(data, 16, epochs=4)):
        job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        job.step()
        {act}
print(f"rank {{RANK}} ended after {{job.samples}} samples", flush=True)
"""


def run(folder: Path, act: str = "pass", settings: str = "{}") -> Done:
    (folder / "script.py").write_text(SCRIPT.format(act=act, settings=settings))
    with started([*mpirun(RANKS), sys.executable, "script.py"], folder, {"PYTHONPATH": str(ROOT)}) as process:
        return finished(process)


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("act", "settings", "sentence"),
    [
        ("pass", "{'accumulation': 'two'}", "hetsync: accumulation is two: it must be a whole number"),
        ("scheduler.step()", "{'delay_bound': 0}", "step the scheduler that job.prepare returned"),
        ("RANK == 1 and model.weight.data.fill_(float('nan'))", "{'delay_bound': 0}", "became nan on rank 1"),
        (
            "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.zeros(1))]})",
            "{'delay_bound': 4}",
            "the model has not",
        ),
    ],
)
def test_a_mistake_is_one_sentence_for_all_ranks(tmp_path: Path, act: str, settings: str, sentence: str) -> None:
    """Before the first slice, and within a slice in either mode; on all ranks, and on one."""
    done = run(tmp_path, act, settings)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert sentence in done.sentences[0]
    assert "Traceback" not in done.err, done.story


def test_an_error_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    done = run(tmp_path, "RANK == 1 and 1 / 0")
    assert done.status == 1, done.story
    assert done.err.count("ZeroDivisionError") == 1
    assert done.sentences == ["hetsync: rank 1: failed, so the job ends"]


def test_an_exit_on_one_rank_ends_the_job_with_its_code(tmp_path: Path) -> None:
    done = run(tmp_path, "RANK == 1 and number == 2 and sys.exit(3)")
    assert done.status == 3, done.story
    assert "rank 1: sys.exit was called" in done.sentences[0]


@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.thorough), 4])
def test_a_loop_that_all_leave_ends_well(tmp_path: Path, bound: int) -> None:
    done = run(tmp_path, "if number == 5: break", f"{{'delay_bound': {bound}}}")
    assert done.status == 0, done.story
    ends = sorted(line for line in done.out.splitlines() if line.startswith("rank"))
    assert len(ends) == RANKS, done.story
    assert len({line.partition("ended")[2] for line in ends}) == 1


def test_a_reader_that_goes_away_ends_no_job(tmp_path: Path) -> None:
    words = shlex.join(command("--run.samples", 640, "--run.dir", "run"))
    shell = f"{words} | head -n 1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environment(), capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "run")["status"] == "finished"
