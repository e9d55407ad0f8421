"""Sums over ranks whose devices are of several types: one has a CUDA device, one an Apple GPU, one a processor.

The devices are played: what they say of themselves, and that libraries do not read their memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elsewhere import OnCuda, OnMps, on

from hetsync.plane import staging
from hetsync.plane.blocking import wait_until
from hetsync.plane.choice import DeviceOf, groups_of, reason_against_nccl
from hetsync.plane.groups import TorchSums, gloo_sums, open_gloo
from hetsync.plane.staging import HostStaging, Test, at_once, staging_for

KINDS = (OnCuda, OnMps, torch.Tensor)
RANKS = len(KINDS)
SECONDS = 20.0


class PlayedCuda(HostStaging):
    """In the place of pinned memory and streams."""

    def __init__(self, device: torch.device, direct: bool) -> None:
        assert device.type == "cuda"
        assert not direct

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        return (tensor.as_subclass(torch.Tensor).clone() if tensor.is_cuda else tensor), at_once


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CudaStaging", PlayedCuda)


def by_ranks(work: Callable[[int], Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        found[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    return [found[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("values", [5, 5000])
def test_gloo_sums_tensors_of_any_device(values: int) -> None:
    store = dist.HashStore()

    def summed(rank: int) -> torch.Tensor:
        gloo = gloo_sums(lambda name: open_gloo(store, name, rank, RANKS, SECONDS), rank, RANKS, SECONDS)
        sums = TorchSums(gloo, store, rank, RANKS, SECONDS)
        tensor = on(KINDS[rank], torch.arange(values, dtype=torch.float32) * (rank + 1))
        wait_until(sums.allreduce(tensor).done, SECONDS, lambda: "the sum")
        return tensor.as_subclass(torch.Tensor)

    for found in by_ranks(summed):
        assert torch.equal(found, 6 * torch.arange(values, dtype=torch.float32))


def test_cuda_tensors_alone_are_for_nccl() -> None:
    """Those of another device, such as a metric's, go by Gloo."""
    gloo, nccl = (gloo_sums(lambda name: open_gloo(dist.HashStore(), name, 0, 1, SECONDS), 0, 1, SECONDS) for _ in "ab")
    sums = TorchSums(gloo, dist.HashStore(), 0, 1)
    sums._of_cuda = nccl
    for tensor, carrier in ((on(OnCuda, torch.ones(2)), nccl), (on(OnMps, torch.ones(2)), gloo), (torch.ones(2), gloo)):
        before = carrier.moves
        wait_until(sums.allreduce(tensor).done, SECONDS, lambda: "the sum")
        assert carrier.moves == before + 1


def test_what_is_summed_elsewhere_comes_back() -> None:
    tensor = on(OnMps, torch.ones(3))
    there = staging_for(tensor.device, None)
    values, ready = there.fetch(tensor)
    assert type(values) is torch.Tensor
    assert ready()
    assert tensor.tolist() == [1, 1, 1]
    assert there.store(values * 2, into=tensor)()
    assert tensor.tolist() == [2, 2, 2]


def test_no_nccl_where_one_rank_has_no_cuda_device() -> None:
    here = DeviceOf.here
    devices = [DeviceOf("a", "cuda:0", "gpu"), here(torch.device("mps", 0)), here(torch.device("cpu"))]
    assert reason_against_nccl(devices) == "rank 1, 2 has no CUDA device"
    assert groups_of(devices) == [[0], [1], [2]]
