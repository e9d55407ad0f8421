"""The outer optimizer over the delayed mode's tensors."""

from __future__ import annotations

import pytest
import torch

from hetsync.sync.deltas import Deltas, Nesterov

SIZE = 8
BATCH = 8


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.5, 0.5)])
def test_nesterov_is_that_of_torch(rate, momentum):
    weights = torch.nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.SGD([weights], lr=rate, momentum=momentum, nesterov=momentum > 0)
    local = [weights.detach().clone()]
    deltas = Deltas(local, Nesterov(rate, momentum))
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        step = torch.randn(SIZE, generator=generator)
        weights.grad = -step
        theirs.step()
        local[0] += step
        deltas.finish(BATCH, 1)
        deltas.load(True, BATCH, "float32")
        deltas.land()
        deltas.apply()
        assert torch.allclose(deltas.anchor, weights, atol=1e-5)
        assert torch.allclose(local[0], weights, atol=1e-5)


def test_anchors_stay_identical_behind_an_outer_optimizer():
    locals_ = [[torch.zeros(SIZE)] for _ in range(3)]
    deltas = [Deltas(local, Nesterov(0.7, 0.9)) for local in locals_]
    generator = torch.Generator().manual_seed(3)
    for number in range(6):
        flights = []
        for index, (local, mine) in enumerate(zip(locals_, deltas, strict=True)):
            contribute = (number + index) % 3 != 0
            if contribute:
                local[0] += torch.randn(SIZE, generator=generator)
                mine.finish(2, 1)
            flights.append(mine.load(contribute, BATCH, "float32"))
        total = sum(f.clone() for f in flights)
        for flight, mine in zip(flights, deltas, strict=True):
            flight.copy_(total)
            mine.land()
            mine.apply()
        assert all(torch.equal(mine.anchor, deltas[0].anchor) for mine in deltas)
        assert all(torch.allclose(local[0], deltas[0].anchor, atol=1e-6) for local in locals_)
