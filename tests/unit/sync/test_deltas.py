"""Laws of the delayed mode's tensors, against a plain model that keeps everything apart.

Progress is made of small integers and weights are powers of two, so that float32 is exact and equality is equality.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.sync import deltas as deltas_module
from hetsync.sync.deltas import Deltas, Nesterov, runs, views

SHAPES = [(2, 2), (3,), ()]
SIZE = 8
BATCH = 8


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def held(buffer):
    return torch.zeros_like(buffer.values) if buffer.empty else buffer.values


def books(deltas):
    """w, P and X, without making a sum that has arrived land: whatever comes next is to do that."""
    w, pending, correction = deltas._anchor.values, held(deltas._pending), held(deltas._correction)
    if not deltas._arrived:
        return w, pending, correction
    total = deltas._flight.values
    own = pending if deltas._in_flight and not deltas._folded else torch.zeros_like(w)
    return w + total, pending - own, correction + total - own


def spoil(deltas, under_way):
    """What is in the memory of buffers that hold nothing must not matter."""
    for buffer in (deltas._pending, deltas._correction):
        if buffer.empty:
            buffer.values.fill_(math.nan)
    if not (under_way or deltas._arrived):
        deltas._flight.values.fill_(math.nan)


@dataclass
class Reference:
    """One rank by the book: w, what u lacks of it, and progress in its three states."""

    anchor: torch.Tensor
    correction: torch.Tensor
    raw: torch.Tensor  # computed, not finished
    waiting: torch.Tensor  # finished, in no round
    sent: torch.Tensor  # in a round that has not landed
    samples: int = 0
    steps: int = 0

    def finish(self, samples, steps):
        self.waiting, self.raw = self.waiting + self.raw, torch.zeros(SIZE)
        self.samples += samples
        self.steps += steps

    def load(self):
        weight = self.samples / (self.steps * BATCH)
        self.sent, self.waiting = self.waiting, torch.zeros(SIZE)
        self.samples = self.steps = 0
        return self.sent * weight

    def land(self, step):
        self.anchor = self.anchor + step
        self.correction = self.correction + step - self.sent
        self.sent = torch.zeros(SIZE)


@dataclass
class Rank:
    """A rank of the code under test, with the same of the reference beside it."""

    share: int
    local: list[torch.Tensor]
    deltas: Deltas
    reference: Reference
    loaded: int = 0  # rounds joined
    landed: int = 0
    in_flight: bool = False
    finished_in_flight: bool = False
    moved: bool = False  # since the last task's end


@dataclass
class Ring:
    """Some ranks and the rounds between them, summed by hand."""

    shares: list[int]
    outer: bool = False
    ranks: list[Rank] = field(default_factory=list)
    flights: list[list[torch.Tensor]] = field(default_factory=list)  # by round
    expected: list[torch.Tensor] = field(default_factory=list)
    mass: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE))

    def __post_init__(self):
        for share in self.shares:
            local = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in SHAPES]
            first, zeros = flat(local), torch.zeros(SIZE)
            reference = Reference(first, zeros, zeros, zeros, zeros)
            self.ranks.append(Rank(share, local, Deltas(local), reference))

    def compute(self, rank, amount):
        rank.moved = True
        progress = torch.arange(SIZE) % 3 * float(amount)
        for tensor, part in zip(rank.local, views(progress, rank.local), strict=True):
            tensor += part
        rank.reference.raw = rank.reference.raw + progress
        self.mass = self.mass + progress * rank.share / BATCH

    def finish(self, rank, steps):
        rank.deltas.finish(rank.share * steps, steps)
        rank.reference.finish(rank.share * steps, steps)
        rank.moved = False
        rank.finished_in_flight = rank.in_flight

    def apply(self, rank):
        if rank.deltas.apply():
            rank.reference.correction = torch.zeros(SIZE)
        assert rank.deltas._correction.empty or rank.finished_in_flight

    def load(self, rank):
        if rank.loaded > rank.landed:
            return
        if rank.loaded == len(self.flights):
            self.flights.append([])
            self.expected.append(torch.zeros(SIZE))
        contribute = rank.reference.steps > 0
        flight = rank.deltas.pack(contribute, BATCH, "float32")
        self.flights[rank.loaded].append(flight)
        if contribute:
            self.expected[rank.loaded] += rank.reference.load()
            rank.in_flight = True
        rank.loaded += 1
        if len(self.flights[rank.loaded - 1]) == len(self.ranks):
            total = sum(f.clone() for f in self.flights[rank.loaded - 1])
            assert torch.equal(total, self.expected[rank.loaded - 1])
            for buffer in self.flights[rank.loaded - 1]:  # as an allreduce leaves it
                buffer.copy_(total)

    def land(self, rank):
        if rank.loaded == rank.landed or len(self.flights[rank.landed]) < len(self.ranks):
            return
        rank.deltas.apply_sum()
        rank.reference.land(self.expected[rank.landed])
        rank.landed += 1
        rank.in_flight = rank.finished_in_flight = False

    def check(self):
        for rank in self.ranks:
            deltas, reference = rank.deltas, rank.reference
            u, (w, pending, correction) = flat(rank.local), books(deltas)
            assert torch.equal(w, reference.anchor)
            ours = reference.waiting + reference.sent + reference.raw
            assert torch.equal(u + reference.correction, reference.anchor + ours), "the model itself"
            hidden = reference.sent if rank.finished_in_flight else torch.zeros(SIZE)
            assert torch.equal(correction, reference.correction - hidden)
            assert torch.equal(pending, reference.waiting + reference.sent - hidden)
            if not rank.moved:
                assert torch.equal(u + correction, w + pending), "u + X = w + P"
            spoil(deltas, under_way=rank.loaded > rank.landed)

    def drain(self):
        """Everybody's finished work, and only that, in rounds that all take part in; then settle."""
        for rank in self.ranks:
            if rank.moved:
                self.finish(rank, 1)
        for _ in range(2):
            for rank in self.ranks:
                self.load(rank)
            for rank in self.ranks:
                self.land(rank)
            while any(rank.loaded < len(self.flights) for rank in self.ranks):
                for rank in self.ranks:
                    if rank.loaded < len(self.flights):
                        self.load(rank)
                for rank in self.ranks:
                    self.land(rank)
            self.check()
        for rank in self.ranks:
            rank.deltas.reset_to_anchor()
            rank.reference.correction = torch.zeros(SIZE)
        self.check()


