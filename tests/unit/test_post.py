"""Letters reach whom they are for, in order, whether leaders pass them on or not."""

from __future__ import annotations

import pickle
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.sync.messages import Alive, Began, Give, Piece, Probe, StartRound
from hetsync.sync.post import Post


class Wires:
    """Messages between all ranks; in order from one to another, in any order otherwise."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[int, int], deque[bytes]] = {}
        self.sent = 0


class Wire:
    """A plane as far as the post sees it."""

    def __init__(self, rank: int, wires: Wires, dice: random.Random) -> None:
        self.rank = rank
        self._wires = wires
        self._dice = dice

    def send(self, message: Any, to: int) -> None:
        assert to != self.rank, "a letter to itself"
        self._wires.sent += 1
        self._wires.under_way.setdefault((self.rank, to), deque()).append(pickle.dumps(message))

    def unread(self, to: int) -> bool:
        return bool(self._wires.under_way.get((self.rank, to)))

    def receive(self) -> list[tuple[int, Any]]:
        found = []
        lines = [(pair, line) for pair, line in self._wires.under_way.items() if pair[1] == self.rank]
        self._dice.shuffle(lines)
        for (sender, _), line in lines:
            for _ in range(self._dice.randint(0, len(line))):
                found.append((sender, pickle.loads(line.popleft())))
        return found


def posts(ranks: int, group: int, seed: int = 0) -> tuple[list[Post], Wires]:
    wires, dice = Wires(), random.Random(seed)
    return [Post(Wire(rank, wires, dice), group) for rank in range(ranks)], wires  # type: ignore[arg-type]


def give(rank: int, number: int) -> Give:
    return Give(rank, Piece(number, (), 4, 0, 0))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**16))
def test_each_ranks_words_arrive_whole_and_in_order(ranks: int, group: int, seed: int) -> None:
    post, wires = posts(ranks, group, seed)
    dice = random.Random(seed)
    said = {rank: 0 for rank in range(1, ranks)}
    heard: dict[int, list[int]] = {rank: [] for rank in said}
    given: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for turn in range(1000):
        if turn >= 20 and not any(wires.under_way.values()) and not any(p._heard for p in post):
            break
        if turn < 20:
            post[0].deliver({rank: [give(rank, turn)] for rank in range(ranks) if dice.random() < 0.7})
        for rank in dice.sample(range(ranks), ranks):
            mail = post[rank].receive()
            for events in mail.events:
                assert rank == 0
                for event in events:
                    heard[event.rank].append(event.piece)
            for instructions in [*mail.instructions, *post[rank].own()]:
                assert all(instruction.rank == rank for instruction in instructions)
                given[rank] += [instruction.piece.number for instruction in instructions]
            if rank:  # a rank tells at every look
                count = dice.randint(0, 2) if turn < 20 else 0
                post[rank].tell([Began(rank, said[rank] + i, 0) for i in range(count)])
                said[rank] += count
    assert heard == {rank: list(range(count)) for rank, count in said.items()}
    for numbers in given.values():
        assert numbers == sorted(set(numbers))


def test_rank_0_hears_and_writes_one_letter_a_group() -> None:
    post, wires = posts(40, 8)
    start = StartRound(0, frozenset(range(40)), 0)
    post[0].deliver({rank: [start] for rank in range(40)})
    assert wires.sent == 7 + 4  # its own group, and the other leaders
    leader = post[8]
    while leader.receive().passed_on == 0:
        pass
    assert list(leader.own()) == [[start]]
    assert wires.sent == 7 + 4 + 7
    for rank in range(9, 16):
        post[rank].tell([Began(rank, 0, 0)])
    passed = 0
    while passed < 7:
        passed += leader.receive().passed_on
    before = wires.sent
    leader.tell([Began(8, 0, 0)])
    assert wires.sent == before + 1
    leader.tell([])
    assert wires.sent == before + 1, "nothing to say"


def test_a_leader_writes_again_when_its_last_letter_was_read() -> None:
    post, wires = posts(4, 2)
    for piece in range(3):
        post[2].tell([Began(2, piece, 0)])
    assert wires.sent == 1
    heard = []
    while not heard:
        heard = post[0].receive().events
    assert heard == [[Began(2, 0, 0)]]
    assert isinstance(heard[0][0], Began)
    post[2].tell([])
    assert wires.sent == 2
    while len(heard) < 2:
        heard += post[0].receive().events
    assert heard[1] == [Began(2, 1, 0), Began(2, 2, 0)]


def test_up_to_a_group_nobody_is_in_between() -> None:
    post, wires = posts(8, 8)
    post[0].deliver({rank: [give(rank, 0)] for rank in range(8)})
    assert wires.sent == 7
    post[5].tell([Began(5, 0, 0)])
    assert wires.sent == 8
    assert wires.under_way[5, 0]


@pytest.mark.parametrize("sign", [Probe(), Alive(5, 3, True)])
def test_signs_of_life_are_no_letters(sign: Probe | Alive) -> None:
    post, wires = posts(8, 2)
    wires.under_way[5, 4] = deque([pickle.dumps(sign)])
    mail = post[4].receive()
    while not mail.signs:
        mail = post[4].receive()
    assert mail.signs == [sign]
    assert mail.passed_on == 0
