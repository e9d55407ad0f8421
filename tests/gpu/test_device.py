"""Time and copies of one CUDA device, in one process."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from hetsync.balance.device import MOST_SLICES_QUEUED, QueueingDevice, cuda_mark
from hetsync.data.loader import Loader, Source

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 200_000_000


def test_slices_are_timed_by_the_device_as_a_clock_would(cuda: torch.device) -> None:
    device = QueueingDevice(partial(cuda_mark, cuda))
    torch.cuda._sleep(BUSY_CYCLES)  # loads the kernel
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(4):
        device.begin_slice(1)
        torch.cuda._sleep(BUSY_CYCLES)
        device.end_slice()
    told = device.take_seconds()
    assert told == pytest.approx(time.monotonic() - began, rel=0.05)


def test_a_slice_is_over_before_what_other_streams_do(cuda: torch.device) -> None:
    """A device-wide wait would take the sleep on the other stream for the slice's."""
    device, other = QueueingDevice(partial(cuda_mark, cuda)), torch.cuda.Stream()
    device.begin_slice(1)
    torch.cuda._sleep(BUSY_CYCLES // 20)
    device.end_slice()
    with torch.cuda.stream(other):
        torch.cuda._sleep(10 * BUSY_CYCLES)
    device.take_seconds()
    assert not other.query()
    other.synchronize()


def test_the_host_does_not_run_far_ahead(cuda: torch.device) -> None:
    device, ended = QueueingDevice(partial(cuda_mark, cuda)), []
    for _ in range(6):
        device.begin_slice(1)
        assert sum(not event.query() for event in ended) <= MOST_SLICES_QUEUED
        torch.cuda._sleep(BUSY_CYCLES)
        device.end_slice()
        ended.append(torch.cuda.current_stream().record_event())
    torch.cuda.synchronize()


class Work:
    def __init__(self, number: int, spans: list[tuple[int, int]]) -> None:
        self.number, self.slices = number, [[span] for span in spans]


def test_batches_come_whole_while_the_device_is_busy(cuda: torch.device) -> None:
    """Copies on a stream of their own, from memory that is used anew: all values arrive nevertheless."""
    data = torch.arange(64 * 10_000, dtype=torch.float32).view(64, 10_000)
    loader = Loader(Source(TensorDataset(data), shuffle=False), 0, cuda)
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
