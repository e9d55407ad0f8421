"""Sums of tensors in memory that ranks share: all ranks in one process, each polled when the test wants it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import collectively

from hetsync.plane import shared_memory
from hetsync.plane.base import PlaneError
from hetsync.plane.shared_memory import Gather, SharedMemory
from hetsync.plane.shared_sums import LINE_VALUES, MOST_OFFERED, MOST_SCRATCHES, SharedSums, parts_of
from hetsync.plane.staging import Test

MOST_VALUES = 3000  # of these tests' sums


def sums_of(ranks: int) -> list[SharedSums]:
    found = collectively(ranks, open_sums)
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]


def open_sums(rank: int, ranks: int, gather: Gather) -> SharedSums | None:
    return SharedSums.open(rank, ranks, gather)


def new(sums: SharedSums, values: int, in_area: bool) -> torch.Tensor:
    made = sums.memory.allocate(values) if in_area else torch.empty(values)
    assert made is not None
    return made


def addend(rank: int, number: int, values: int) -> torch.Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(100 * number + rank))


@given(values=st.integers(0, 1000), ranks=st.integers(1, 9))
def test_parts_are_all_of_it_and_share_no_line(values: int, ranks: int) -> None:
    parts = parts_of(values, ranks)
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(values))
    assert len(parts) == ranks
    assert all(part.start % LINE_VALUES == 0 or part.start == values for part in parts)


@pytest.mark.parametrize(("device", "megabytes"), [("cpu", 1), ("cuda", 4)])
def test_what_a_device_copies_comes_in_large_segments(device: str, megabytes: int) -> None:
    """Each waits for a poll; the host's own stay in the cache. Scratch memory holds either."""
    sums = sums_of(2)[0]
    values = sums.segment_values(torch.device(device))
    assert values * 4 == megabytes << 20
    first, second = torch.ones(values), torch.ones(values)
    everyones = sums_of(2)
    tests = [each.begin(tensor) for each, tensor in zip(everyones, (first, second), strict=True)]
    while not all([test() for test in tests]):
        pass
    assert first.eq(2).all()


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.integers(2, 4),
    sizes=st.lists(st.integers(1, MOST_VALUES), min_size=1, max_size=3 * MOST_OFFERED),
    seed=st.integers(0, 10**6),
)
def test_sums_are_right_and_alike_in_whatever_order_ranks_look(ranks: int, sizes: list[int], seed: int) -> None:
    draw = random.Random(seed)
    everyones = sums_of(ranks)
    tensors: list[list[torch.Tensor]] = []
    tests: list[tuple[int, int, Test]] = []
    for rank, sums in enumerate(everyones):
        own = [new(sums, size, draw.random() < 0.5) for size in sizes]
        for number, tensor in enumerate(own):
            tensor[:] = addend(rank, number, len(tensor))
            tests.append((rank, number, sums.begin(tensor)))
        tensors.append(own)
    looks = 0
    while tests:
        looked = draw.choice(tests)
        if looked[2]():
            tests.remove(looked)
        looks += 1
        assert looks < 100_000, "no rank waits for ever"
    for number, size in enumerate(sizes):
        expected = torch.stack([addend(rank, number, size) for rank in range(ranks)]).sum(0)
        torch.testing.assert_close(tensors[0][number], expected)
        assert all(torch.equal(own[number], tensors[0][number]) for own in tensors)
    assert all(1 <= len(sums._spare) <= MOST_SCRATCHES for sums in everyones)


@pytest.mark.parametrize("in_area", [True, False])
def test_a_sum_has_ended_once_all_have_taken_it(in_area: bool) -> None:
    """Or its memory would be used again while another still reads it."""
    first, second = sums_of(2)
    ours, theirs = new(first, 100, in_area).fill_(1), new(second, 100, in_area).fill_(2)
    ended_here, ended_there = first.begin(ours), second.begin(theirs)
    assert not ended_here(), "the other has not offered its own"
    assert not ended_there(), "the first has not added up its part"
    assert not ended_here(), "the other has not taken what the first has added up"
    assert ours.eq(3).all()
    assert ended_there()
    assert theirs.eq(3).all()
    assert ended_here()