actions = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("ccffallLL"), st.integers(-3, 3)), min_size=40, max_size=120
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4), actions, st.sampled_from([1, 3, 1000]))
def test_any_interleaving_keeps_the_books(shares, actions, segment):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas_module, "CPU_SEGMENT", segment)
        ring = Ring(shares)
    for index, action, amount in actions:
        rank = ring.ranks[index % len(shares)]
        match action:
            case "c":
                ring.compute(rank, amount)
            case "f":
                ring.finish(rank, 1 + amount % 3)
            case "a":
                ring.apply(rank)
            case "l":
                ring.load(rank)
            case "L":
                ring.land(rank)
        ring.check()
    ring.drain()
    first = Ring([1]).ranks[0].deltas.anchor
    for rank in ring.ranks:
        assert torch.equal(rank.deltas.anchor, ring.ranks[0].deltas.anchor), "anchors are bit-identical"
        assert torch.equal(flat(rank.local), rank.deltas.anchor), "settled: u = w"
        assert torch.equal(rank.deltas.anchor, first + ring.mass), "each sample's progress counts exactly once"


def one_round(ring, contributors):
    for index, rank in enumerate(ring.ranks):
        if index not in contributors:
            rank.reference.steps, kept = 0, rank.reference.steps
            ring.load(rank)
            rank.reference.steps = kept
        else:
            ring.load(rank)
    for rank in ring.ranks:
        ring.land(rank)
    ring.check()


def test_contributions_of_everybody_make_the_average_weighted_by_samples():
    ring = Ring([1, 2, 1, 4])
    before = ring.ranks[0].deltas.anchor.clone()
    for rank, amount in zip(ring.ranks, (3, -2, 1, 5), strict=True):
        ring.compute(rank, amount)
        ring.finish(rank, 2)
    one_round(ring, range(4))
    mean = (1 * 3 + 2 * -2 + 1 * 1 + 4 * 5) / 8 * (torch.arange(SIZE) % 3)
    assert torch.equal(ring.ranks[0].deltas.anchor, before + mean)


def test_a_quarter_of_the_samples_moves_the_weights_a_quarter_as_far():
    ring = Ring([2, 6])
    before = ring.ranks[1].deltas.anchor.clone()
    ring.compute(ring.ranks[0], 4)
    ring.finish(ring.ranks[0], 1)
    one_round(ring, [0])
    assert torch.equal(ring.ranks[1].deltas.anchor, before + torch.arange(SIZE) % 3)


