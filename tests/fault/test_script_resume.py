"""A training script of a user's own, killed again and again, and stopped: it ends as the uninterrupted one would have.

HETSYNC_TEST_KILLS=20 python -m pytest tests/fault/test_script_resume.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, SECONDS, Done, finished, kill, mpirun, started, summary_of
from test_kill_and_resume import kill_rank_1, newest, process_of_rank

pytestmark = pytest.mark.xdist_group("script_resume")  # of one worker: they share a fixture that is dear
RANKS = 2
KILLS = int(os.environ.get("HETSYNC_TEST_KILLS", 2))
EPOCHS, EPOCH_SAMPLES = KILLS + 2, 1200  # each kill, and a signal, comes about half an epoch after the one before
JOB_SECONDS = SECONDS + 20 * KILLS  # this machine may be busy with others
SAMPLES = EPOCHS * EPOCH_SAMPLES
CLUSTER = "name: three\nsource: none\ndevices: [{name: a, speed: 2}, {name: b, speed: 1, count: 2}]\n"
SCRIPT = """
import json, sys, torch, hetsync
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

class Diary:
    def __init__(self): self.epochs = []
    def state_dict(self): return {"epochs": list(self.epochs)}
    def load_state_dict(self, state): self.epochs = list(state["epochs"])

generator = torch.Generator().manual_seed(1)
points = torch.randn(1200, 6, generator=generator)
train = TensorDataset(points, (points[:, 0] > 0).long(), torch.arange(1200))
test = TensorDataset(points[:300], (points[:300, 0] > 0).long())
seen = {}
with hetsync.join(
    run="run", resume="auto", delay_bound=int(sys.argv[1]), rebalance=False, checkpoint_every=300, keep_checkpoints=2,
    emulate="cluster.yaml", samples_per_second=1200,
) as job:
    norm = nn.BatchNorm1d(16) if sys.argv[1] == "0" else nn.LayerNorm(16)  # slices may be of one sample
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    decay = StepLR(optimizer, 2, 0.5)
    loader = DataLoader(train, batch_size=30, shuffle=True)
    tests = DataLoader(test, batch_size=64)
    model, optimizer, warm_up, decay, loader, tests = job.prepare(model, optimizer, warm_up, decay, loader, tests)
    diary = Diary()
    job.register("diary", diary)

    def validate():
        return {"accuracy": (sum((model(x).argmax(1) == y).sum() for x, y in tests), len(tests.dataset))}

    for epoch in job.epochs(int(sys.argv[2])):
        for inputs, labels, indices in loader:
            seen.setdefault(epoch, []).extend(indices.tolist())
            loss = nn.functional.cross_entropy(model(inputs), labels)
            job.backward(loss)
            job.clip_grad_norm_(model.parameters(), 1.0)
            job.step(optimizer, warm_up)
        job.keep_best(job.evaluate(validate)["accuracy"])
        decay.step()
        diary.epochs.append(epoch)
    end = {
        "finished": job.finished, "diary": diary.epochs, "rates": [group["lr"] for group in optimizer.param_groups],
        "weights": sum(parameter.double().sum().item() for parameter in model.parameters()), "seen": seen,
    }
    open(f"end-{job.rank}.json", "w").write(json.dumps(end))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "script.py").write_text(SCRIPT)
    return folder


def words(bound: int, ranks: int | None = RANKS) -> list[str]:
    launcher = [] if ranks is None else mpirun(ranks)
    return [*launcher, sys.executable, "script.py", str(bound), str(EPOCHS)]


def job(folder: Path, *arguments: Any) -> Any:
    return started(words(*arguments), folder, {"PYTHONPATH": str(ROOT)})


def run(folder: Path, *arguments: Any) -> Done:
    with job(folder, *arguments) as process:
        return finished(process, JOB_SECONDS)


def trains(process: subprocess.Popen[str], folder: Path) -> None:
    """Waits for the next checkpoint."""
    before, deadline = newest(folder), time.monotonic() + SECONDS
    while newest(folder) == before:
        assert process.poll() is None, finished(process).story
        assert time.monotonic() < deadline, "nothing was saved in time"
        time.sleep(0.01)


def kill_sometime(folder: Path, bound: int, rank_only: bool, ranks: int = RANKS) -> None:
    """After one more checkpoint at least."""
    with job(folder, bound, ranks) as process:
        trains(process, folder)
        seconds = random.uniform(0, 0.5)
        print(f"struck {seconds} s after a checkpoint at {newest(folder)} samples")  # shown where the test fails
        time.sleep(seconds)
        assert process.poll() is None, finished(process).story
        (kill_rank_1 if rank_only else kill)(process)
        process.wait(30)
    assert summary_of(folder / "run")["status"] == "running"


