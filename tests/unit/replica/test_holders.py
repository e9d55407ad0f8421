"""At a rest all holders of a tensor come to the same optimizer state and counters, in replicas cut at other places."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import torch
from replicas import on_threads
from torch import nn

from hetsync.plane.base import Channels
from hetsync.replica.holders import Counters, average_over_holders

# Replica 0: a on rank 0, b on rank 1. Replica 1: all on rank 2.
SEGMENTS = {(0, 2): ["a.weight", "a.bias"], (1, 2): ["b.weight", "b.bias", "b.running_mean"]}
SAMPLES = {0: 30, 1: 30, 2: 10}
HELD = {0: ("a",), 1: ("b",), 2: ("a", "b")}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.BatchNorm1d(3)


class Meeting:
    """Of three threads that gather values."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(3, timeout=20)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = deepcopy(value)
        self._barrier.wait()
        told = [self._values[each] for each in range(3)]
        self._barrier.wait()
        return told


def test_optimizer_state_is_averaged_over_its_holders_by_their_samples() -> None:
    torch.manual_seed(1)
    gradients = {rank: {name: torch.randn_like(p) for name, p in Pair().named_parameters()} for rank in (0, 1, 2)}
    meeting, found = Meeting(), dict[int, dict[str, torch.Tensor]]()

    def work(rank: int, channels: Channels) -> None:
        model = Pair()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for name, parameter in model.named_parameters():
            if name.split(".")[0] in HELD[rank]:
                parameter.grad = gradients[rank][name]
        optimizer.step()  # whose momentum is the gradient now
        weights = dict(model.named_parameters())
        gather = lambda value: meeting.gather(rank, value)  # noqa: E731
        average_over_holders(optimizer, weights, SEGMENTS, SAMPLES[rank], rank, gather, channels)
        found[rank] = {n: optimizer.state[p]["momentum_buffer"] for n, p in weights.items() if p in optimizer.state}

    on_threads(3, work)
    for holders, names in SEGMENTS.items():
        for name in names:
            if name == "b.running_mean":
                continue
            wanted = sum(SAMPLES[holder] * gradients[holder][name] for holder in holders) / 40
            torch.testing.assert_close(found[holders[0]][name], wanted)
            assert torch.equal(found[holders[0]][name], found[holders[1]][name])
    assert [sorted({name.split(".")[0] for name in found[rank]}) for rank in (0, 1, 2)] == [["a"], ["b"], ["a", "b"]]


def test_counters_are_those_of_the_lowest_holder_that_has_counted() -> None:
    meeting, found = Meeting(), dict[int, list[int]]()

    def work(rank: int, channels: Channels) -> None:
        model = Pair()
        held = dict(model.b.named_buffers()) if rank else {}
        counters = Counters(held, {"num_batches_tracked": "rows"})
        told = []
        for counted in ({2: 5}, {1: 2, 2: 9}, {}):
            model.b.num_batches_tracked += counted.get(rank, 0)
            counters.share(lambda value: meeting.gather(rank, value), 8)
            told.append(int(model.b.num_batches_tracked))
        found[rank] = told

    on_threads(3, work)
    assert found == {0: [0, 0, 0], 1: [5, 7, 7], 2: [5, 7, 7]}