def test_tasks_that_wait_together_move_the_anchor_as_they_would_apart():
    for others in ([], [4], [4, 2]):
        together, apart = Ring([2, *others]), Ring([2, *others])
        for ring in (together, apart):
            for rank in ring.ranks[1:]:
                ring.compute(rank, 1)
                ring.finish(rank, 1)
            for amount, steps in ((3, 1), (-2, 3)):
                ring.compute(ring.ranks[0], amount)
                ring.finish(ring.ranks[0], steps)
                if ring is apart:
                    one_round(ring, [0])
            one_round(ring, range(len(ring.ranks)))
        assert torch.equal(together.ranks[0].deltas.anchor, apart.ranks[0].deltas.anchor)


def test_new_shares_weigh_what_is_done_from_then_on():
    ring = Ring([2, 6])
    before = ring.ranks[0].deltas.anchor.clone()
    for share in (2, 4):
        ring.ranks[0].share = share
        ring.compute(ring.ranks[0], 4)
        ring.finish(ring.ranks[0], 1)
        one_round(ring, [0])
    assert torch.equal(ring.ranks[0].deltas.anchor, before + (2 * 4 + 4 * 4) / 8 * (torch.arange(SIZE) % 3))


def test_apply_waits_only_while_it_would_hide_flying_progress():
    ring = Ring([4, 4])
    rank = ring.ranks[0]
    ring.compute(rank, 1)
    ring.finish(rank, 1)
    assert rank.deltas.apply()
    ring.load(rank)
    assert rank.deltas.apply()  # it flies, but nothing was finished since
    ring.compute(rank, 1)
    ring.finish(rank, 1)
    assert not rank.deltas.apply()
    ring.load(ring.ranks[1])
    ring.land(rank)
    assert rank.deltas.apply()


def test_settle_while_a_contribution_flies_is_an_error():
    ring = Ring([4])
    ring.compute(ring.ranks[0], 1)
    ring.finish(ring.ranks[0], 1)
    ring.load(ring.ranks[0])
    with pytest.raises(AssertionError):
        ring.ranks[0].deltas.reset_to_anchor()


# Memory and views.


def storages(at_least):
    """Bytes by where they begin."""
    gc.collect()
    tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor)
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {pointer: size for pointer, size in found.items() if size >= at_least}


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("outer", [False, True])
def test_four_buffers_of_the_parameters_size_and_one_for_the_outer_optimizer_and_for_rounding(outer, wire):
    local = [torch.zeros(300, 7), torch.zeros(900)]
    size = 4 * 3000
    before = storages(size)
    deltas = Deltas(local, Nesterov(0.7, 0.9, BATCH) if outer else None)
    for _ in range(3):
        deltas.finish(4, 1)
        deltas.pack(True, BATCH, wire)
        deltas.finish(4, 1)
        deltas.apply_sum()
        deltas.apply()
    assert len(storages(size).keys() - before.keys()) == 4 + outer + (wire != "float32")
    assert deltas.buffer_bytes == size * (4 + (wire != "float32"))


def test_beside_the_four_there_is_a_segment_at_most():
    local, most = [torch.zeros(300, 7), torch.zeros(900)], 300
    before = storages(4 * most // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas_module, "CPU_SEGMENT", most)
        deltas = Deltas(local)
    made = [size for pointer, size in storages(4 * most // 2).items() if pointer not in before]
    scratch, *buffers = sorted(made)
    assert buffers == [deltas.buffer_bytes // 4] * 4
    assert scratch <= 4 * most


def test_runs_are_cut_where_memory_of_the_flat_order_is_whole():
    """Also where a tensor lies otherwise in its own memory."""
    tensors = [
        torch.arange(6.0).view(3, 2),
        torch.arange(8.0).view(2, 2, 2).transpose(0, 2),
        torch.ones(()),
        torch.ones(5),
    ]
    for most in (1, 2, 3, 4, 100):
        found = runs(tensors, most)
        assert torch.equal(flat(piece for run in found for piece in run), flat(tensors))
        assert all(sum(piece.numel() for piece in run) <= max(most, 4) for run in found)  # a row of the second has 4
    assert [len(run) for run in runs(tensors, 100)] == [4]


def test_weights_are_written_in_place_and_other_tensors_are_left_alone():
    weights = torch.nn.Parameter(torch.ones(3))
    statistics = torch.zeros(2)
    deltas = Deltas([weights, statistics])
    with torch.no_grad():
        weights += 2
        statistics += 4
    deltas.finish(4, 1)
    deltas.pack(True, BATCH, "float32")
    deltas.apply_sum()
    deltas.reset_to_anchor()
    assert weights.tolist() == [2.0, 2.0, 2.0]
    assert statistics.tolist() == [2.0, 2.0], "buffers travel with the weights"
    assert weights.requires_grad
    assert weights.grad is None
