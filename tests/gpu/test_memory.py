"""Memory of a CUDA device: what is told to fit does."""

from __future__ import annotations

import pytest
import torch
from rank_jobs import job

from hetsync.profiling.device import memory_cap
from hetsync.sync.deltas import Deltas

pytestmark = pytest.mark.gpu


def test_a_job_trains_on_nearly_all_that_is_told_to_fit(device: str) -> None:
    found = job("full", device)
    assert found["steps"] == 8
    assert device == "cpu" or found["cap"] > 1000


def test_the_memory_limit_is_found_without_dying_of_it(cuda: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 65536), torch.nn.ReLU(), torch.nn.Linear(65536, 1)).cuda()

    def loss(samples: int) -> torch.Tensor:
        made: torch.Tensor = model(torch.randn(samples, 1024, device="cuda")).mean()
        return made

    cap, half = (memory_cap(model, loss, cuda, sharing) for sharing in (1, 2))
    assert cap is not None
    assert half is not None
    assert 2 < half < 0.51 * cap
    loss(int(0.5 * cap)).backward()  # well inside: does not raise
    torch.cuda.empty_cache()  # the ranks of other tests share the device


def test_delays_take_four_parameter_sized_buffers_on_the_device(cuda: torch.device) -> None:
    tensors = [torch.zeros(1_000_000, device="cuda") for _ in range(4)]
    before = torch.cuda.memory_allocated()
    deltas = Deltas(tensors)
    assert torch.cuda.memory_allocated() - before <= 4 * 4 * 4_000_000 * 1.01
    assert deltas.anchor.is_cuda
