"""Ranks that are killed, where MPI tells the others of it (`mpirun --with-ft ulfm`): those go on, or all end at once.

Each case is a job of its own. python -m pytest tests/fault
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, SECONDS, Done, command, descendants, finished, mpirun, run, started, summary_of

from hetsync.train.checkpoint import load_newest

RANKS = 3
SAMPLES = 4000
ULFM = ["--with-ft", "ulfm"]
CLUSTER = "name: three\nsource: none\ndevices: [{name: a, count: 2, speed: 2}, {name: b, count: 1, speed: 1}]\n"


def recipe(folder: Path, *words: str, samples: int = SAMPLES) -> list[str]:
    """Emulated devices make it last some seconds, whatever machine this is."""
    (folder / "three.yaml").write_text(CLUSTER)
    mine = ["--run.dir", "run", "--run.samples", str(samples), "--emulate", "three.yaml"]
    return [*mpirun(RANKS), *ULFM, *command(*mine, "--emulation.samples_per_second", str(0.3 * samples), *words)]


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


def killed(folder: Path, rank: int, *words: str, samples: int = SAMPLES) -> Done:
    with started(recipe(folder, *words, samples=samples), folder) as job:
        kill_in_training(job, folder, rank)
        return finished(job)


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("rank", "outer", "fragments", "grace", "wire"),
    [
        (0, "identity", 1, 1, "int8"),
        (2, "nesterov", 1, 0, "int2"),
        (0, "identity", 3, 1, "top64"),
        pytest.param(2, "identity", 3, 1, "float32", marks=pytest.mark.thorough),
        pytest.param(2, "identity", 3, 1, "bfloat16", marks=pytest.mark.thorough),
        pytest.param(0, "identity", 3, 1, "int4", marks=pytest.mark.thorough),
    ],
)
def test_the_others_go_on_with_every_sample(
    tmp_path: Path, rank: int, outer: str, fragments: int, grace: int, wire: str
) -> None:
    words = ["--fault.tolerate", "true", "--sync.delay_bound", "4", "--sync.outer.name", outer, "--sync.wire", wire]
    words += ["--sync.fragments", str(fragments), "--sync.grace", str(grace)]
    done = killed(tmp_path, rank, *words, "--run.evaluate_every", "1000")
    assert done.status == 0, done.story
    assert f"rank {rank} (" in done.out, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert summary["staleness"]["max"] <= 4
    assert (summary["status"], summary["ranks"], summary["ranks_at_start"]) == ("finished", 2, 3)
    assert sum(summary["shares"]) == 64, "B stays"
    assert (summary["fragments"], summary["grace"], summary["wire"]) == (fragments, grace, wire)
    books = json.loads(next((tmp_path / "run" / "checkpoints").glob("samples-*/state.json")).read_text())
    assert (books["progress"]["fragments"], books["progress"]["grace"]) == (fragments, grace)
    assert summary["shares"][rank] == 0
    (failure,) = summary["failures"]
    assert (failure["rank"], failure["kind"], failure["action"]) == (rank, "died", "went on")
    assert failure["samples_returned"] > 0
    rows = summary["per_rank"]
    assert [row.get("left_at_round") for row in rows] == [failure["round"] if n == rank else None for n in range(RANKS)]
    # What a survivor computed, but for one task at the death at most, was applied: nothing was given up.
    assert sum(row["samples"] for row in rows) == SAMPLES
    assert not (tmp_path / "run" / "job.lock").exists()
    for file in (tmp_path / "run" / "telemetry").iterdir():
        assert all(json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_synchronous_training_ends_at_the_weights_of_an_undisturbed_run(tmp_path: Path, rank: int) -> None:
    words = ["--sync.delay_bound", "0", "--optimizer.name", "sgd", "--optimizer.momentum", "0.9"]
    few = SAMPLES // 2  # over many a rounding may flip a ReLU, and weights part
    done = killed(tmp_path, rank, *words, "--fault.tolerate", "true", samples=few)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == few
    assert [failure["rank"] for failure in summary["failures"]] == [rank]
    alone = run("--run.dir", "alone", "--run.samples", few, *words, folder=tmp_path)
    assert alone.status == 0, alone.story
    theirs, mine = (load_newest(tmp_path / name).model for name in ("run", "alone"))
    assert max(float((theirs[name] - value).abs().max()) for name, value in mine.items()) < 1e-5


PLAN = """
format: 1
batch_size: 64
replicas:
- {share: 12, stages: [{ranks: [2], blocks: ['*']}]}
- {share: 26, stages: [{ranks: [1], blocks: ['*']}]}
- {share: 26, stages: [{ranks: [0], blocks: ['*']}]}
"""


@pytest.mark.each_value(1)
@pytest.mark.parametrize("bound", [0, 4])
def test_by_a_plan_of_whole_models_its_share_goes_to_the_others(tmp_path: Path, bound: int) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    words = ["--plan", "plan.yaml", "--fault.tolerate", "true", "--sync.delay_bound", str(bound)]
    done = killed(tmp_path, 1, *words, samples=SAMPLES // 2)
    assert done.status == 0, done.story
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["samples_applied"]) == ("finished", SAMPLES // 2)
    assert [failure["rank"] for failure in summary["failures"]] == [1]
    assert sum(summary["shares"]) == 64, "B stays"
    assert summary["shares"][1] == 0
    assert summary["plan"]["replicas"] == [[[2]], [[1]], [[0]]]
    assert summary["plan"]["measured_step_seconds"] > 0


SCRIPT = """
import json, os, signal, sys, torch, hetsync
from torch.utils.data import DataLoader, TensorDataset
from hetsync.plane import shared_sums
from hetsync.sync.rounds import Rounds
from hetsync.sync.mending import Mending
from hetsync.train import checkpoint
from hetsync.train.rest import CommonState
from hetsync.train.saving import Saver

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(512, 4), torch.randint(3, (512,))), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(3, (64,))), batch_size=8)
shared, bound, *deaths = json.loads(sys.argv[1])
if shared:  # small sums, too
    shared_sums.SharedSums.least_values = 1
