"""Sums over replicas that are cut at different places."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from replicas import on_threads
from torch import nn

from hetsync.plan.graph import Block, BlockGraph, Edge
from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plane.base import Channels
from hetsync.replica.segments import SegmentSums, segments_of


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.unused = nn.Parameter(torch.ones(2))
        self.c = nn.Linear(3, 5)


GRAPH = BlockGraph(
    (
        Block("a", "Linear", ("a.weight", "a.bias", "unused"), 0),
        Block("b", "BatchNorm1d", ("b.weight", "b.bias", "b.running_mean", "b.running_var"), 0),
        Block("c", "Linear", ("c.weight", "c.bias"), 0),
    ),
    (Edge(0, 1), Edge(1, 2)),
)
# Three replicas on five ranks: cut behind a, behind b, and not at all.
PLACEMENT = Placement(
    (
        Replica((Stage((4,), (0,)), Stage((1,), (1, 2)))),
        Replica((Stage((0,), (0, 1)), Stage((3,), (2,)))),
        Replica((Stage((2,), (0, 1, 2)),)),
    )
)
REPLICA_OF = {4: 0, 1: 0, 0: 1, 3: 1, 2: 2}
WEIGHTS = (0.5, 0.2, 0.3)


def test_each_tensor_is_summed_over_its_holders() -> None:
    segments = segments_of(PLACEMENT, GRAPH)
    assert {holders: len(names) for holders, names in segments.items()} == {(4, 0, 2): 3, (1, 0, 2): 4, (1, 3, 2): 2}

    torch.manual_seed(3)
    model = Three()
    own_gradients = [{n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in WEIGHTS]
    changes = [torch.randn(3) for _ in WEIGHTS]
    found: dict[int, nn.Module] = {}

    def work(rank: int, channels: Channels) -> None:
        mine, number = deepcopy(model), REPLICA_OF[rank]
        sums = SegmentSums(segments, mine, rank, channels)
        for _ in range(2):
            sums.begin()
            for name, parameter in mine.named_parameters():
                parameter.grad = None if name == "unused" else own_gradients[number][name].clone()
            mine.b.running_mean += changes[number]
            sums.finish(WEIGHTS[number])
        found[rank] = mine

    on_threads(5, work)
    mean_change = sum(weight * change for weight, change in zip(WEIGHTS, changes, strict=True))
    for holders, names in segments.items():
        for name in names:
            told = [dict(found[rank].named_parameters()).get(name) for rank in holders]
            if name == "unused":
                assert all(parameter is not None and parameter.grad is None for parameter in told)
            elif told[0] is not None:
                gradients = [parameter.grad for parameter in told if parameter is not None]
                wanted = sum(weight * own[name] for weight, own in zip(WEIGHTS, own_gradients, strict=True))
                torch.testing.assert_close(gradients[0], wanted)
                assert all(torch.equal(each, gradients[0]) for each in gradients)  # the same bits
    means = [found[rank].b.running_mean for rank in (1, 0, 2)]
    torch.testing.assert_close(means[0], 2 * mean_change)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert all(torch.equal(found[rank].b.running_var, torch.ones(3)) for rank in (1, 0, 2))


def test_a_gradient_that_one_replica_has_is_everybodys() -> None:
    segments = {(0, 1): ["weight"]}
    found = {}

    def work(rank: int, channels: Channels) -> None:
        layer = nn.Linear(2, 2, bias=False)
        sums = SegmentSums(segments, layer, rank, channels)
        sums.begin()
        layer.weight.grad = torch.ones(2, 2) if rank else None
        sums.finish(0.25)
        found[rank] = layer.weight.grad

    on_threads(2, work)
    assert [None if each is None else each.tolist() for each in (found[0], found[1])] == [[[0.25, 0.25]] * 2] * 2
    assert pytest.approx(float(found[0].sum())) == 1.0
