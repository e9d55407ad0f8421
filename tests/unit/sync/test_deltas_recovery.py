"""Delayed mode's tensors after a death: contributions to a round that does not count, and a round that has landed on
others only. Progress is of small integers, so that float32 is exact.
"""

from __future__ import annotations

import random

import pytest
import torch

from hetsync.sync.deltas import Deltas, Nesterov, Stepped

SIZE, BATCH = 6, 4
SHARE = 2  # of each of two ranks


class Rank:
    def __init__(self, number: int, dtype: torch.dtype = torch.float32, outer: Nesterov | None = None) -> None:
        self.weights = torch.zeros(SIZE, dtype=dtype)
        self.deltas = Deltas([self.weights], outer, rank=number, ranks_counted=2)
        self.given = torch.zeros(SIZE)  # all progress, as it moves the anchor
        self.waiting = 0  # finished tasks in no round
        self.largest = 0.0  # of its weights so far

    def finish(self, progress: int) -> None:
        self.deltas.apply()
        step = torch.arange(SIZE) % 3 * float(progress)
        self.weights += step
        self.given += step * SHARE / BATCH
        assert self.deltas.finish(SHARE, 1) < float("inf")
        self.waiting += 1

    def progress(self, chance: random.Random) -> None:
        """Tasks whose steps weights of 16 bits cannot hold exactly."""
        for _ in range(chance.randrange(3)):
            self.deltas.apply()
            before = self.weights.float()
            self.weights += torch.arange(SIZE) % 3 * chance.uniform(-0.3, 0.3)
            self.given += (self.weights.float() - before) * SHARE / BATCH
            self.largest = max(self.largest, float(self.weights.abs().max()))
            assert self.deltas.finish(SHARE, 1) < float("inf")
            self.waiting += 1

    def pack(self) -> torch.Tensor:
        addend = self.deltas.pack(self.waiting > 0, BATCH, "float32")
        self.waiting = 0
        return addend


def summed(ranks: list[Rank], addends: list[torch.Tensor]) -> None:
    total = addends[0] + addends[1]
    counts = ranks[0].deltas.tail.flat + ranks[1].deltas.tail.flat
    for rank, addend in zip(ranks, addends, strict=True):
        addend.copy_(total)
        rank.deltas.tail.flat.copy_(counts)
        rank.deltas.tail.unpack()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_counted_twice_in_rounds_that_do_not_count(seed: int) -> None:
    """Nor in rounds that one rank takes over from the other. Tasks are finished before a sum, and beside it."""
    chance = random.Random(seed)
    ranks = [Rank(0), Rank(1)]
    for _ in range(60):
        for rank in ranks:
            for _ in range(chance.randrange(3)):
                rank.finish(chance.randint(-4, 4) * 2)
        before = [rank.waiting for rank in ranks]
        addends = [rank.pack() for rank in ranks]
        for rank in ranks:
            for _ in range(chance.randrange(3)):
                rank.finish(chance.randint(-4, 4) * 2)
        match chance.choice(["lands", "void", "one behind"]):
            case "lands":
                summed(ranks, addends)
                for rank in ranks:
                    rank.deltas.apply_sum()
                assert ranks[0].deltas.samples_given() == {n: SHARE * b for n, b in enumerate(before) if b}
            case "void":
                for rank, addend, tasks in zip(ranks, addends, before, strict=True):
                    addend.fill_(torch.nan)  # whatever a sum half-way has left there
                    rank.deltas.take_back()
                    rank.waiting += tasks
            case "one behind":
                summed(ranks, addends)
                ranks[0].deltas.apply_sum()
                addends[1].fill_(torch.nan)
                ranks[1].deltas.catch_up(ranks[0].deltas.anchor.clone(), None, ())
        assert torch.equal(ranks[0].deltas.anchor, ranks[1].deltas.anchor)
    summed(ranks, [rank.pack() for rank in ranks])
    for rank in ranks:
        rank.deltas.apply_sum()
        rank.deltas.reset_to_anchor()
        assert torch.equal(rank.weights, ranks[0].given + ranks[1].given)


