"""Which buffers travel, when, and that all ranks hold the same ones after each round."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from hetsync.plane.local import LocalPlane
from hetsync.sync.deltas import Deltas, Nesterov
from hetsync.sync.engine import Engine
from hetsync.sync.messages import StartRound
from hetsync.sync.shared_state import EngineOptions
from hetsync.sync.tail import Tail, added_buffers, shared_buffers

BATCH = 8


class Model(torch.nn.Module):
    buffer_rules: ClassVar = {"statistics": "mean", "positions": "mean", "mask": "mean", "hits": "sum"}

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("positions", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.register_buffer("statistics", torch.zeros(2))
        self.register_buffer("hits", torch.zeros(1))
        self.register_buffer("unruled", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def test_masks_and_what_is_not_saved_or_has_no_rule_stay_with_their_rank():
    """And those that add up come last."""
    model = Model()
    assert list(map(id, shared_buffers(model))) == list(map(id, [model.positions, model.statistics, model.hits]))
    assert list(map(id, added_buffers(model))) == [id(model.hits)]


def summed(tails):
    """The sums of one round; how many values went out."""
    sent, more = [], True
    while more:
        total = sum(tail.flat.clone() for tail in tails)
        for tail in tails:
            tail.flat.copy_(total)
        sent.append(total.numel())
        (more,) = {tail.unpack() for tail in tails}
    return sent


def test_a_buffer_travels_from_its_first_change_on():
    changes = [[torch.zeros(30), torch.zeros(2, 2)] for _ in range(2)]
    tails = [Tail(1, mine, torch.device("cpu")) for mine in changes]

    def one_round(*second):
        for tail, mine, value in zip(tails, changes, second, strict=True):
            tail.counts.fill_(3.0)
            mine[0].zero_()
            mine[1].fill_(value)
            tail.pack()
        sent = summed(tails)
        for tail, mine in zip(tails, changes, strict=True):
            assert tail.counts.tolist() == [6.0]
            assert torch.equal(mine[1], torch.full((2, 2), float(sum(second))))
            assert not mine[0].any()
            tail.land()
        return sent

    assert one_round(0, 0) == [3]  # a count and two questions
    assert one_round(0, 2) == [3, 4]  # rank 1's first change, in the same round
    assert one_round(1, 0) == [6]
    assert one_round(0, 0) == [6]


def test_a_round_that_does_not_count_makes_no_buffer_travel():
    """A rank has died, and of the others one had got further."""
    tails = [Tail(1, [torch.full((2,), float(rank))], torch.device("cpu"), rank) for rank in range(2)]
    for tail in tails:
        tail.pack()
    tails[0].flat.copy_(tails[0].flat + tails[1].flat)
    assert tails[0].unpack(), "rank 1 has changed its buffer"
    for tail in tails:
        tail.pack()
    assert tails[0].flat.numel() == tails[1].flat.numel()


def test_deltas_of_constants_do_not_travel_and_those_of_statistics_do():
    models = [Model() for _ in range(2)]
    everyones = [Deltas([model.weight], None, shared_buffers(model)) for model in models]
    for step in (1, 2):
        with torch.no_grad():
            models[1].statistics += 4.0
        for deltas, contribute in zip(everyones, (False, True), strict=True):
            if contribute:
                deltas.finish(4, 1)
            addend = deltas.pack(contribute, BATCH, "float32")
            assert addend.numel() == 4
        sent = summed([deltas.tail for deltas in everyones])
        assert sent == ([3, 2] if step == 1 else [2 + 2])
        for model, deltas in zip(models, everyones, strict=True):
            deltas.apply_sum()
            assert deltas.apply()
            assert torch.equal(model.statistics, torch.full((2,), 2.0 * step))
            assert torch.equal(model.positions, torch.arange(3.0))
            assert model.mask.tolist() == [0.0, float("-inf")]


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_the_outer_optimizer_leaves_statistics_alone(wire):
    norm, generator = torch.nn.BatchNorm1d(8), torch.Generator().manual_seed(0)
    deltas = Deltas(list(norm.parameters()), Nesterov(0.7, 0.9, BATCH), shared_buffers(norm))
    alone = torch.nn.BatchNorm1d(8)
    for _ in range(60):
        batch = 0.05 * torch.randn(BATCH, 8, generator=generator)
        norm(batch), alone(batch)
        deltas.finish(BATCH, 1)
        deltas.pack(True, BATCH, wire)
        summed([deltas.tail])
        deltas.apply_sum()
        assert deltas.apply()
        assert (norm.running_var > 0).all()
    torch.testing.assert_close(norm.running_var, alone.running_var)
    torch.testing.assert_close(norm.running_mean, alone.running_mean)


def test_it_is_summed_with_the_weights_once_all_buffers_travel():
    locals_ = [[torch.zeros(4), torch.zeros(2)] for _ in range(2)]
    ranks = [
        Deltas(own[:1], buffers=own[1:], rank=rank, ranks_counted=2, one_sum=True) for rank, own in enumerate(locals_)
    ]

    def one_round(amount):
        for rank, own in zip(ranks, locals_, strict=True):
            own[0] += amount
            own[1] += amount
            rank.finish(4, 1)
        addends = [rank.pack(True, BATCH, "float32") for rank in ranks]
        total = sum(addend.clone() for addend in addends)
        for addend in addends:
            addend.copy_(total)
        tails = [rank.tail for rank in ranks]
        sent = summed(tails) if tails[0].flat.numel() else []
        assert sent or not any([tail.unpack() for tail in tails]), "counts were behind the weights"
        for rank, own in zip(ranks, locals_, strict=True):
            rank.apply_sum()
            assert rank.samples_given() == {0: 4, 1: 4}
            assert rank.apply()
            assert [tensor.tolist() for tensor in own] == [[sum(amounts)] * 4, [sum(amounts)] * 2]
        return [total.numel(), *sent]

    amounts = [1.0]
    assert one_round(1.0) == [4, 3, 2], "weights; counts and a question; the buffer"
    amounts.append(2.0)
    assert one_round(2.0) == [4 + 2 + 2]


def test_a_void_round_that_was_one_sum_leaves_nothing_to_the_next():
    """A drain that a death has broken off, before a round whose weights are rounded."""
    own = torch.zeros(4)
    rank = Deltas([own], ranks_counted=2, one_sum=True)
    own += 1
    rank.finish(4, 1)
    rank.pack(True, BATCH, "float32").fill_(7.0)
    rank.take_back()
    rank.pack(True, BATCH, "bfloat16")
    rank.tail.flat.copy_(torch.tensor([4.0, 8.0]))
    rank.tail.unpack()
    rank.apply_sum()
    assert rank.samples_given() == {0: 4, 1: 8}


@pytest.mark.parametrize("norms", [False, True])
def test_a_jobs_rounds_are_one_sum_unless_norms_are_measured(norms):
    """Which are of weights alone."""
    options = EngineOptions(BATCH, measure_norms=norms)
    shared = Engine(LocalPlane(), torch.nn.Linear(2, 2), options)._shared
    shared.alone, shared.weights, shared.ranks_counted = False, [torch.zeros(4)], 2
    deltas = shared.delayed_mode()
    (addend,) = deltas.pack(StartRound(0, frozenset(), 0), False, BATCH, "float32")
    assert addend.numel() == (4 if norms else 4 + 2)
