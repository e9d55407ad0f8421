"""Jobs that torchrun starts, on a machine without MPI: mpi4py is made unimportable.

python -m pytest tests/fault
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from jobs import SECONDS, Done, descendants, finished, free_port, mpirun, program, ranks_alone, started, summary_of
from safetensors.torch import load_file
from test_kill_and_resume import newest

SAMPLES = 1200
RECIPE = ["--run.samples", str(SAMPLES), "--run.profile_seconds", "0.1", "--run.dir", "run"]
EMULATED = ["--emulate", "cluster.yaml", "--emulation.samples_per_second", "1000", "--run.checkpoint_every", "300"]
TWO_JOBS = """
import torch
from torch.utils.data import TensorDataset
import hetsync

data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
for number in range(2):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hetsync.join(progress=False) as job:
        job.prepare(model, optimizer)
        for (inputs,) in job.loader(data, 8, epochs=1):
            job.backward(model(inputs).square().mean())
            job.step()
    print(f"job {number} of rank {job.rank} ended after {job.samples} samples", flush=True)
"""
BOUNDS = pytest.mark.parametrize("bound", [pytest.param("0", marks=pytest.mark.thorough), "4"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a job; in it a module that stands before mpi4py."""
    (tmp_path / "no_mpi").mkdir()
    (tmp_path / "no_mpi" / "mpi4py.py").write_text("raise ImportError('there is no MPI on this machine')\n")
    (tmp_path / "cluster.yaml").write_text("name: two\nsource: none\ndevices: [{name: a, count: 2, speed: 1}]\n")
    return tmp_path


def torchrun(*words: str | Path, ranks: int = 2) -> list[str]:
    # torchrun itself may be of another environment than this Python
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *map(str, words),
    ]


def train(*words: str) -> list[str]:
    return torchrun(program("hetsync-train"), *RECIPE, *words)


