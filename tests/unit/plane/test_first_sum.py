"""A library that says only at its first sum that it cannot join the ranks' devices: Gloo plays NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from hetsync.plane import choice, groups
from hetsync.plane.base import LateError
from hetsync.plane.choice import ChosenPlane, DeviceOf
from hetsync.plane.groups import WATCHDOGS, GatedLane, GlooGroup, GroupLane, NcclLane, TorchSums, open_gloo
from hetsync.plane.local import LocalMessages
from hetsync.plane.polled import PolledSums

CPU = torch.device("cpu")
RANKS = 2
TIMEOUT_SECONDS = 6.0
Fault = Callable[[Any], Any]  # what a rank's group is replaced by


class Meeting:
    """Collectives between threads, each of which is a rank."""

    def __init__(self) -> None:
        self.slots: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=TIMEOUT_SECONDS)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        everyones = list(self.slots)
        self.barrier.wait()
        return everyones


class Thread(LocalMessages):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.rank, self.members = rank, tuple(range(RANKS))
        self.meeting = meeting

    def gather_objects(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)


class Raising:
    """A group whose first sum raises what NCCL says."""

    def __init__(self, group: GlooGroup) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def allreduce(self, tensors: Any) -> None:
        raise RuntimeError(
            "NCCL error: x.cpp:1, unhandled system error (e.g. socket). \nLast error:\nno room in /dev/shm"
        )


class Wrong(Raising):
    """Devices that read nothing of each other's, as where their links are broken."""

    def allreduce(self, tensors: Any) -> Any:
        return self.group.allreduce([torch.empty_like(tensor) for tensor in tensors])


def gloo_sums(store: dist.Store, rank: int) -> TorchSums:
    lane = GroupLane(open_gloo(store, "gloo", rank, RANKS, TIMEOUT_SECONDS))
    return TorchSums(PolledSums("Gloo", rank, RANKS, lane, lane), store, rank, RANKS, TIMEOUT_SECONDS)


class PlayedLane(GatedLane):
    """In the place of NcclLane."""

    faults: ClassVar[Sequence[Fault]]

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, device: torch.device, *more: Any) -> None:
        group, gate = (open_gloo(store, each, rank, size, TIMEOUT_SECONDS) for each in (name, f"{name} gate"))
        super().__init__(self.faults[rank](group), gate)


def settled(monkeypatch: pytest.MonkeyPatch, faults: list[Fault]) -> list[ChosenPlane]:
    """Every rank's plane, with a GPU of its own each."""
    here = threading.local()
    monkeypatch.setattr(DeviceOf, "here", lambda device: DeviceOf("a", f"cuda:{here.rank}", f"a GPU-{here.rank}"))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(groups, "NcclLane", PlayedLane)
    monkeypatch.setattr(PlayedLane, "faults", faults, raising=False)
    meeting, store = Meeting(), dist.HashStore()
    planes: dict[int, ChosenPlane] = {}

    def run(rank: int) -> None:
        here.rank = rank
        plane = ChosenPlane(Thread(meeting, rank), gloo_sums(store, rank), "torch", "why", TIMEOUT_SECONDS)
        plane.settle(CPU)
        planes[rank] = plane

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * TIMEOUT_SECONDS)
    return [planes[rank] for rank in range(RANKS)]


def sum_of_ones(planes: list[ChosenPlane]) -> list[list[float]]:
    """By what sums CUDA tensors now."""
    tensors = [torch.ones(3) for _ in planes]
    sums: list[PolledSums] = [plane.sums._of_cuda for plane in planes]  # type: ignore[attr-defined]
    handles = [each.allreduce(tensor) for each, tensor in zip(sums, tensors, strict=True)]
    while not all([handle.done() for handle in handles]):
        pass
    return [tensor.tolist() for tensor in tensors]


def as_it_is(group: Any) -> Any:
    return group


def test_a_library_that_joins_all_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    planes = settled(monkeypatch, [as_it_is, as_it_is])
    assert [plane.sums_by for plane in planes] == ["NCCL"] * RANKS
    assert {plane.why for plane in planes} == {"why; every rank has a CUDA device of its own"}
    assert sum_of_ones(planes) == [[RANKS] * 3] * RANKS


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([Raising, Raising], "no room in /dev/shm"),
        ([as_it_is, Raising], "no room in /dev/shm"),  # rank 0 waits in vain, and knows less
        ([Wrong, Wrong], "its first sum is 1 in place of 2"),
    ],
)
def test_where_the_first_sum_fails_all_keep_their_sums_and_say_why(
    monkeypatch: pytest.MonkeyPatch, faults: list[Fault], told: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    planes = settled(monkeypatch, faults)
    assert [plane.sums_by for plane in planes] == ["Gloo"] * RANKS
    assert {plane.why for plane in planes} == {f"why; no NCCL, as cpu of a is not joined ({told})"}
    assert sum_of_ones(planes) == [[RANKS] * 3] * RANKS
    assert not any(plane.failed for plane in planes)


def test_who_waits_in_vain_ends_before_the_others_have_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def late(lane: GroupLane, device: torch.device, seconds: float) -> None:
        limits.append(seconds)
        raise LateError("waited for its first sum")

    monkeypatch.setattr(choice, "sum_one", late)
    planes = settled(monkeypatch, [as_it_is, as_it_is])
    assert all("is not joined (waited for its first sum)" in plane.why for plane in planes)
    assert max(limits) < TIMEOUT_SECONDS / 2


class MadeGroup:
    """What stands in its environment when NCCL's group is made."""

    Options = staticmethod(lambda **given: type("Options", (), {})())

    def __init__(self, *given: object) -> None:
        self.environment = dict(os.environ)


@pytest.mark.parametrize("asked", [None, "3"])
def test_a_collective_that_fails_is_told_by_a_sentence_and_not_by_torchs_watchdog(
    monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    """Unless the environment asks for the watchdog. A script's own groups are as it makes them."""
    for name in WATCHDOGS:
        monkeypatch.delenv(name, raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", asked)
    before = dict(os.environ)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MadeGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    lane = NcclLane(dist.HashStore(), "lane", 0, 1, torch.device("cuda", 0), 10.0)
    expected = {**WATCHDOGS, **({} if asked is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": asked})}
    assert {name: lane.group.environment[name] for name in WATCHDOGS} == expected
    assert dict(os.environ) == before
