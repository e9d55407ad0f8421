"""What needs a CUDA device; skipped elsewhere. Ranks of the mixed job share the device and the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetsync.profiling.device import memory_cap
from hetsync.sync.deltas import Deltas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]

STAGING = """
import time, torch
from hetsync.plane.mpi import MpiPlane
plane = MpiPlane()
device = "cuda" if plane.rank % 2 == 0 else "cpu"
for wire in ("float32", "bfloat16", "int8"):
    tensor = torch.full((100_001,), float(plane.rank + 1), device=device)
    handle = plane.allreduce(tensor, wire)
    while not handle.done():
        time.sleep(1e-4)
    expected = plane.size * (plane.size + 1) / 2
    assert torch.allclose(tensor.cpu(), torch.full((100_001,), expected), rtol=0.02), (wire, tensor[:4])
plane.close()
print("staged")
"""

MIXED = """
import sys, torch, hetsync
from hetsync.data.sets.digits import digits
from hetsync.models.digits_cnn import DigitsCNN
from hetsync.plane import open_plane
plane = open_plane("mpi")
device = "cuda" if plane.rank == 0 else "cpu"
data = digits()
model = DigitsCNN().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
bound = int(sys.argv[1])
with hetsync.join(model, optimizer, data.train, epochs=4, plane=plane, delay_bound=bound) as session:
    for images, labels in session.slices():
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        session.step(loss)
print("mixed", session.totals.anchor_sha256)
"""


def under_mpirun(ranks: int, code: str, *arguments: object) -> str:
    words = [ROOT / "launch" / "local", ranks, "--", sys.executable, "-c", code, *arguments]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cuda_tensors_travel_through_pinned_memory_beside_cpu_tensors() -> None:
    assert under_mpirun(2, STAGING).count("staged") == 2


@pytest.mark.parametrize("delay_bound", [0, 4])
def test_a_job_may_mix_cpu_and_cuda_ranks(delay_bound: int) -> None:
    assert under_mpirun(3, MIXED, delay_bound).count("mixed") == 3


def test_the_memory_limit_is_found_without_dying_of_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 65536), torch.nn.ReLU(), torch.nn.Linear(65536, 1)).cuda()

    def loss(samples: int) -> torch.Tensor:
        return model(torch.randn(samples, 1024, device="cuda")).mean()

    cap = memory_cap(model, loss, torch.device("cuda"), 1)
    assert cap is not None
    assert cap > 2
    loss(int(0.5 * cap)).backward()  # well inside: does not raise


def test_delays_take_four_parameter_sized_buffers_on_the_device() -> None:
    tensors = [torch.zeros(1_000_000, device="cuda") for _ in range(4)]
    before = torch.cuda.memory_allocated()
    deltas = Deltas(tensors)
    assert torch.cuda.memory_allocated() - before <= 4 * 4 * 4_000_000 * 1.01
    assert deltas.anchor.is_cuda


def test_the_trainer_runs_on_the_device(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [ROOT / "launch" / "local", 2, "--run.dir", run, "--run.samples", 2000, "--run.device", "cuda"]
    subprocess.run(list(map(str, words)), check=True, timeout=120, env=os.environ)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert "NVIDIA" in summary["per_rank"][0]["device"]