@contextlib.contextmanager
def job(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    with started(words, folder, {"PYTHONPATH": str(folder / "no_mpi")}) as process:
        yield process


def run(words: list[str], folder: Path) -> Done:
    with job(words, folder) as process:
        return finished(process, 2 * SECONDS)


def exit_code(done: Done) -> int:
    """Of the rank that ended first, by torchrun's report; its own status is 1 whatever that is."""
    return int(re.findall(r"exitcode\s*: (-?\d+)", done.err.partition("Root Cause")[2])[0])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (folder / "run" / "checkpoints").glob(f"*{SAMPLES}/model.safetensors")
    return load_file(path)


def rank_process(job: subprocess.Popen[str], rank: int) -> int:
    for pid in descendants(job):
        with contextlib.suppress(OSError):
            if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_bytes().decode():
                return pid
    raise AssertionError(f"no process of rank {rank}")


def trains(process: subprocess.Popen[str], folder: Path) -> None:
    """Waits for the first checkpoint."""
    deadline = time.monotonic() + SECONDS
    while not newest(folder):
        assert process.poll() is None, finished(process).story
        assert time.monotonic() < deadline, "nothing was saved in time"
        time.sleep(0.01)


@pytest.mark.each_value(1)
@pytest.mark.parametrize("bound", ["0", "4"])
def test_a_recipe_equals_that_under_mpirun(folder: Path, bound: str) -> None:
    """Over each plane; at D = 0 to the weights, at D = 4 to the counts."""
    words = [program("hetsync-train"), *RECIPE, "--sync.delay_bound", bound, "--sync.rebalance", "false"]
    words += ["--sync.pins", "{0: 40, 1: 24}"]
    ways = {
        "torchrun": (torchrun(*words), {"PYTHONPATH": str(folder / "no_mpi")}),
        "mpi": ([*mpirun(2), *words, "--run.plane", "mpi"], {}),
        "torch": ([*mpirun(2), *words, "--run.plane", "torch"], {}),
    }
    if bound != "0":  # shown by others
        del ways["mpi"], ways["torchrun"]
    expected = {
        "torchrun": "sums by Gloo and shared memory, messages by torch's store (run.plane is auto, and torchrun started"
        " 2 ranks)",
        "mpi": "sums by MPI and shared memory, messages by MPI (run.plane is mpi)",
        "torch": "sums by Gloo and shared memory, messages by MPI (run.plane is torch)",
    }
    if find_spec("horovod") is not None:
        ways["horovod"] = ([*mpirun(2), *words, "--run.plane", "horovod"], {})
        expected["horovod"] = "sums by Horovod, messages by MPI (run.plane is horovod)"
    trained, planes = {}, {}
    for way, (started_by, env) in ways.items():
        place = folder / way
        place.mkdir()
        with started(started_by, place, env) as process:
            done = finished(process, 2 * SECONDS)
        assert done.status == 0, done.story
        summary = summary_of(place / "run")
        assert (summary["status"], summary["ranks"], summary["samples_applied"]) == ("finished", 2, SAMPLES)
        assert summary["staleness"]["max"] <= int(bound)
        assert sum(rank["samples"] for rank in summary["per_rank"]) == SAMPLES
        assert summary["plane"] in done.out
        planes[way], trained[way] = summary["plane"], weights(place)
    assert planes == {way: expected[way] for way in ways}
    if bound == "0":
        for way in ways:
            torch.testing.assert_close(trained[way], trained["mpi"], rtol=1e-5, atol=1e-5)


SCRIPT = """
import sys
import torch, hetsync
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(64, 4), torch.zeros(64).long())
with hetsync.join(delay_bound=BOUND, timeout_seconds=30.0) as job:
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    slices = 0
    for epoch in job.epochs(2):
        for inputs, labels in loader:
            slices += 1
            if job.rank == 1 and slices == 2:
                WHAT
            job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            job.step(optimizer)
    print(f"rank {job.rank} of {job.size}, local {job.local_rank}\\n", end="", flush=True)  # in one piece
assert "mpi4py" not in sys.modules
"""


def script(folder: Path, bound: str, what: str = "pass") -> Done:
    (folder / "script.py").write_text(SCRIPT.replace("BOUND", bound).replace("WHAT", what))
    return run(torchrun("script.py"), folder)


@BOUNDS
def test_a_script_trains(folder: Path, bound: str) -> None:
    done = script(folder, bound)
    assert done.status == 0, done.story
    assert {f"rank {rank} of 2, local {rank}" for rank in range(2)} <= set(done.out.splitlines()), done.story


@pytest.mark.parametrize("bound", ["4"])
def test_an_error_on_one_rank_ends_the_job(folder: Path, bound: str) -> None:
    done = script(folder, bound, "1 / 0")
    assert done.status != 0
    assert done.err.count("ZeroDivisionError") == 1, done.story
    assert done.sentences[0] == "hetsync: rank 1: failed, so the job ends"
    assert exit_code(done) == 1, done.story


@pytest.mark.each_value(2)
@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (["--data.batch_size", "0"], "data.batch_size is 0"),  # before ranks know each other
        (["--run.plane", "mpi"], "run.plane is mpi, but torchrun"),
        pytest.param(
            ["--run.plane", "local"], "run.plane is local, but 2 ranks were started", marks=pytest.mark.thorough
        ),
        (["--sync.pins", "{7: 1}"], "sync.pins"),  # after
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, mistake: list[str], sentence: str) -> None:
    done = run(train(*mistake), folder)
    assert done.status != 0
    assert len(done.sentences) == 1, done.story
    assert sentence in done.sentences[0]
    assert exit_code(done) == 2, done.story
    assert "mpi4py" not in done.err


@pytest.mark.parametrize(("rank", "bound"), [(0, "0"), pytest.param(1, "4", marks=pytest.mark.thorough)])
def test_a_killed_rank_ends_the_job_which_resumes(folder: Path, rank: int, bound: str) -> None:
    with job(train(*EMULATED, "--run.samples", "100000", "--sync.delay_bound", bound), folder) as process:
        trains(process, folder)
        os.kill(rank_process(process, rank), signal.SIGKILL)
        done = finished(process, SECONDS)
    assert done.status != 0
    # torchrun tells of whom it sees first: of the killed rank, or of one that has lost it.
    assert exit_code(done) in (-9, 1), done.story
    assert exit_code(done) == -9 or f"rank {rank} has gone" in done.err, done.story
    saved = newest(folder)
    total = saved + 400
    done = run(train("--resume", "run", "--run.samples", str(total)), folder)
    assert done.status == 0, done.story
    summary = summary_of(folder / "run")
    assert (summary["status"], summary["samples_applied"]) == ("finished", total)


