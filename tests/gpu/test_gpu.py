"""What needs a CUDA device; skipped elsewhere. Several ranks share one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import command, environment, mpirun
from ranks import EPOCHS, SAMPLES
from torch.utils.data import TensorDataset

from hetsync.balance.device import MOST_SLICES_QUEUED, QueueingDevice, cuda_mark
from hetsync.data.loader import Loader, Source
from hetsync.profiling.device import memory_cap
from hetsync.sync.deltas import Deltas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HERE = Path(__file__).resolve().parent
CUDA = torch.device("cuda", 0)
BUSY_CYCLES = 200_000_000


def job(name: str, *words: object, ranks: int = 2) -> dict[str, Any]:
    """What rank 0 tells at the end of one of the jobs of ranks.py."""
    line = [*mpirun(ranks), sys.executable, HERE / "ranks.py", name, "cuda", *words]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(next(text for text in done.stdout.splitlines() if text.startswith("{")))
    return found


def test_the_plane_sums_what_the_device_is_still_working_on() -> None:
    worst = job("contract", ranks=3)
    assert worst["float32"] == 0
    assert max(worst["bfloat16"], worst["int8"]) < 0.02


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_synchronous_training_equals_one_process(precision: str, most: float, stream: str) -> None:
    assert job("synchronous", precision, stream)["furthest"] < most


@pytest.mark.parametrize("kind", ["plain", "own stream", "wire", "scaler", "compile"])
def test_delayed_training_learns_and_counts(kind: str) -> None:
    if kind == "compile":
        pytest.importorskip("triton")
    found = job("delayed", kind)
    assert found == {"same": True, "applied": EPOCHS * SAMPLES, "booked": EPOCHS * SAMPLES, "learned": True}


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_a_job_may_mix_cpu_and_cuda_ranks(delay_bound: int) -> None:
    assert job("mixed", delay_bound, ranks=3) == {"applied": EPOCHS * SAMPLES}


# Time.


def test_slices_are_timed_by_the_device_as_a_clock_would() -> None:
    device = QueueingDevice(partial(cuda_mark, CUDA))
    torch.cuda._sleep(BUSY_CYCLES)  # loads the kernel
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(4):
        device.begin_slice(1)
        torch.cuda._sleep(BUSY_CYCLES)
        device.end_slice()
    told = device.take_seconds()
    assert told == pytest.approx(time.monotonic() - began, rel=0.05)


def test_a_slice_is_over_before_what_other_streams_do() -> None:
    """A device-wide wait would take the sleep on the other stream for the slice's."""
    device, other = QueueingDevice(partial(cuda_mark, CUDA)), torch.cuda.Stream()
    device.begin_slice(1)
    torch.cuda._sleep(BUSY_CYCLES // 20)
    device.end_slice()
    with torch.cuda.stream(other):
        torch.cuda._sleep(10 * BUSY_CYCLES)
    device.take_seconds()
    assert not other.query()
    other.synchronize()


def test_the_host_does_not_run_far_ahead() -> None:
    device, ended = QueueingDevice(partial(cuda_mark, CUDA)), []
    for _ in range(6):
        device.begin_slice(1)
        assert sum(not event.query() for event in ended) <= MOST_SLICES_QUEUED
        torch.cuda._sleep(BUSY_CYCLES)
        device.end_slice()
        ended.append(torch.cuda.current_stream().record_event())
    torch.cuda.synchronize()


# Memory.


class Work:
    def __init__(self, number: int, spans: list[tuple[int, int]]) -> None:
        self.number, self.slices = number, [[span] for span in spans]


def test_batches_come_whole_while_the_device_is_busy() -> None:
    """Copies on a stream of their own, from memory that is used anew: all values arrive nevertheless."""
    data = torch.arange(64 * 10_000, dtype=torch.float32).view(64, 10_000)
    loader = Loader(Source(TensorDataset(data), shuffle=False), 0, CUDA)
    spans = [(start, start + 4) for start in range(0, 64, 4)]
    loader.prefetch(Work(0, spans))
    sums = []
    for (batch,) in loader.slices(Work(0, spans)):
        assert batch.is_cuda
        torch.cuda._sleep(BUSY_CYCLES // 10)
        sums.append(batch.double().sum())
        del batch
    loader.close()
    assert [float(each) for each in sums] == [float(data[a:b].double().sum()) for a, b in spans]


def test_the_memory_limit_is_found_without_dying_of_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 65536), torch.nn.ReLU(), torch.nn.Linear(65536, 1)).cuda()

    def loss(samples: int) -> torch.Tensor:
        made: torch.Tensor = model(torch.randn(samples, 1024, device="cuda")).mean()
        return made

    cap, half = (memory_cap(model, loss, CUDA, sharing) for sharing in (1, 2))
    assert cap is not None
    assert half is not None
    assert 2 < half < 0.51 * cap
    loss(int(0.5 * cap)).backward()  # well inside: does not raise


def test_delays_take_four_parameter_sized_buffers_on_the_device() -> None:
    tensors = [torch.zeros(1_000_000, device="cuda") for _ in range(4)]
    before = torch.cuda.memory_allocated()
    deltas = Deltas(tensors)
    assert torch.cuda.memory_allocated() - before <= 4 * 4 * 4_000_000 * 1.01
    assert deltas.anchor.is_cuda


OTHER_DEVICE = """
import torch, hetsync
from torch.utils.data import TensorDataset
with hetsync.join(device="cuda:1", progress=False, delay_bound=4) as job:
    model = torch.nn.Linear(4, 1).to(job.device)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    job.measure(lambda model, batch: model(batch[0]).square().mean())
    for (points,) in job.loader(TensorDataset(torch.ones(64, 4)), 8, samples=64):
        job.backward(model(points).square().mean())
        job.step(optimizer)
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_opens_no_context_on_other_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_DEVICE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["False", "True"], done.stdout + done.stderr


# Recipes.


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_recipe_runs_on_the_device(precision: str, tmp_path: Path) -> None:
    words = ["--run.dir", tmp_path / "run", "--run.samples", 2000, "--run.device", "cuda", "--run.precision", precision]
    subprocess.run(command(*words, ranks=2), check=True, timeout=120, env=environment())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert all(torch.cuda.get_device_name() in row["device"] for row in summary["per_rank"])


def test_an_emulated_device_may_be_a_gpu(tmp_path: Path) -> None:
    words = ["--run.dir", tmp_path / "run", "--run.samples", 640, "--run.device", "cuda", "--emulate", "homogeneous"]
    done = subprocess.run(
        command(*words, "--emulation.samples_per_second", 400, ranks=2), timeout=120, env=environment(), check=False
    )
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["emulated"] is True


def test_a_plan_cuts_the_model_over_ranks_of_one_device(tmp_path: Path) -> None:
    plan = {
        "format": 1,
        "batch_size": 64,
        "replicas": [
            {
                "micro_batches": 4,
                "stages": [{"ranks": [0], "blocks": ["features"]}, {"ranks": [1], "blocks": ["classifier"]}],
            }
        ],
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    words = ["--run.dir", tmp_path / "run", "--run.samples", 2048, "--run.device", "cuda", "--data.batch_size", 64]
    subprocess.run(
        command(*words, "--plan", tmp_path / "plan.yaml", ranks=2), check=True, timeout=120, env=environment()
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    for row in summary["per_rank"]:
        assert 0 < row["compute_seconds"] < row["train_seconds"]
        assert 0 < row["memory_bytes"] < 2**30  # profiling tries twice the batch, and more