def stop(folder: Path, bound: int, ranks: int, number: signal.Signals, status: int, rank: int) -> None:
    """By a signal to one of its ranks, after one more checkpoint at least."""
    with job(folder, bound, ranks) as process:
        trains(process, folder)
        os.kill(process_of_rank(process, rank), number)
        done = finished(process)
    assert done.status == status, done.story
    assert "Traceback" not in done.err, done.story
    assert "stopped and saved; go on with: the same command" in done.out
    summary = summary_of(folder / "run")
    assert summary["status"] == "stopped"
    assert 0 < summary["samples_applied"] == newest(folder) < SAMPLES


def ends(folder: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(ranks)]


def assert_exact(folder: Path, begun: int, ranks: int = RANKS) -> None:
    """A resumed run that has gone to its end: each sample once an epoch, and each epoch's last lines once."""
    summary = summary_of(folder / "run")
    assert (summary["status"], summary["samples_applied"]) == ("finished", SAMPLES)
    assert sum(rank["samples"] for rank in summary["per_rank"]) == SAMPLES - begun
    told = ends(folder, ranks)
    for epoch in range(EPOCHS):
        used = Counter(index for end in told for index in end["seen"].get(str(epoch), []))
        assert sum(used.values()) == max(0, min(EPOCH_SAMPLES, (epoch + 1) * EPOCH_SAMPLES - begun)), f"epoch {epoch}"
        assert not used or max(used.values()) == 1, f"epoch {epoch}"
    assert all(end["diary"] == list(range(EPOCHS)) for end in told)
    assert all(end["rates"] == told[0]["rates"] and end["weights"] == told[0]["weights"] for end in told)


def files_of(folder: Path, name: str) -> bytes:
    return (folder / "run" / "checkpoints" / f"samples-{SAMPLES:012d}" / name).read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that nobody disturbs."""
    folder = prepared(tmp_path_factory.mktemp("uninterrupted"))
    done = run(folder, 0)
    assert done.status == 0, done.story
    assert_exact(folder, 0)
    return folder


SAME, OTHERS = (RANKS, RANKS, RANKS), (RANKS, 3, 1)
TERM, INT = (signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 0)


@pytest.mark.each_value(1)
@pytest.mark.parametrize(
    ("bound", "ranks", "asks"),
    [
        (0, SAME, None),  # a stop has chance, which begins anew at each rest, take another course
        (4, OTHERS, TERM),
        pytest.param(0, OTHERS, INT, marks=pytest.mark.thorough),
        pytest.param(4, SAME, INT, marks=pytest.mark.thorough),
    ],
)
def test_killed_again_and_again(
    folder: Path,
    uninterrupted: Path,
    bound: int,
    ranks: tuple[int, int, int],
    asks: tuple[signal.Signals, int, int] | None,
) -> None:
    """Jobs on as many ranks as `ranks` says: killed as a whole; killed by the death of a rank, and, where a signal to
    one asks for it, stopped; gone on to the end."""
    first, others, last = ranks
    for number in range(KILLS):
        kill_sometime(folder, bound, rank_only=number % 2 == 1, ranks=others if number % 2 else first)
    if asks is not None:
        stop(folder, bound, others, *asks)
    begun = newest(folder)
    done = run(folder, bound, last if last > 1 else None)
    assert done.status == 0, done.story
    assert_exact(folder, begun, last)
    expected = ends(uninterrupted)[0]
    assert ends(folder, last)[0]["rates"] == expected["rates"]
    if ranks == SAME and bound == 0:
        assert files_of(folder, "model.safetensors") == files_of(uninterrupted, "model.safetensors")
        assert summary_of(folder / "run")["metrics"] == summary_of(uninterrupted / "run")["metrics"]
        best = Path("run", "best", "best.json")
        assert json.loads((folder / best).read_text()) == json.loads((uninterrupted / best).read_text())
    assert summary_of(folder / "run")["metrics"]["accuracy"] > 0.9


def test_a_finished_run_goes_through_without_training(folder: Path, uninterrupted: Path) -> None:
    subprocess.run(["cp", "-r", str(uninterrupted / "run"), str(folder)], check=True)
    for ranks in (RANKS, 1):
        done = run(folder, 0, ranks)
        assert done.status == 0, done.story
        assert f"this run is finished after {SAMPLES} samples" in done.out
        for end in ends(folder, ranks):
            assert (end["finished"], end["seen"]) == (True, {})
            assert end["weights"] == ends(uninterrupted)[0]["weights"]
    assert files_of(folder, "model.safetensors") == files_of(uninterrupted, "model.safetensors")
    assert summary_of(folder / "run") == summary_of(uninterrupted / "run")
