"""16-bit weights: what they cannot hold is kept beside them, and no progress that is not a number goes out."""

from __future__ import annotations

import math

import pytest
import torch

from hetsync.sync.deltas import Deltas

BATCH = 8


def one_round(everyones, contribute):
    flights = [mine.pack(gives, BATCH, "float32") for mine, gives in zip(everyones, contribute, strict=True)]
    total = sum(flight.clone() for flight in flights)
    for flight, mine in zip(flights, everyones, strict=True):
        flight.copy_(total)
        mine.apply_sum()
        assert mine.apply()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_too_small_for_the_weights_add_up(dtype):
    """Each rank's step is one that its weights can hold; an eighth of it is not, eight times that is."""
    locals_ = [[torch.ones(4, dtype=dtype)] for _ in range(8)]
    everyones = [Deltas(local) for local in locals_]
    step = torch.finfo(dtype).eps
    for rank in range(8):
        locals_[rank][0] += step
        everyones[rank].finish(1, 1)
        one_round(everyones, [other == rank for other in range(8)])
    expected = torch.full((4,), 1 + step, dtype=torch.float32)
    assert torch.equal(everyones[0].anchor, expected)
    for mine in everyones:
        assert torch.equal(mine.anchor, everyones[0].anchor)
        mine.finish(1, 1)
        assert not mine._pending.values.any(), "what rounds brought is nobody's progress"


def test_at_rest_the_anchor_is_what_the_weights_hold():
    locals_ = [[torch.ones(4, dtype=torch.bfloat16)] for _ in range(2)]
    everyones = [Deltas(local) for local in locals_]
    locals_[0][0] += 2**-7
    everyones[0].finish(4, 1)
    one_round(everyones, [True, False])
    for local, mine in zip(locals_, everyones, strict=True):
        mine.reset_to_anchor()
        assert torch.equal(mine.anchor, local[0].float())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_progress_that_is_not_finite_never_goes_out(bad):
    local = [torch.zeros(4)]
    deltas = Deltas(local)
    local[0] += 1
    assert deltas.finish(4, 1) == 4.0
    local[0][2] = bad
    assert not math.isfinite(deltas.finish(4, 1))
    assert deltas.pack(True, BATCH, "float32").isfinite().all()
    deltas.apply_sum()
    assert deltas.anchor.isfinite().all()
