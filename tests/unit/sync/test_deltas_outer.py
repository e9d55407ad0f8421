"""The outer optimizer over the delayed mode's tensors."""

from __future__ import annotations

import pytest
import torch

from hetsync.errors import UserError
from hetsync.sync.deltas import Deltas, Nesterov

SIZE = 8
BATCH = 8


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.5, 0.5)])
def test_nesterov_is_that_of_torch(rate, momentum):
    weights = torch.nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.SGD([weights], lr=rate, momentum=momentum, nesterov=momentum > 0)
    local = [weights.detach().clone()]
    deltas = Deltas(local, Nesterov(rate, momentum, BATCH))
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        step = torch.randn(SIZE, generator=generator)
        weights.grad = -step
        theirs.step()
        local[0] += step
        deltas.finish(BATCH, 1)
        deltas.pack(True, BATCH, "float32")
        deltas.tail.unpack()
        deltas.apply_sum()
        deltas.apply()
        assert torch.allclose(deltas.anchor, weights, atol=1e-5)
        assert torch.allclose(local[0], weights, atol=1e-5)


def test_anchors_stay_identical_behind_an_outer_optimizer():
    locals_ = [[torch.zeros(SIZE)] for _ in range(3)]
    deltas = [Deltas(local, Nesterov(0.7, 0.9, BATCH)) for local in locals_]
    generator = torch.Generator().manual_seed(3)
    for number in range(6):
        flights = []
        for index, (local, mine) in enumerate(zip(locals_, deltas, strict=True)):
            contribute = (number + index) % 3 != 0
            if contribute:
                local[0] += torch.randn(SIZE, generator=generator)
                mine.finish(2, 1)
            flights.append(mine.pack(contribute, BATCH, "float32"))
        total = sum(f.clone() for f in flights)
        samples = sum(mine.tail.flat.clone() for mine in deltas)
        for flight, mine in zip(flights, deltas, strict=True):
            flight.copy_(total)
            mine.tail.flat.copy_(samples)
            mine.tail.unpack()
            mine.apply_sum()
            mine.apply()
        assert all(torch.equal(mine.anchor, deltas[0].anchor) for mine in deltas)
        assert all(torch.allclose(local[0], deltas[0].anchor, atol=1e-6) for local in locals_)


@pytest.mark.parametrize("parts", [[1.0], [0.25] * 4, [0.5, 0.125, 0.375], [3.0], [0.0, 1.0, 0.0]])
def test_progress_gains_as_much_into_however_many_rounds_it_is_cut(parts):
    """And rounds without samples, such as an empty drain, move nothing."""
    outer, moved = Nesterov(0.7, 0.9, BATCH), 0.0
    for part in parts:
        step = torch.full((1,), part)
        outer(step, part * BATCH)
        moved += step.item()
        if not part:
            assert step.item() == 0
    for part in [0.3] * 1000:
        step = torch.zeros(1)
        outer(step, part * BATCH)
        moved += step.item()
    assert moved == pytest.approx(0.7 / (1 - 0.9) * sum(parts), rel=1e-4)


def test_momentum_of_another_model_is_refused():
    outer = Nesterov(0.7, 0.9, BATCH)
    outer.velocity = torch.zeros(SIZE + 1)
    with pytest.raises(UserError, match="outer momentum has 9 values, the model 8 weights"):
        outer(torch.zeros(SIZE), BATCH)
