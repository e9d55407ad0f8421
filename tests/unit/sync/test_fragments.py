"""Delayed mode in fragments. Progress is of small integers, so that float32 is exact."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetsync.config.schema import OuterConfig, SyncConfig, WireFormat
from hetsync.errors import UserError
from hetsync.plane.local import LocalPlane
from hetsync.plane.wire import WIRE_FORMATS, round_trip
from hetsync.sync.deltas import Deltas, Nesterov
from hetsync.sync.engine import Engine
from hetsync.sync.fragments import FragmentedDeltas, fragments_of
from hetsync.sync.messages import StartRound, settings_of
from hetsync.sync.shared_state import EngineOptions

SHAPES = [(5, 3), (4,), (), (2, 1, 2)]
BATCH, SHARE = 4, 2  # of each of two ranks


@given(st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=6), st.integers(1, 8))
def test_fragments_are_views_of_all_weights_in_order_and_of_nearly_one_size(shapes, count):
    weights = [torch.rand(shape) for shape in shapes]
    runs = fragments_of(weights, count)
    assert len(runs) <= count
    pieces = [piece for run in runs for piece in run]
    flat = torch.cat([piece.flatten() for piece in pieces] or [torch.empty(0)])
    torch.testing.assert_close(flat, torch.cat([weight.flatten() for weight in weights]), rtol=0, atol=0)
    if pieces:
        largest = max(sum(piece.numel() for piece in run) for run in runs)
        row = max(weight.numel() // max(1, len(weight)) if weight.dim() else 1 for weight in weights)
        assert largest <= -(-flat.numel() // count) + row
    for piece in pieces:
        piece += 1
    assert all((weight >= 1).all() for weight in weights)


def round_of(number: int, drain: bool = False, fragments: int = 64) -> StartRound:
    return StartRound(number, frozenset(), 0, drain="rest" if drain else None, fragments=fragments)


class Rank:
    def __init__(self, number: int, fragments: int) -> None:
        self.weights = [torch.zeros(shape) for shape in SHAPES]
        self.statistics = torch.zeros(3)
        buffers = [self.statistics]
        self.deltas = FragmentedDeltas(self.weights, None, buffers, number, 2, True, fragments)
        self.deltas.tail.travel = [0]
        self.tensors = [*self.weights, self.statistics]
        self.given = [torch.zeros_like(tensor) for tensor in self.tensors]  # progress, as it moves the anchor
        self.waiting = 0  # finished tasks in no round

    def finish(self, progress: int) -> None:
        self.deltas.apply()
        for tensor, moved in zip(self.tensors, self.given, strict=True):
            step = (torch.arange(tensor.numel()) % 3 * float(progress)).view_as(tensor)
            tensor += step
            moved += step * SHARE / BATCH
        assert self.deltas.finish(SHARE, 1) < float("inf")
        self.waiting += 1

    def pack(self, number: int, contributes: bool, drain: bool = False, fragments: int = 64) -> list[torch.Tensor]:
        addends = self.deltas.pack(round_of(number, drain, fragments), contributes, BATCH, "float32")
        self.waiting = 0 if contributes else self.waiting
        return addends


def summed(ranks: list[Rank], addends: list[list[torch.Tensor]]) -> None:
    for mine, others in zip(*addends, strict=True):
        total = mine + others
        mine.copy_(total)
        others.copy_(total)


@pytest.mark.parametrize(("parts", "fragments"), [(1, [1]), (2, [2]), (4, [4]), (4, [2]), (4, [1, 2, 3, 4])])
@pytest.mark.parametrize("seed", range(10))
def test_each_task_moves_each_weight_once_whatever_becomes_of_rounds(
    seed: int, parts: int, fragments: list[int]
) -> None:
    """Rounds land, are void, or land on one rank alone; tasks are finished before a sum, and beside it."""
    chance = random.Random(seed)
    ranks = [Rank(0, parts), Rank(1, parts)]
    number = 0
    for _ in range(60):
        for rank in ranks:
            for _ in range(chance.randrange(3)):
                rank.finish(chance.randint(-4, 4) * 2)
        before = [rank.waiting for rank in ranks]
        contribute = [rank.waiting > 0 and chance.random() < 0.7 for rank in ranks]
        summing = chance.choice(fragments)
        addends = [rank.pack(number, own, fragments=summing) for rank, own in zip(ranks, contribute, strict=True)]
        for rank in ranks:
            for _ in range(chance.randrange(3)):
                rank.finish(chance.randint(-4, 4) * 2)
        match chance.choice(["lands", "void", "one behind"]):
            case "lands":
                summed(ranks, addends)
                for rank in ranks:
                    for part in rank.deltas.summed:
                        part.tail.unpack()
                    rank.deltas.apply_sum()
                counted = {n: SHARE * before[n] for n in range(2) if contribute[n]}
                assert ranks[0].deltas.samples_given() == counted
                number += 1
            case "void":
                for rank, own, addend, tasks in zip(ranks, contribute, addends, before, strict=True):
                    for one in addend:
                        one.fill_(torch.nan)  # whatever a sum half-way has left there
                    rank.deltas.take_back()
                    rank.waiting += tasks if own else 0
            case "one behind":
                summed(ranks, addends)
                ranks[0].deltas.apply_sum()
                for one in addends[1]:
                    one.fill_(torch.nan)
                ranks[1].deltas.catch_up(ranks[0].deltas.anchor.clone(), None, ranks[0].deltas.tail.travel)
                number += 1
        assert torch.equal(ranks[0].deltas.anchor, ranks[1].deltas.anchor)
    summed(ranks, [rank.pack(number, rank.waiting > 0, drain=True) for rank in ranks])
    for rank in ranks:
        rank.deltas.apply_sum()
        rank.deltas.reset_to_anchor()
        for tensor, mine, others in zip(rank.tensors, ranks[0].given, ranks[1].given, strict=True):
            assert torch.equal(tensor, mine + others)


def test_a_round_sums_one_fragment_and_a_drain_all():
    rank = Rank(0, 4)
    sizes = [sum(part.numel() for part in rank.pack(number, False)) for number in range(4)]
    assert sum(sizes) == sum(addend.numel() for addend in rank.pack(4, False, drain=True))
    assert max(sizes) < sum(sizes) / 2
    assert rank.pack(5, False)[0].numel() == sizes[1]


@pytest.mark.parametrize("wire", WIRE_FORMATS[1:])
def test_what_rounding_took_from_a_fragment_given_early_is_given_at_the_drain(wire: WireFormat) -> None:
    """Also where its rank contributes to the drain what it had given early."""
    deltas = FragmentedDeltas([weights := torch.zeros(8)], fragments=2)
    weights += torch.linspace(0.1, 0.9, 8)
    deltas.finish(BATCH, 1)
    (early,) = deltas.pack(round_of(0), False, BATCH, wire)
    early.copy_(round_trip(early, wire))  # the sum, of this rank alone
    deltas.apply_sum()
    deltas.apply()
    deltas.pack(round_of(1, drain=True), True, BATCH, "float32")
    deltas.apply_sum()
    deltas.reset_to_anchor()
    torch.testing.assert_close(weights, torch.linspace(0.1, 0.9, 8), rtol=1e-6, atol=1e-6)


def test_of_progress_that_is_not_finite_no_fragment_goes_out():
    rank = Rank(0, 2)
    rank.weights[0] += torch.nan
    rank.deltas.finish(SHARE, 1)
    for addend in rank.pack(0, True, drain=True):
        assert not addend[:-2].any()  # but for the counts of both ranks


def test_at_its_turn_a_fragment_is_given_with_all_that_is_finished():
    """Whoever finishes just after rounds have begun would else miss the same fragment each time."""
    rank = Rank(0, 2)
    for number in range(2):
        rank.finish(2)
        (addend,) = rank.pack(number, False)
        assert addend.any()
        assert rank.deltas.samples_given() == {}
        summed_alone(rank)
    assert rank.waiting == 2


@pytest.mark.parametrize(("parts", "fragments"), [(1, 1), (2, 1)])
def test_where_a_round_sums_all_what_is_in_no_contribution_waits(parts: int, fragments: int) -> None:
    """Else it would be in the weights of others while books say that it is held here."""
    rank = Rank(0, parts)
    rank.finish(2)
    for addend in rank.pack(0, False, fragments=fragments):
        assert not addend.any()
    rank.deltas.take_back()
    for addend in rank.pack(0, True, fragments=fragments):
        assert addend.any()


def test_a_drain_sums_what_other_rounds_have_not():
    rank = Rank(0, 2)
    rank.finish(2)
    rank.pack(0, True)
    summed_alone(rank)
    first, second = rank.pack(1, False, drain=True)
    assert (bool(first.any()), bool(second.any())) == (False, True)


def summed_alone(rank: Rank) -> None:
    rank.deltas.apply_sum()
    rank.deltas.apply()


def test_one_fragment_is_what_deltas_are():
    weights = [torch.rand(3, 2), torch.rand(4)]
    others = [weight.clone() for weight in weights]
    one, plain = FragmentedDeltas(weights), Deltas(others)
    for number in range(3):
        for some in (weights, others):
            for weight in some:
                weight += 0.1
        assert one.finish(2, 1) == plain.finish(2, 1)
        (addend,) = one.pack(round_of(number), True, BATCH, "float32")
        assert torch.equal(addend, plain.pack(True, BATCH, "float32"))
        one.apply_sum()
        plain.apply_sum()
        one.apply()
        plain.apply()
        assert torch.equal(one.anchor, plain.anchor)


def test_a_snapshot_can_be_shown_and_is_the_anchor():
    rank = Rank(0, 3)
    rank.finish(2)
    rank.pack(0, True)
    summed_alone(rank)
    snapshot = rank.deltas.snapshot(0)
    assert snapshot.round == 0
    assert snapshot.weights.any()
    assert torch.equal(snapshot.weights, rank.deltas.anchor)
    rank.finish(4)
    held = [tensor.clone() for tensor in rank.tensors]
    with rank.deltas.showing(snapshot.weights):
        shown = torch.cat([tensor.flatten() for tensor in rank.tensors])
        assert torch.equal(shown, snapshot.weights)
    assert all(map(torch.equal, rank.tensors, held))


def test_norms_of_one_fragment_tell_of_noise_and_those_of_several_do_not():
    rank = Rank(0, 2)
    rank.finish(2)
    rank.pack(0, True)
    assert rank.deltas.packed == (SHARE, 1)
    summed_alone(rank)
    rank.finish(2)
    rank.pack(1, True)
    assert rank.deltas.packed == (2 * SHARE, 2)
    summed_alone(rank)
    rank.pack(2, False)
    summed_alone(rank)
    rank.finish(2)
    rank.pack(3, True, drain=True)
    assert rank.deltas.packed == (0, 0)


def test_a_task_is_given_up_in_all_fragments():
    rank = Rank(0, 2)
    rank.finish(2)
    held = [tensor.clone() for tensor in rank.tensors]
    for tensor in rank.tensors:
        tensor += torch.nan
    rank.deltas.undo()
    assert all(map(torch.equal, rank.tensors, held))


def test_weights_are_cut_as_they_are_when_delayed_mode_begins():
    """After a freeze they are fewer, and a newcomer must cut as all do."""
    options = EngineOptions(BATCH, fragments_for=lambda values: 1 if values < 4 else 2)
    engine = Engine(LocalPlane(), torch.nn.Linear(2, 2), options)
    shared = engine._shared
    shared.alone = False
    for weights, fragments in (([torch.zeros(3)], 1), ([torch.zeros(3), torch.zeros(3)], 2)):
        shared.deltas, shared.weights = None, weights
        shared.delayed_mode()
        assert engine.fragments == fragments
        assert sum(tensor.numel() for tensor in engine.anchor) == sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("fragments", [0, 65])
def test_numbers_that_cannot_be_are_refused(fragments):
    with pytest.raises(UserError, match=f"sync.fragments is {fragments}: give 1 to 64, or auto"):
        SyncConfig(fragments=fragments)


def test_an_outer_optimizer_knows_no_fragments():
    outer = OuterConfig("nesterov")
    with pytest.raises(UserError, match=r"sync\.fragments is 2, which the outer optimizer nesterov does not know"):
        SyncConfig(outer=outer, fragments=2)
    assert SyncConfig(outer=outer).for_model(10**9).most_fragments == 1
    deltas = FragmentedDeltas([torch.zeros(4)], Nesterov(1.0, 0.5, BATCH))
    assert deltas.velocity is None


@pytest.mark.parametrize(
    ("fragments", "values", "first", "most"),
    [("auto", 999_999, 1, 1), ("auto", 1_000_000, 2, 4), (1, 10**9, 1, 1), (8, 10, 8, 8)],
)
def test_large_models_have_fragments_by_rule(fragments, values, first, most):
    sync = SyncConfig(fragments=fragments).for_model(values)
    assert (sync.first_fragments, sync.most_fragments) == (first, most)
    assert settings_of(sync).fragments == first


@pytest.mark.parametrize("sync", [SyncConfig(quorum=1.0), SyncConfig(accumulation=2), SyncConfig(grace=1)])
def test_whoever_asks_for_fewer_rounds_is_not_given_smaller_ones_besides(sync: SyncConfig) -> None:
    assert sync.for_model(10**9).most_fragments == 1