came = {}

def come_to(moment):
    came[moment] = came.get(moment, 0) + 1
    if [job.rank, moment, came[moment]] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)

def watch(owner, name, moment, when=lambda *given: True):
    inner = getattr(owner, name)
    def watched(*given, **named):
        if when(*given):
            come_to(moment)
        return inner(*given, **named)
    setattr(owner, name, watched)

watch(Saver, "save", "saving")
watch(checkpoint, "flush_to_disk", "writing")
watch(Rounds, "_begin", "draining", lambda self, start: start.drain is not None)
watch(Mending, "_attempt", "recovering")
watch(CommonState, "share_first_weights", "sharing")
watch(shared_sums.SharedSums, "_add_up", "adding")
watch(shared_sums.SharedSums, "_take", "taking")

def accuracy():
    come_to("evaluating")
    return {"accuracy": (sum((model(inputs).argmax(1) == labels).sum() for inputs, labels in test), len(test.dataset))}

settings = dict(delay_bound=bound, checkpoint_every=512, tolerate=True, least_ranks=1)
with hetsync.join(run="run", **settings) as job:
    model, optimizer, loader, test = job.prepare(model, optimizer, loader, test)
    for epoch in job.epochs(8):
        model[0].requires_grad_(epoch > 2)
        for inputs, labels in loader:
            come_to("training")
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        job.keep_best(job.evaluate(accuracy)["accuracy"])
print(f"rank {job.rank} has ended,", "sums shared" if "adding" in came else "sums by MPI", flush=True)
"""


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("shared", "bound", "deaths"),
    [
        # In turns, each time the first that is left or another: of six, rank 4 is left. Weights are shared at the
        # start, and when the first layer is trained, too.
        (
            False,
            0,
            [[5, "draining", 1], [0, "writing", 8], [1, "evaluating", 4], [3, "saving", 5], [2, "training", 100]],
        ),
        (
            False,
            4,
            [[0, "training", 20], [1, "training", 20], [3, "recovering", 1], [2, "sharing", 2], [5, "evaluating", 6]],
        ),
        # In memory that all share, also in the middle of a sum.
        (True, 0, [[5, "adding", 9], [0, "taking", 40], [1, "writing", 2], [3, "adding", 70], [2, "training", 100]]),
        (True, 4, [[0, "taking", 9], [1, "training", 20], [3, "adding", 30], [2, "adding", 40], [5, "evaluating", 6]]),
    ],
)
def test_a_script_survives_deaths_at_any_moment(
    tmp_path: Path, shared: bool, bound: int, deaths: list[list[Any]]
) -> None:
    """Anchors are compared at each rest, of which there is one an epoch: ranks that differed would end the job."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [*mpirun(6), *ULFM, sys.executable, "script.py", json.dumps([shared, bound, *deaths])]
    with started(words, tmp_path, {"PYTHONPATH": str(ROOT)}) as process:
        done = finished(process)
    dead = sorted(rank for rank, *_ in deaths)
    assert done.status == 0, done.story
    sums = "sums shared" if shared else "sums by MPI"
    assert done.out.count(f"has ended, {sums}") == 6 - len(dead), done.story
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == summary["samples_expected"] == 8 * 512
    assert sorted(failure["rank"] for failure in summary["failures"]) == dead
    assert summary["ranks"] == 6 - len(dead)
    assert summary["staleness"]["max"] <= bound
    assert load_newest(tmp_path / "run").progress.samples_applied == 8 * 512


