"""What ranks keep in memory before delayed training, and go back to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetsync.train import last_good
from hetsync.train.checkpoint import Loaded, Progress, restore
from hetsync.train.last_good import COPIES, MOST_OF_MEMORY, LastGood, copied, to_go_back_to
from hetsync.train.running import Running


def progress(applied: int) -> Progress:
    return Progress(
        samples_applied=applied,
        version=1,
        ranks=1,
        shares=(1,),
        delay_bound=4,
        quorum=0.25,
        accumulation=1,
        train_seconds=1.0,
    )


def made(model: nn.Module, optimizer: torch.optim.Optimizer, applied: int = 8, **state: Any) -> Loaded | None:
    return copied(progress(applied), model, [optimizer], None, state, ranks_here=1)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_all_that_is_trained_comes_back() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_buffer("graph", torch.eye(3).to_sparse())
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    stepped(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state[model[0].weight]["exp_avg"].clone()
    copy = made(model, optimizer)
    assert copy is not None
    assert copy.model["0.bias"].data_ptr() == model[0].bias.data_ptr(), "frozen weights are not copied"
    for _ in range(3):
        stepped(model, optimizer)
    restore(copy, model, [optimizer])
    for name, value in model.state_dict().items():
        same = value.to_dense() if value.is_sparse else value
        wanted = before[name].to_dense() if value.is_sparse else before[name]
        assert torch.equal(same, wanted), name
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments)


def test_state_that_no_checkpoint_could_keep_is_not_kept() -> None:
    model = nn.Linear(4, 3)
    assert made(model, torch.optim.SGD(model.parameters(), 0.1), odd=object()) is None


def test_short_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    room = int(COPIES / MOST_OF_MEMORY * sum(weight.nbytes for weight in model.parameters()))
    for free, ranks, enough in [(room, 1, True), (room, 2, False), (None, 8, True)]:
        monkeypatch.setattr(last_good, "available_host_bytes", lambda free=free: free)
        assert (copied(progress(8), model, [optimizer], None, {}, ranks) is not None) == enough


def test_the_newest_and_the_newest_proven_are_kept() -> None:
    model = nn.Linear(4, 3)
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), LastGood()
    found = []
    for applied, good in [(8, 0), (16, 4), (24, 16), (32, 26), (40, 26)]:
        kept.keep(made(model, optimizer, applied), good)
        found.append(kept.positions)
    assert found == [[8], [8, 16], [16, 24], [24, 32], [24, 40]]
    assert kept.at(24).progress.samples_applied == 24
    kept.keep(None, 40)
    assert kept.positions == []


def test_where_to_go_back_to() -> None:
    assert to_go_back_to([24, 40], good=30) == 24
    assert to_go_back_to([24, 40], good=40) == 40
    assert to_go_back_to([24, 40], good=10) == 24


def test_weights_that_are_not_finite_are_no_way_back() -> None:
    """Though a buffer may be: it is what the model makes of it."""
    running = Running.__new__(Running)
    running.model = nn.BatchNorm1d(1)
    running._kept = LastGood()
    with torch.no_grad():
        running.model.weight.fill_(torch.inf)
    running._keep_copy()
    assert running._kept.positions == []
    with torch.no_grad():
        running.model.weight.fill_(1.0)
        running.model.running_mean.fill_(torch.nan)
    with pytest.raises(AttributeError, match="session"):  # goes on to make one
        running._keep_copy()
