"""Which loops carry state from batch to batch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from hetsync.config.schema import SyncConfig
from hetsync.errors import UserError
from hetsync.train.carried import WATCHED_BATCHES, CarriedState, keeps_columns

POINTS = torch.randn(4, 3, 5)


class OwnCell(nn.Module):
    """A recurrence without a layer of torch's; it hands on a graph that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5 + 6, 6)

    def forward(self, points, state=None, graph=None):
        state = {"of": torch.zeros(len(points), 6)} if state is None else state
        for step in points.unbind(1):
            state = {"of": self.mix(torch.cat([step, state["of"]], 1)).tanh()}
        return state["of"].sum(1), state, graph


class Keeping(nn.Module):
    """Its state is its own attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.LSTM(5, 6, batch_first=True), None

    def forward(self, points):
        out, self.state = self.layer(points, self.state)
        self.state = tuple(part.detach() for part in self.state)
        return out


def gru(model, state):
    return model(POINTS, None if state is None else state.detach())[1]


def own(model, state):
    return model(POINTS, state=None if state is None else {"of": state["of"].data})[1]


CARRY = {
    "a layer": (lambda: nn.GRU(5, 6, batch_first=True), gru),
    "a cell": (lambda: nn.RNNCell(5, 6), lambda model, state: model(POINTS[:, 0], state)),
    "a recurrence of one's own": (OwnCell, own),
    "an attribute": (Keeping, lambda model, state: model(POINTS)),
}


@pytest.mark.parametrize("case", CARRY)
def test_state_of_the_batch_before_is_refused(case: str) -> None:
    make, step = CARRY[case]
    model = make()
    watch = CarriedState([model], 3)
    watch.begin_batch()
    state = step(model, step(model, None))  # within a batch, in pieces
    watch.begin_batch()
    with pytest.raises(UserError, match=r"gives the \w+ state .* on 3 ranks .*sync.rebalance false"):
        step(model, state)


def fresh(model, state, graph):
    return model(POINTS, graph=graph)[1]


def handed_on(model, state, graph):
    return model(POINTS, graph=graph)[2]


def evaluated(model, state, graph):
    with torch.no_grad():
        model.eval()
        state = own(model, state)
        model.train()
    model(POINTS)
    return state


@pytest.mark.parametrize("step", [fresh, handed_on, evaluated])
def test_what_is_no_such_state_is_let_be(step) -> None:
    model, graph, state = OwnCell(), torch.eye(6), None
    watch = CarriedState([model], 2)
    for _ in range(WATCHED_BATCHES):
        watch.begin_batch()
        state = step(model, state, graph)


def test_only_the_first_batches_are_looked_at() -> None:
    model, state = nn.GRU(5, 6, batch_first=True), None
    watch = CarriedState([model], 2)
    watch.begin_batch()
    copied = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    for _ in range(2):
        state = gru(copied, state)
    for _ in range(WATCHED_BATCHES):
        watch.begin_batch()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_compiled_models_are_not_watched() -> None:
    model = OwnCell()
    model.compile()
    CarriedState([model, torch.compile(OwnCell()), torch.jit.script(nn.Linear(2, 2))], 2)
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("sync", "ranks", "keeps"),
    [
        (SyncConfig(delay_bound=4), 1, True),
        (SyncConfig(delay_bound=0), 2, False),
        (SyncConfig(delay_bound=0, rebalance=False), 2, True),
        (SyncConfig(delay_bound=0, shares="equal"), 2, True),
        (SyncConfig(delay_bound=0, rebalance=False, accumulation=2), 2, False),
        (SyncConfig(delay_bound=1, rebalance=False), 2, False),
    ],
)
def test_a_rank_keeps_its_place_of_each_batch(sync, ranks, keeps) -> None:
    assert keeps_columns(sync, ranks) is keeps
