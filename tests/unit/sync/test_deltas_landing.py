"""When a sum lands, in what pieces, and what lies in memory that holds nothing: none of it changes a bit.

Two ranks each make the same rounds twice. One kind lands every sum at once and in one piece; the other when it has to,
in small segments, its void memory is full of nan, and a round's tail is summed with its weights where that can be.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from hetsync.sync import deltas as deltas_module
from hetsync.sync.deltas import Deltas, Nesterov

BATCH = 8
WEIGHTS, BUFFERS = ((4, 3), (5,), (), (9, 2)), ((11,),)
ACTIONS = ("compute", "finish", "finish", "apply", "round", "land", "land", "evaluate")


@dataclass
class Rank:
    local: list[torch.Tensor]
    deltas: Deltas
    lazy: bool
    finished: bool = False
    landed: bool = True

    def land(self) -> None:
        self.deltas.apply_sum()
        self.landed = True
        if not self.lazy:
            assert self.deltas.anchor.isfinite().all()  # reading it makes the sum land

    def spoil(self) -> None:
        if self.lazy:
            deltas = self.deltas
            for buffer in (deltas._pending, deltas._correction):
                if buffer.empty:
                    buffer.values.fill_(math.nan)
            if self.landed and not deltas._arrived:
                deltas._flight.values.fill_(math.nan)


def made(lazy: bool, seed: int, dtype: torch.dtype, outer: bool) -> list[Rank]:
    generator = torch.Generator().manual_seed(seed)
    first = [torch.randn(shape, generator=generator) for shape in (*WEIGHTS, *BUFFERS)]
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas_module, "CPU_SEGMENT", 7 if lazy else 1000)
        for _ in range(2):
            local = [tensor.to(dtype, copy=True) for tensor in first[: len(WEIGHTS)]]
            local[0] = local[0].t().contiguous().t()  # its memory has another order than the anchor
            buffers = [tensor.clone() for tensor in first[len(WEIGHTS) :]]
            momentum = Nesterov(0.7, 0.9, BATCH) if outer else None
            deltas = Deltas(local, momentum, buffers, one_sum=lazy)
            ranks.append(Rank([*local, *buffers], deltas, lazy))
    return ranks


def make_round(ranks: list[Rank], wire: str) -> int:
    """Returns the number of sums."""
    flights = [rank.deltas.pack(rank.finished, BATCH, wire) for rank in ranks]
    total = flights[0].clone() + flights[1]
    for rank, flight in zip(ranks, flights, strict=True):
        flight.copy_(total)
        rank.finished = rank.landed = False
    sums = 1
    more = bool(ranks[0].deltas.tail.flat.numel())
    if not more:  # the counts were behind the weights
        assert not any([rank.deltas.tail.unpack() for rank in ranks])
    while more:
        sums += 1
        tail = ranks[0].deltas.tail.flat + ranks[1].deltas.tail.flat
        for rank in ranks:
            rank.deltas.tail.flat.copy_(tail)
        more = all([rank.deltas.tail.unpack() for rank in ranks])
    return sums


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_late_landings_change_no_bit(seed: int, dtype: torch.dtype, wire: str, outer: bool) -> None:
    chance = random.Random(f"{seed} {dtype} {wire} {outer}")
    generator = torch.Generator().manual_seed(seed)
    lazy, eager = made(True, seed, dtype, outer), made(False, seed, dtype, outer)
    sums: list[int] = []
    for _ in range(100):
        action, index = chance.choice(ACTIONS), chance.randrange(2)
        pair = (lazy[index], eager[index])
        if action == "compute":
            for tensor, other in zip(lazy[index].local, eager[index].local, strict=True):
                step = (0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
                tensor += step
                other += step
        elif action == "finish":
            assert all(math.isfinite(rank.deltas.finish(4, 1)) for rank in pair)
            for rank in pair:
                rank.finished = True
        elif action == "apply":
            assert pair[0].deltas.apply() == pair[1].deltas.apply()
        elif action == "round" and all(rank.landed for rank in eager):
            sums.append(make_round(lazy, wire))
            make_round(eager, wire)
        elif action == "land" and not pair[0].landed:
            for rank in pair:
                rank.land()
        elif action == "evaluate" and pair[0].landed:
            snapshot = pair[0].deltas.anchor.clone()
            assert torch.equal(snapshot, pair[1].deltas.anchor)
            with pair[0].deltas.showing(snapshot):
                pass
        for ours, theirs in zip(lazy, eager, strict=True):
            ours.spoil()
            assert all(torch.equal(a, b) for a, b in zip(ours.local, theirs.local, strict=True))
    for ours, theirs in zip(lazy, eager, strict=True):
        for rank in (ours, theirs):
            if not rank.landed:
                rank.land()
            rank.deltas.reset_to_anchor()
        assert torch.equal(ours.deltas.anchor, theirs.deltas.anchor)
        assert torch.equal(ours.deltas.anchor, lazy[0].deltas.anchor), "anchors are bit-identical"
    assert wire == "float32" or 1 not in sums, "a tail is never rounded"