LINES = """
import os, signal, torch, hetsync
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
stepped, always, second = (LambdaLR(optimizer, lambda steps: 1.0) for _ in range(3))
loader = DataLoader(TensorDataset(torch.randn(512, 4), torch.randint(3, (512,))), batch_size=32, shuffle=True)
norms = []

with hetsync.join(run="run", delay_bound=0, tolerate=True, least_ranks=1) as job:
    model, optimizer, stepped, always, second, loader = job.prepare(model, optimizer, stepped, always, second, loader)
    for epoch in job.epochs(2):
        for number, (inputs, labels) in enumerate(loader):
            if (job.rank, epoch, number) in [(1, 0, 4), (0, 1, 9)]:
                os.kill(os.getpid(), signal.SIGKILL)
            job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            norm = CLIP(model.parameters(), 1.0)
            norms.append(norm.item())
            job.log({"norm": norm})
            if job.step(optimizer):
                stepped.step()
            always.step()
            if number % 2:
                second.step()
print(norms.count(0.0), [each.last_epoch for each in (stepped, always, second)], flush=True)
"""


@pytest.mark.each_value(1)
@pytest.mark.parametrize(("clip", "zeros"), [("job.clip_grad_norm_", 2), ("torch.nn.utils.clip_grad_norm_", 0)])
def test_lines_that_follow_a_step_survive_the_batch_without_one(tmp_path: Path, clip: str, zeros: int) -> None:
    """Two batches of rank 2 are void: there clipping finds no gradients, or those of the slice, which move nothing, and
    the second scheduler may be stepped."""
    (tmp_path / "script.py").write_text(LINES.replace("CLIP", clip))
    with started([*mpirun(3), *ULFM, sys.executable, "script.py"], tmp_path, {"PYTHONPATH": str(ROOT)}) as process:
        done = finished(process)
    assert done.status == 0, done.story
    assert done.out.splitlines()[-1] == f"{zeros} [32, 32, 16]", done.story


def test_a_controller_goes_on_or_is_begun_anew(tmp_path: Path) -> None:
    """Where another rank dies, and then rank 0: its process ends with that, and the next first rank starts another."""
    words = ["--control.name", "random", "--control.interval_seconds", "0.1", "--sync.rebalance", "false"]
    dies = ["--fault.inject", "[{kind: die, rank: 2, round: 8}, {kind: die, rank: 0, round: 16}]"]
    dies += ["--fault.tolerate", "true", "--fault.least_ranks", "1"]
    with started(recipe(tmp_path, *words, *dies), tmp_path) as job:
        done = finished(job)
    assert done.status == 0, done.story
    assert done.sentences == []
    summary = summary_of(tmp_path / "run")
    assert summary["samples_applied"] == SAMPLES
    assert [failure["rank"] for failure in summary["failures"]] == [2, 0]
    assert (summary["control"]["name"], summary["control"]["died"]) == ("random", None)
    assert summary["staleness"]["max"] <= summary["control"]["delay_bound"][1]


def test_with_too_few_left_the_job_saves_and_can_go_on(tmp_path: Path) -> None:
    done = killed(tmp_path, 2, "--fault.least_ranks", "3", "--sync.delay_bound", "4")
    assert done.status == 86, done.story
    assert any("2 of 3 ranks are left, and fault.least_ranks is 3" in told for told in done.sentences), done.story
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "stopped"
    assert load_newest(tmp_path / "run").progress.samples_applied == summary["samples_applied"] < SAMPLES


def test_otherwise_a_death_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """Which MPI itself leaves alone here: nobody waits for `run.timeout_seconds`."""
    with started(recipe(tmp_path, "--fault.tolerate", "false"), tmp_path) as job:
        kill_in_training(job, tmp_path, 2)
        done = finished(job, 20.0)
    assert done.status == 1, done.story
    assert any("has gone" in sentence for sentence in done.sentences), done.story


def test_tolerance_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with started([*mpirun(2), *command("--fault.tolerate", "true")], tmp_path) as job:
        done = finished(job)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1, done.story
    assert "fault.tolerate is true, but a rank's death ends jobs with sums by MPI" in done.sentences[0]
    assert "mpirun --with-ft ulfm" in done.sentences[0]