def test_another_torchrun_outlives_a_death(folder: Path) -> None:
    """Each looks after its own node's ranks only. That of rank 0 holds the store."""
    here = ["--master-addr", "127.0.0.1", "--master-port", free_port(), "--nnodes", "2", "--nproc-per-node", "1"]
    words = [program("hetsync-train"), *RECIPE, *EMULATED, "--fault.tolerate", "true", "--fault.least_ranks", "1"]
    words += ["--run.samples", "4000"]
    with contextlib.ExitStack() as nodes:
        first, second = (
            nodes.enter_context(
                job([sys.executable, "-m", "torch.distributed.run", *here, "--node-rank", str(node), *words], folder)
            )
            for node in range(2)
        )
        trains(first, folder)
        os.kill(rank_process(second, 1), signal.SIGKILL)
        assert exit_code(finished(second)) == -9
        deadline = time.monotonic() + SECONDS
        while summary_of(folder / "run")["status"] == "running":  # it waits for the other torchrun afterwards, for long
            assert first.poll() is None, finished(first).story
            assert time.monotonic() < deadline, "the job has not ended in time"
            time.sleep(0.1)
    summary = summary_of(folder / "run")
    assert (summary["status"], summary["samples_applied"], summary["ranks"]) == ("finished", 4000, 1)
    assert [failure["rank"] for failure in summary["failures"]] == [1]


@pytest.mark.thorough
def test_under_one_torchrun_tolerance_is_refused(folder: Path) -> None:
    done = run(train("--fault.tolerate", "true"), folder)
    assert len(done.sentences) == 1, done.story
    assert "fault.tolerate is true, but a rank's death ends jobs with sums by Gloo" in done.sentences[0]
    assert "one torchrun a node" in done.sentences[0]
    assert exit_code(done) == 2, done.story


@BOUNDS
def test_a_signal_to_torchrun_saves(folder: Path, bound: str) -> None:
    with job(train(*EMULATED, "--run.samples", "100000", "--sync.delay_bound", bound), folder) as process:
        trains(process, folder)
        process.send_signal(signal.SIGTERM)
        done = finished(process, SECONDS)
    assert done.status != 0
    summary = summary_of(folder / "run")
    assert summary["status"] == "stopped", done.story
    assert newest(folder) == summary["samples_applied"] > 0


@pytest.mark.thorough
def test_a_script_may_have_two_jobs(folder: Path) -> None:
    """The second finds torchrun's store as the first has left it."""
    (folder / "script.py").write_text(TWO_JOBS)
    done = run(torchrun("script.py"), folder)
    assert done.status == 0, done.story
    # Lines of two ranks may run into each other.
    assert sorted(re.findall(r"job \d of rank \d ended after \d+ samples", done.out)) == [
        f"job {number} of rank {rank} ended after 64 samples" for number in range(2) for rank in range(2)
    ]


def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    """By a launcher that is not torchrun: rank 0 opens the store itself."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with started([program("hetsync-train"), *RECIPE], folder, told) as process:
            done = finished(process)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1
    assert f"MASTER_PORT is {port}, but rank 0 cannot open it" in done.sentences[0]


def test_a_rank_that_does_not_reach_the_store_says_so(folder: Path) -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with started([program("hetsync-train"), *RECIPE, "--run.timeout_seconds", "2"], folder, told) as process:
        done = finished(process)
    assert done.status == 2, done.story
    assert len(done.sentences) == 1
    assert "rank 1 does not reach the store of torch at 127.0.0.1, port 9" in done.sentences[0]


@pytest.mark.thorough
@pytest.mark.parametrize("bound", ["4"])
def test_a_launcher_other_than_torchrun(folder: Path, bound: str) -> None:
    """Rank 0 holds the store, and leaves last."""
    with ranks_alone(2, [program("hetsync-train"), *RECIPE, "--sync.delay_bound", bound], folder) as processes:
        ends = [finished(process) for process in processes]
    for done in ends:
        assert done.status == 0, done.story
        # c10d warns of its own where the machine resolves no host names
        assert not [line for line in done.err.splitlines() if "[c10d] The hostname of" not in line], done.story
    summary = summary_of(folder / "run")
    assert (summary["status"], summary["ranks"], summary["samples_applied"]) == ("finished", 2, SAMPLES)
    assert summary["staleness"]["max"] <= int(bound)
    assert sum(rank["samples"] for rank in summary["per_rank"]) == SAMPLES
    assert summary["plane"].startswith(
        "sums by Gloo and shared memory, messages by torch's store (run.plane is auto, and "
    )