@pytest.mark.parametrize("seed", range(20))
def test_sixteen_bit_weights_lose_no_more_than_their_rounding(seed: int) -> None:
    """Of each round that does not count, as at a drain: what they could not hold of the anchor."""
    chance = random.Random(seed)
    ranks = [Rank(0, torch.bfloat16), Rank(1, torch.bfloat16)]
    voids = 0
    for _ in range(60):
        for rank in ranks:
            rank.progress(chance)
        before = [rank.waiting for rank in ranks]
        addends = [rank.pack() for rank in ranks]
        for rank in ranks:
            rank.progress(chance)
        if chance.random() < 0.5:
            summed(ranks, addends)
            ranks[0].deltas.apply_sum()
            if chance.random() < 0.5:
                ranks[1].deltas.apply_sum()
            else:
                addends[1].fill_(torch.nan)
                ranks[1].deltas.catch_up(ranks[0].deltas.anchor.clone(), None, ())
        else:
            voids += 1
            for rank, addend, tasks in zip(ranks, addends, before, strict=True):
                addend.fill_(torch.nan)
                rank.deltas.take_back()
                rank.waiting += tasks
        assert torch.equal(ranks[0].deltas.anchor, ranks[1].deltas.anchor)
    summed(ranks, [rank.pack() for rank in ranks])
    for rank in ranks:
        rank.deltas.apply_sum()
    off = (ranks[0].deltas.anchor - ranks[0].given - ranks[1].given).abs()
    step = torch.finfo(torch.bfloat16).eps * float(max(rank.largest for rank in ranks))  # between their values
    assert voids
    assert float(off.max()) <= voids * step


def test_who_catches_up_takes_over_the_outer_velocity() -> None:
    ranks = [Rank(n, outer=Nesterov(1.0, 0.5, 2 * SHARE)) for n in range(2)]
    for _ in range(2):
        for rank in ranks:
            rank.finish(4)
        summed(ranks, [rank.pack() for rank in ranks])
        ranks[0].deltas.apply_sum()
        anchor = ranks[0].deltas.anchor
        ranks[1].deltas.catch_up(anchor, ranks[0].deltas.velocity, ())
    assert ranks[0].deltas.velocity is not None
    assert torch.equal(ranks[0].deltas.velocity, ranks[1].deltas.velocity)
    assert ranks[0].deltas.velocity is not ranks[1].deltas.velocity
    assert torch.equal(ranks[0].deltas.anchor, ranks[1].deltas.anchor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(10))
def test_a_task_that_is_undone_leaves_no_trace(seed: int, dtype: torch.dtype) -> None:
    """Beside rounds under way, finished tasks that wait and changes that have come: whatever it made of the weights."""
    chance = random.Random(seed)
    ranks, twins = [[Rank(0, dtype), Rank(1, dtype)] for _ in range(2)]
    for _ in range(40):
        for rank, twin in zip(ranks, twins, strict=True):
            for _ in range(chance.randrange(3)):
                progress = chance.randint(-4, 4) * 2
                rank.finish(progress)
                twin.finish(progress)
            if chance.random() < 0.5:
                rank.weights.fill_(torch.nan)
                rank.deltas.undo()
        for group in (ranks, twins):
            addends = [rank.pack() for rank in group]
            if chance.random() < 0.5:
                group[0].weights.mul_(3)
                group[0].deltas.undo()
            summed(group, addends)
            for rank in group:
                rank.deltas.apply_sum()
        for rank, twin in zip(ranks, twins, strict=True):
            rank.deltas.apply()
            twin.deltas.apply()
            assert torch.equal(rank.weights, twin.weights)
            assert torch.equal(rank.deltas.anchor, twin.deltas.anchor)


@pytest.mark.parametrize("void", [False, True])
def test_a_step_counts_for_the_slices_that_it_has_added_up(void: bool) -> None:
    """Whether tasks without a step went into rounds of their own, and also once a round does not count."""
    weights = torch.zeros(SIZE)
    deltas = Deltas([weights])

    def land() -> None:
        deltas.pack(True, BATCH, "float32")
        if void:
            deltas.take_back()
            deltas.pack(True, BATCH, "float32")
        deltas.apply_sum()
        deltas.apply()

    deltas.finish(SHARE, 1, stepped=Stepped(0.0, 0))
    land()
    deltas.finish(SHARE, 1, stepped=Stepped(0.0, 0))
    weights += 1.0
    deltas.finish(1, 1, stepped=Stepped((2 * SHARE + 1) / 3, 1))  # in the third slice, of one sample
    land()
    torch.testing.assert_close(deltas.anchor, torch.full((SIZE,), (2 * SHARE + 1) / 3 / BATCH))
