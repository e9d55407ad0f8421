"""Laws of the sample ledger (every position exactly once, whatever the order of events) and of the epochs' order."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetsync.data.ledger import Ledger, cut, length
from hetsync.data.loader import EpochOrder


def positions(spans):
    return [position for start, stop in spans for position in range(start, stop)]


class LedgerMachine(RuleBasedStateMachine):
    """Takes, books and gives back in any order, against a set of positions a state."""

    @initialize(total=st.integers(0, 60), applied=st.integers(0, 60))
    def open(self, total, applied):
        applied = min(applied, total)
        self.ledger = Ledger(total, applied)
        self.limit = applied
        self.free: set[int] = set()  # below the limit, held by nobody
        self.held: dict[int, list[int]] = {}
        self.done = set(range(applied))
        self.numbers = 0

    @rule(more=st.integers(0, 30))
    def raise_limit(self, more):
        limit = min(self.ledger.total, self.limit + more)
        self.free |= set(range(self.limit, limit))
        self.limit = limit

    @rule(count=st.integers(0, 20))
    def take(self, count):
        taken = positions(self.ledger.take(self.numbers, count, self.limit))
        assert len(taken) == min(count, len(self.free))
        assert set(taken) == set(sorted(self.free)[: len(taken)]), "what came back goes out first, in order"
        assert len(set(taken)) == len(taken)
        self.free -= set(taken)
        self.held[self.numbers] = taken
        self.numbers += 1

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(use_true_random=False))
    def book(self, pick):
        task = pick.choice(sorted(self.held))
        taken = self.held.pop(task)
        assert self.ledger.book(task) == len(taken)
        assert not self.done & set(taken)
        self.done |= set(taken)

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(use_true_random=False))
    def give_back(self, pick):
        task = pick.choice(sorted(self.held))
        self.ledger.give_back(task)
        self.free |= set(self.held.pop(task))

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(use_true_random=False))
    def no_task_takes_twice(self, pick):
        with pytest.raises(ValueError, match="holds samples already"):
            self.ledger.take(pick.choice(sorted(self.held)), 1, self.limit)

    @invariant()
    def books_agree(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.applied == len(self.done)
        assert self.ledger.available(self.limit) == len(self.free)
        assert self.ledger.outstanding() == sum(map(len, self.held.values()))
        held = [position for taken in self.held.values() for position in taken]
        touched = [*self.done, *positions(self.ledger._returned), *held]
        assert sorted(touched) == list(range(self.ledger.frontier))

    @invariant()
    def check_passes_only_at_rest(self):
        if not hasattr(self, "ledger"):
            return
        if self.held or len(self.done) != self.limit:
            with pytest.raises(AssertionError, match="sample ledger is off"):
                self.ledger.check(self.limit)
        else:
            self.ledger.check(self.limit)

    def teardown(self):
        """Whatever happened, the rest can still be applied exactly once."""
        if not hasattr(self, "ledger"):
            return
        for task in list(self.held):
            self.ledger.give_back(task)
        self.ledger.take(-1, self.ledger.total, self.ledger.total)
        self.ledger.book(-1)
        self.ledger.check(self.ledger.total)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("spoil", ["applied", "frontier", "held", "returned"])
def test_check_raises_whatever_is_off(spoil):
    ledger = Ledger(20)
    ledger.take(1, 10, 10)
    if spoil != "held":
        ledger.book(1)
    if spoil == "applied":
        ledger.applied -= 1
    if spoil == "frontier":
        ledger.take(2, 0, 20)
        ledger.book(2)
        ledger._cursor += 1
    if spoil == "returned":
        ledger._returned.append((3, 4))
    with pytest.raises(AssertionError, match="sample ledger is off: limit 10"):
        ledger.check(10)


def test_an_empty_holding_is_off_too():
    ledger = Ledger(10)
    ledger.take(1, 10, 10)
    ledger.take(2, 5, 10)
    ledger.book(1)
    with pytest.raises(AssertionError, match="off"):
        ledger.check(10)


def test_what_comes_back_goes_out_in_order_and_first():
    for order in ((0, 1), (1, 0)):
        ledger = Ledger(20)
        for task in (0, 1):
            ledger.take(task, 5, 20)
        for task in order:
            ledger.give_back(task)
        assert positions(ledger.take(2, 7, 20)) == list(range(7))
        assert positions(ledger.take(3, 7, 20)) == list(range(7, 14))


def test_a_resume_goes_on_where_it_was_saved():
    first, whole = Ledger(100), Ledger(100)
    whole.take(0, 37, 100)
    first.take(0, 37, 100)
    first.book(0)
    assert Ledger(100, first.applied).take(1, 20, 100) == whole.take(1, 20, 100) == ((37, 57),)


@pytest.mark.parametrize("applied", [-1, 101])
def test_a_resume_outside_the_stream_is_refused(applied):
    with pytest.raises(ValueError, match=rf"applied {applied} lies outside \[0, 100\]"):
        Ledger(100, applied)


def test_booking_twice_is_an_error():
    ledger = Ledger(10)
    ledger.take(0, 5, 10)
    ledger.book(0)
    for again in (ledger.book, ledger.give_back):
        with pytest.raises(KeyError):
            again(0)


@st.composite
def spans(draw):
    """Disjoint, ascending spans, some of them adjacent."""
    out, position = [], 0
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6)):
        out.append((position + gap, position + gap + size))
        position += gap + size
    return tuple(out)


@given(spans(), st.integers(0, 60))
def test_cut_splits_the_positions_in_order(spans, count):
    head, tail = cut(spans, count)
    assert positions(head) == positions(spans)[:count]
    assert positions(tail) == positions(spans)[count:]
    assert all(start < stop for start, stop in (*head, *tail))


@given(spans())
def test_length_counts_the_positions(spans):
    assert length(spans) == len(positions(spans))
    assert length(iter(spans)) == len(positions(spans))


# The order of an epoch.


@given(st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 5))
def test_each_epoch_is_a_permutation(samples, seed, epoch):
    order = EpochOrder(samples, seed)
    assert sorted(order.indices([(epoch * samples, (epoch + 1) * samples)])) == list(range(samples))


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(0, 99), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_the_order_depends_neither_on_the_cuts_nor_on_who_asks(samples, seed, sizes):
    """Spans that cross the border of epochs, asked in any order by any number of ranks, are the one stream."""
    total = sum(sizes)
    stream = EpochOrder(samples, seed).indices([(0, total)])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    ranks = [EpochOrder(samples, seed) for _ in range(3)]
    parts = {}
    for i in reversed(range(len(sizes))):  # also backwards: what a dead rank held goes out late
        parts[i] = ranks[i % 3].indices([(starts[i], starts[i] + sizes[i])])
    assert [index for i in range(len(sizes)) for index in parts[i]] == stream
    assert ranks[0].indices([(a, a + n) for a, n in zip(starts, sizes, strict=True)]) == stream


costs_of = st.lists(st.integers(1, 100), min_size=1, max_size=300)


@given(costs_of, st.integers(0, 99), st.integers(0, 3))
def test_an_epoch_balanced_by_cost_is_a_permutation_too(costs, seed, epoch):
    order = EpochOrder(len(costs), seed, costs)
    first = epoch * len(costs)
    assert sorted(order.indices([(first, first + len(costs))])) == list(range(len(costs)))


@given(st.integers(0, 99), st.integers(8, 64), st.integers(0, 1900))
def test_any_run_of_a_balanced_epoch_costs_about_its_part(seed, length, start):
    """Within the discrepancy of the golden ratio's sequence, below 3·log2(n) / n of the costs' range."""
    costs = [10 + (index * 37) % 117 for index in range(2000)]
    order = EpochOrder(len(costs), seed, costs)
    run = order.indices([(start, start + length)])
    mean_of_run, mean = sum(costs[i] for i in run) / length, sum(costs) / len(costs)
    # Blocks are samples of the epoch: their means differ by the standard error besides.
    assert abs(mean_of_run - mean) < 117 * (3 * math.log2(length) / length / 2 + 4 / 12**0.5 / 512**0.5)


def test_balanced_epochs_and_seeds_differ():
    costs = list(range(1000))
    order = EpochOrder(1000, 1, costs)
    first = order.indices([(0, 1000)])
    assert first != [i - 1000 for i in order.indices([(1000, 2000)])]
    assert first != EpochOrder(1000, 2, costs).indices([(0, 1000)])
    assert first != sorted(first)


def test_draws_follow_the_weights():
    """Within five standard deviations of what the weights say."""
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 6.0, 0.0]).double()
    epochs = 5000
    counts = Counter(EpochOrder(6, 3, weights=weights).indices([(0, 6 * epochs)]))
    for index, weight in enumerate((weights / weights.sum()).tolist()):
        deviation = (6 * epochs * weight * (1 - weight)) ** 0.5
        assert abs(counts[index] - 6 * epochs * weight) <= 5 * deviation


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e300])
def test_what_weighs_nothing_is_never_drawn(weight):
    order = EpochOrder(1000, 0, weights=torch.tensor([0.0, weight, 0.0, weight, 0.0] * 200, dtype=torch.float64))
    assert {index % 5 for index in order.indices([(0, 20_000)])} == {1, 3}


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), st.integers(0, 4), st.booleans())
def test_draws_depend_neither_on_the_cuts_nor_on_who_asks(samples, seed, epoch, costly):
    weights = torch.arange(1, samples + 1).double()
    costs = list(range(samples)) if costly else None
    first, middle, last = epoch * samples, epoch * samples + samples // 2, (epoch + 1) * samples
    whole = EpochOrder(samples, seed, costs, weights=weights).indices([(first, last)])
    other = EpochOrder(samples, seed, costs, weights=weights)
    parts = [other.indices([span]) for span in ((middle, last), (first, middle))]
    assert parts[1] + parts[0] == whole
    assert sorted(whole) == sorted(EpochOrder(samples, seed, weights=weights).indices([(first, last)]))


def test_drawn_epochs_and_seeds_differ():
    weights = torch.ones(1000).double()
    order = EpochOrder(1000, 1, weights=weights)
    first = order.indices([(0, 1000)])
    assert first != order.indices([(1000, 2000)])
    assert first != EpochOrder(1000, 2, weights=weights).indices([(0, 1000)])
    assert len(set(first)) < 1000


def test_epochs_and_seeds_differ():
    order = EpochOrder(1000, 1)
    first, second = order.indices([(0, 1000)]), order.indices([(1000, 2000)])
    assert first != second
    assert first != EpochOrder(1000, 2).indices([(0, 1000)])
    assert first != list(range(1000))


def test_no_more_than_a_few_orders_are_kept():
    order = EpochOrder(10, 0)
    order.indices([(0, 1000)])
    assert len(order._orders) <= 2
