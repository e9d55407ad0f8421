"""Sums within a group whose library reads a CUDA device's memory only, as NCCL does: library and device are played."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hetsync.plane.groups import GroupLane
from hetsync.plane.hierarchical import HierarchicalSums
from hetsync.plane.local import LocalSums

CUDA = torch.device("cuda", 0)
RANKS = 3


class CudaTensor(torch.Tensor):
    device, is_cuda = CUDA, True


class Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    query = is_completed


class PlayedStream:
    def __init__(self, *words: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> Done:
        return Done()


class Nccl:
    """A group of equal ranks, which refuses CPU tensors."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Done:
        tensors[0].mul_(RANKS)
        return self.broadcast(tensors)

    def broadcast(self, tensors: list[torch.Tensor], *options: Any) -> Done:
        if not tensors[0].is_cuda:
            raise RuntimeError("no backend of device type cpu")
        return Done()


class NcclLane(GroupLane):
    reads = CUDA


@pytest.fixture
def played_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty: Callable[..., torch.Tensor] = torch.empty

    def made(*size: Any, device: Any = None, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return empty(*size, **named).as_subclass(CudaTensor) if device == CUDA else empty(*size, **named)

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "Stream", PlayedStream)
    monkeypatch.setattr(torch.cuda, "current_stream", PlayedStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.usefixtures("played_device")
@pytest.mark.parametrize("kind", [torch.Tensor, CudaTensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_is_summed_wherever_it_lies(kind: type[torch.Tensor], dtype: torch.dtype) -> None:
    """At a rest all ranks sum what lies in the host's memory, also those whose groups have CUDA devices."""
    sums = HierarchicalSums("a play", 0, RANKS, LocalSums(), NcclLane(Nccl()), None)
    values = torch.arange(5, dtype=dtype)
    tensor = values.clone().as_subclass(kind)
    handle = sums.allreduce(tensor)
    while not handle.done():
        pass
    assert tensor.tolist() == (RANKS * values).tolist()
    sums.close()
