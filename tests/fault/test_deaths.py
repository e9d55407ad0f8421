"""Ranks that are killed, where MPI tells the others of it (`mpirun --with-ft ulfm`): those go on, or all end at once.

Each case is a job of its own. python -m pytest tests/fault
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import ROOT, SECONDS, Done, command, descendants, finished, mpirun, started, summary_of

RANKS = 4
SAMPLES = 4000
ULFM = ["--with-ft", "ulfm"]
CLUSTER = "name: four\nsource: none\ndevices: [{name: a, count: 2, speed: 2}, {name: b, count: 2, speed: 1}]\n"


def recipe(folder: Path, *words: str) -> list[str]:
    """Emulated devices make it last some seconds, whatever machine this is."""
    (folder / "four.yaml").write_text(CLUSTER)
    mine = ["--run.dir", "run", "--run.samples", str(SAMPLES), "--emulate", "four.yaml"]
    return [*mpirun(RANKS), *ULFM, *command(*mine, "--emulation.samples_per_second", "1200", *words)]


def process_of_rank(job: subprocess.Popen[str], rank: int) -> int:
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    (pid,) = [pid for pid in descendants(job) if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return pid


def kill_in_training(job: subprocess.Popen[str], folder: Path, rank: int) -> None:
    """Once rounds land."""
    told, deadline = folder / "run" / "telemetry" / "rank-0000.jsonl", time.monotonic() + SECONDS
    while not told.exists() or told.read_text().count('"round"') < 10:
        assert job.poll() is None, finished(job).story
        assert time.monotonic() < deadline, "no round has landed in time"
        time.sleep(0.01)
    os.kill(process_of_rank(job, rank), signal.SIGKILL)


def killed(folder: Path, rank: int, *words: str) -> Done:
    with started(recipe(folder, *words), folder) as job:
        kill_in_training(job, folder, rank)
        return finished(job)


@pytest.mark.parametrize("outer", ["identity", "nesterov"])
def test_the_others_go_on_with_every_sample(tmp_path: Path, outer: str) -> None:
    done = killed(tmp_path, 2, "--fault.tolerate", "true", "--sync.delay_bound", "4", "--sync.outer.name", outer)
    assert done.status == 0, done.story
    assert "rank 2 (" in done.out, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert summary["staleness"]["max"] <= 4
    assert (summary["ranks"], summary["ranks_at_start"]) == (3, 4)
    assert sum(summary["shares"]) == 64, "B stays"
    assert summary["shares"][2] == 0
    (failure,) = summary["failures"]
    assert (failure["rank"], failure["kind"], failure["action"]) == (2, "died", "went on")
    assert failure["samples_returned"] > 0
    rows = summary["per_rank"]
    assert [row.get("left_at_round") for row in rows] == [None, None, failure["round"], None]
    # What a survivor computed, but for one task at the death at most, was applied: nothing was given up.
    assert sum(row["samples"] for row in rows) == SAMPLES


SCRIPT = """
import os, signal, torch, hetsync
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(512, 4), torch.randint(3, (512,))), batch_size=32, shuffle=True)
with hetsync.join(run="run", delay_bound=4, tolerate=True) as job:
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    batches = 0
    for epoch in job.epochs(12):
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
            if job.rank in (1, 3) and batches == 20 * job.rank + 3:
                os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {job.rank} has ended", flush=True)
"""


def test_a_script_survives_two_deaths_of_five(tmp_path: Path) -> None:
    """Anchors are compared at each rest, of which there is one an epoch: ranks that differed would end the job."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with started([*mpirun(5), *ULFM, sys.executable, "script.py"], tmp_path, {"PYTHONPATH": str(ROOT)}) as process:
        done = finished(process)
    assert done.status == 0, done.story
    assert all(f"rank {rank} has ended" in done.out for rank in (0, 2, 4)), done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == 12 * 512
    assert sorted(failure["rank"] for failure in summary["failures"]) == [1, 3]
    assert summary["ranks"] == 3


@pytest.mark.parametrize(
    ("rank", "words", "said"),
    [
        (0, [], "rank 0 has gone"),
        (2, ["--fault.tolerate", "false"], "has gone"),
        (2, ["--sync.delay_bound", "0"], "has gone"),
    ],
)
def test_otherwise_a_death_ends_all_ranks_at_once(tmp_path: Path, rank: int, words: list[str], said: str) -> None:
    """Which MPI itself leaves alone here: nobody waits for `run.timeout_seconds`."""
    with started(recipe(tmp_path, *words), tmp_path) as job:
        kill_in_training(job, tmp_path, rank)
        done = finished(job, 20.0)
    assert done.status == 1, done.story
    assert any(said in sentence for sentence in done.sentences), done.story


def test_tolerance_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with started([*mpirun(2), *command("--fault.tolerate", "true")], tmp_path) as job:
        done = finished(job)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert "fault.tolerate is true, but a rank's death ends jobs with sums by MPI" in done.sentences[0]
    assert "mpirun --with-ft ulfm" in done.sentences[0]
