"""Sums by a library that spins until all ranks have come, as NCCL's kernels do: it is played, and so is the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hetsync.plane.groups import GatedLane
from hetsync.plane.polled import PolledSums
from hetsync.plane.staging import HostStaging, Test
from hetsync.plane.wire import WIRE_FORMATS

CPU = torch.device("cpu")


class Work:
    def __init__(self, done: Callable[[], bool]) -> None:
        self.is_completed = done

    def wait(self) -> None:
        assert self.is_completed()


class Meeting:
    """The collectives of one group, in order: each is over once so many ranks have posted it."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.come = ranks, [0] * ranks  # posted by each

    def post(self, rank: int) -> Work:
        self.come[rank] += 1
        number = self.come[rank]
        return Work(lambda: min(self.come) >= number)


class PlayedGroup:
    """One rank's end of a meeting. It carries no values."""

    def __init__(self, meeting: Meeting, rank: int, posted: Callable[[], None] = lambda: None) -> None:
        self._meeting, self._rank, self._posted = meeting, rank, posted

    def __getattr__(self, name: str) -> Callable[..., Work]:
        def post(*words: Any) -> Work:
            self._posted()
            return self._meeting.post(self._rank)

        return post


class SlowStaging(HostStaging):
    """Of a device that is still at a slice, so that nothing of it is ready before."""

    at_work = False

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        return tensor, lambda: not self.at_work


def played(ranks: int, posted: list[int]) -> tuple[list[PolledSums], list[SlowStaging]]:
    """Their sums, which note who has posted, and their devices."""
    sums, gates = Meeting(ranks), Meeting(ranks)
    everyones, devices = [], [SlowStaging() for _ in range(ranks)]
    for rank, device in enumerate(devices):
        group = PlayedGroup(sums, rank, lambda rank=rank: posted.append(rank))
        lane = GatedLane(group, PlayedGroup(gates, rank))
        everyones.append(PolledSums("a play", rank, ranks, lane, lane))
        everyones[-1]._staging[CPU] = device
    return everyones, devices


def poll(handles: Sequence[Any], times: int = 20) -> bool:
    return [[handle.done() for handle in handles] for _ in range(times)][-1] == [True] * len(handles)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_nobody_posts_before_the_slowest_device_is_ready(wire: Any, slow: int) -> None:
    """Kernels of those who are would take multiprocessors from their own slices until then."""
    posted: list[int] = []
    everyones, devices = played(3, posted)
    devices[slow].at_work = True
    handles = [sums.allreduce(torch.ones(64), wire) for sums in everyones]
    assert not poll(handles)
    assert posted == []
    devices[slow].at_work = False
    assert poll(handles)
    assert sorted(posted) == sorted([0, 1, 2] * (1 if wire == "float32" else 2))
