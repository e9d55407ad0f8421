"""Replicas in stages against one process: on threads or on ranks of MPI."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate
from workloads import Workload

from hetsync.data import Data
from hetsync.plan.blocks import Cut, cut
from hetsync.plan.calls import observed_call
from hetsync.plan.division import WHOLE, Division
from hetsync.plane.base import Channels, LateError
from hetsync.replica.base import MicroBatch, MicroBatches, Piece, Replica
from hetsync.replica.staged import StagedReplica, Stages
from hetsync.replica.whole import WholeReplica

SHARE, MICRO_BATCHES = 11, 4  # 3, 3, 3, 2

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda weights: torch.optim.AdamW(weights, 1e-3, weight_decay=0.1),
}


class ThreadedChannels(Channels):
    """Of one of several threads that stand for ranks."""

    def __init__(self, rank: int, ways: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self.rank, self._ways = rank, ways

    @staticmethod
    def among(ranks: int) -> list[ThreadedChannels]:
        ways: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(ranks) for b in range(ranks)
        }
        return [ThreadedChannels(rank, ways) for rank in range(ranks)]

    def send(self, note: Any, tensors: Sequence[torch.Tensor], to: int) -> None:
        self._ways[self.rank, to].put((note, [tensor.detach().clone() for tensor in tensors]))

    def receive(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        try:
            note, tensors = self._ways[source, self.rank].get(timeout=30)
        except queue.Empty:
            raise LateError(f"waited for rank {source}") from None
        return note, tensors

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def on_threads(ranks: int, work: Callable[[int, Channels], None]) -> None:
    """`work` of each rank on a thread of its own; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(rank: int, channels: Channels) -> None:
        try:
            work(rank, channels)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank, channels))
        for rank, channels in enumerate(ThreadedChannels.among(ranks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def micro_batches(data: Data, first: int = 0, division: Division = WHOLE) -> list[MicroBatch]:
    """Of `SHARE` samples, in double precision."""
    return _cut(data, range(first, first + SHARE), MICRO_BATCHES, division)


def double_batches(data: Data, first: int, shares: Sequence[int], counts: Sequence[int]) -> list[list[MicroBatch]]:
    """Of several replicas."""
    found = []
    for share, count in zip(shares, counts, strict=True):
        found.append(_cut(data, range(first, first + share), count))
        first += share
    return found


def _cut(data: Data, samples: Sequence[int], count: int, division: Division = WHOLE) -> list[MicroBatch]:
    return MicroBatches(data.train, _in_double_precision(data), count, division)(samples)


def _in_double_precision(data: Data) -> Callable[[list[Any]], Any]:
    def converted(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return lambda samples: tree_map(converted, (data.collate or default_collate)(samples))


def one_piece(batch: torch.Tensor) -> MicroBatch:
    return MicroBatch([Piece(batch, len(batch))])


def blocks_of(workload: Workload, data: Data) -> tuple[nn.Module, Cut]:
    """In double precision: small batches of batch norm make much of a rounding."""
    model = workload.model(data).double().train()
    return model, cut(model, observed_call(model, data.loss, micro_batches(data)[0].pieces[0].batch))


def unchanging(layers: int) -> nn.Module:
    """Layers that return what they are given."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    for weight in model.parameters():
        weight.data = torch.eye(4) if weight.ndim == 2 else torch.zeros(4)
    return model


def unequal(blocks: int, stages: int) -> list[int]:
    """Stages of the blocks: the later, the more of them."""
    weights = range(1, stages + 1)
    ends = [max(number, sum(weights[:number]) * blocks // sum(weights)) for number in weights]
    return [next(stage for stage, end in enumerate(ends) if block < end) for block in range(blocks)]


def train(
    replica: Replica, data: Data, optimizer: str, clip: float | None = None, division: Division = WHOLE, steps: int = 2
) -> list[float]:
    """Losses, and norms where there is clipping."""
    steppers = [OPTIMIZERS[optimizer](replica.parameters)] if replica.parameters else []
    told = []
    for step in range(steps):
        for stepper in steppers:
            stepper.zero_grad()
        told.append(replica.run(micro_batches(data, step * SHARE, division)))
        if clip is not None:
            told.append(replica.clip_grad_norm(clip))
        for stepper in steppers:
            stepper.step()
    return told


class Trained(NamedTuple):
    told: list[float]
    state: dict[str, torch.Tensor]


def trained_alone(model: nn.Module, data: Data, optimizer: str, clip: float | None) -> Trained:
    """By one process that accumulates the micro-batches; the model stays as it is."""
    alone = deepcopy(model)
    told = train(WholeReplica(alone, data.loss), data, optimizer, clip)
    return Trained(told, alone.state_dict())


def assert_equal_to_one_process(
    model: nn.Module,
    found: Cut,
    data: Data,
    stages: Stages,
    rank: int,
    channels: Channels,
    optimizer: str = "sgd",
    clip: float | None = None,
    alone: Trained | None = None,
) -> None:
    """`alone`: `trained_alone` with the same optimizer and clipping, where it is there already."""
    expected, wanted = alone or trained_alone(model, data, optimizer, clip)
    staged = deepcopy(model)
    before = {name: tensor.clone() for name, tensor in staged.state_dict().items()}

    replica = StagedReplica(staged, found, data.loss, stages, rank, channels)
    replica.release()
    told = train(replica, data, optimizer, clip, stages.division)

    assert told == pytest.approx(expected, rel=1e-9)
    assert not replica.parameters or any(not torch.equal(each, before[name]) for name, each in replica.held.items())
    for name, tensor in replica.held.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-9)
    whole = replica.whole(stages.all_ranks)
    assert whole is not None
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-9)
