"""Hidden state that a loop carries from batch to batch, as truncated backpropagation through time does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hetsync
from hetsync.plane.base import Plane

COLUMNS, CHUNKS, FEATURES = 8, 12, 4


class Chunks(Dataset[Any]):
    """Pieces of some sequences, piece by piece: a batch holds the same piece of all."""

    def __init__(self) -> None:
        self.pieces = torch.randn(CHUNKS * COLUMNS, 5, FEATURES, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pieces[index], index % COLUMNS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.last = nn.LSTM(FEATURES, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, pieces: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        out, state = self.layer(pieces, state)
        return self.last(out), state


class Alone:
    """One process and plain PyTorch."""

    def prepare(self, *things: Any) -> Any:
        return things

    def loader(self, data: DataLoader[Any]) -> DataLoader[Any]:
        return data

    def epochs(self, count: int) -> range:
        return range(count)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


def train(job: Any) -> tuple[nn.Module, list[list[int]]]:
    """Two epochs; and the sequences of each batch."""
    model, seen = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = job.prepare(model, optimizer)
    loader = job.loader(DataLoader(Chunks(), COLUMNS))
    for _ in job.epochs(2):
        state = None
        for pieces, columns in loader:
            seen.append(columns.tolist())
            out, state = model(pieces, state)
            state = tuple(part.detach() for part in state)
            job.backward((out.squeeze(2) - pieces.cumsum(1).sum(2)).square().mean())
            job.step(optimizer)
    return model, seen


def test_ranks_that_keep_their_places_carry_state_as_one_process_does(plane: Plane) -> None:
    pins = {} if plane.size == 1 else {0: 3}
    with hetsync.join(plane=plane, delay_bound=0, rebalance=False, pins=pins, progress=False) as job:
        model, seen = train(job)
    places = {tuple(columns) for columns in seen}
    assert len(places) <= 1  # a rank may have none
    everyones = plane.gather_objects(places)
    assert sorted(column for places in everyones for columns in places for column in columns) == list(range(COLUMNS))
    alone, _ = train(Alone())
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