def test_sums_wait_for_scratch_memory_and_for_room() -> None:
    first, second = sums_of(2)
    n = MOST_OFFERED + 3
    elsewhere = [torch.ones(10) for _ in range(MOST_SCRATCHES + 1)]
    there = [new(first, 10, in_area=True).fill_(1) for _ in range(n)]
    tests = [first.begin(tensor) for tensor in [*elsewhere, *there]]
    assert not tests[0]()
    assert len(first._under_way) == MOST_SCRATCHES
    others = [new(second, 10, in_area=True).fill_(2) for _ in range(len(tests))]
    their_tests = [second.begin(tensor) for tensor in others]
    assert not their_tests[0]()
    assert len(second._under_way) == MOST_OFFERED
    for _ in range(3 * len(tests)):
        done = [test() for test in [*tests, *their_tests]]
    assert all(done)
    assert all(tensor.eq(3).all() for tensor in [*elsewhere, *there, *others])


def test_what_others_give_is_not_changed() -> None:
    """Each writes in its own area alone."""
    first, second = sums_of(2)
    ours, theirs = (new(sums, 64, in_area=True) for sums in (first, second))
    ours[:], theirs[:] = torch.arange(64), 100
    first.begin(ours)()
    second.begin(theirs)()
    assert ours.equal(torch.arange(64.0)), "only the other has looked since"


def test_none_sums_where_one_has_no_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    true = SharedMemory.allocate

    def allocate(self: SharedMemory, values: int) -> torch.Tensor | None:
        made.append(values)
        return None if len(made) == 2 else true(self, values)

    monkeypatch.setattr(SharedMemory, "allocate", allocate)
    found = collectively(2, open_sums)
    assert found == [None, None]


@pytest.mark.parametrize(("machine", "shares"), [("x86_64", True), ("AMD64", True), ("aarch64", False)])
def test_only_processors_that_keep_the_order_of_stores(
    machine: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: machine)
    found = collectively(2, open_sums)
    assert [sums is not None for sums in found] == [shares, shares]


def test_more_ranks_than_values() -> None:
    everyones = sums_of(4)
    tensors = [new(sums, 3, in_area=True).fill_(1) for sums in everyones]
    tests = [sums.begin(tensor) for sums, tensor in zip(everyones, tensors, strict=True)]
    for _ in range(4):
        done = [test() for test in tests]
    assert all(done)
    assert [tensor.tolist() for tensor in tensors] == [[4, 4, 4]] * 4


def test_sums_do_with_less_scratch_memory_than_they_might_have(monkeypatch: pytest.MonkeyPatch) -> None:
    everyones = sums_of(2)
    monkeypatch.setattr(SharedMemory, "allocate", lambda self, count: None)
    tensors = [[torch.ones(10) for _ in range(5)] for _ in everyones]
    tests = [sums.begin(tensor) for sums, own in zip(everyones, tensors, strict=True) for tensor in own]
    for _ in range(20):
        done = [test() for test in tests]
    assert all(done)
    assert torch.stack([tensor for own in tensors for tensor in own]).eq(2).all()


def test_sums_of_former_members_harm_nobody() -> None:
    first, second = sums_of(2)
    test = first.begin(torch.ones(5))
    again = collectively(
        2, lambda rank, ranks, gather: SharedMemory.open(rank, ranks, gather, (first, second)[rank].memory)
    )
    assert None not in again
    with pytest.raises(PlaneError, match="others by now"):
        test()
    assert not any(first.memory.own.words[:64])


class Gone(Exception):
    pass


def test_a_rank_that_has_gone_is_missed() -> None:
    """Its memory would say nothing of that."""
    news: list[Exception] = []

    def look() -> None:
        if news:
            raise news[0]

    first, _ = collectively(2, lambda rank, ranks, gather: SharedSums.open(rank, ranks, gather, look))
    assert first is not None
    test = first.begin(torch.ones(5))
    assert not test()
    news.append(Gone())
    with pytest.raises(Gone):
        test()
