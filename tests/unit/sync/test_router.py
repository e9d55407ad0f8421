"""Messages reach whom they are for, in order, whether leaders pass them on or not."""

from __future__ import annotations

import pickle
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.sync.messages import Alive, AssignTask, Probe, StartRound, Task, TaskStarted
from hetsync.sync.router import Router


class Wires:
    """Messages between all ranks; in order from one to another, in any order otherwise."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[int, int], deque[bytes]] = {}
        self.sent = 0


class Wire:
    """A plane as far as the router sees it."""

    def __init__(self, rank: int, members: tuple[int, ...], wires: Wires, dice: random.Random) -> None:
        self.rank, self.members = rank, members
        self.leads = rank == members[0]
        self._wires = wires
        self._dice = dice

    def send(self, message: Any, to: int) -> None:
        assert to != self.rank, "a message to itself"
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


def make_routers(ranks: int, group: int, seed: int = 0) -> tuple[list[Router], Wires]:
    wires, dice = Wires(), random.Random(seed)
    members = tuple(range(ranks))
    return [Router(Wire(rank, members, wires, dice), group) for rank in members], wires  # type: ignore[arg-type]


def give(rank: int, number: int) -> AssignTask:
    return AssignTask(rank, Task(number, (), 4, 0, 0))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**16))
def test_each_ranks_words_arrive_whole_and_in_order(ranks: int, group: int, seed: int) -> None:
    routers, wires = make_routers(ranks, group, seed)
    dice = random.Random(seed)
    said = {rank: 0 for rank in range(1, ranks)}
    heard: dict[int, list[int]] = {rank: [] for rank in said}
    given: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for turn in range(1000):
        if turn >= 20 and not any(wires.under_way.values()) and not any(p._outgoing for p in routers):
            break
        if turn < 20:
            routers[0].send_instructions({rank: [give(rank, turn)] for rank in range(ranks) if dice.random() < 0.7})
        for rank in dice.sample(range(ranks), ranks):
            inbox = routers[rank].receive()
            for events in inbox.events:
                assert rank == 0
                for event in events:
                    heard[event.rank].append(event.task)
            for instructions in [*inbox.instructions, *routers[rank].pop_own()]:
                assert all(instruction.rank == rank for instruction in instructions)
                given[rank] += [instruction.task.number for instruction in instructions]
            if rank:  # a rank tells at every look
                count = dice.randint(0, 2) if turn < 20 else 0
                routers[rank].send_events([TaskStarted(rank, said[rank] + i, 0) for i in range(count)])
                said[rank] += count
    assert heard == {rank: list(range(count)) for rank, count in said.items()}
    for numbers in given.values():
        assert numbers == sorted(set(numbers))


def test_rank_0_hears_and_writes_one_letter_a_group() -> None:
    routers, wires = make_routers(40, 8)
    start = StartRound(0, frozenset(range(40)), 0)
    routers[0].send_instructions({rank: [start] for rank in range(40)})
    assert wires.sent == 7 + 4  # its own group, and the other leaders
    leader = routers[8]
    while leader.receive().passed_on == 0:
        pass
    assert list(leader.pop_own()) == [[start]]
    assert wires.sent == 7 + 4 + 7
    for rank in range(9, 16):
        routers[rank].send_events([TaskStarted(rank, 0, 0)])
    passed = 0
    while passed < 7:
        passed += leader.receive().passed_on
    before = wires.sent
    leader.send_events([TaskStarted(8, 0, 0)])
    assert wires.sent == before + 1
    leader.send_events([])
    assert wires.sent == before + 1, "nothing to say"


def test_a_leader_writes_again_when_its_last_letter_was_read() -> None:
    routers, wires = make_routers(4, 2)
    for task in range(3):
        routers[2].send_events([TaskStarted(2, task, 0)])
    assert wires.sent == 1
    heard = []
    while not heard:
        heard = routers[0].receive().events
    assert heard == [[TaskStarted(2, 0, 0)]]
    assert isinstance(heard[0][0], TaskStarted)
    routers[2].send_events([])
    assert wires.sent == 2
    while len(heard) < 2:
        heard += routers[0].receive().events
    assert heard[1] == [TaskStarted(2, 1, 0), TaskStarted(2, 2, 0)]


def test_up_to_a_group_nobody_is_in_between() -> None:
    routers, wires = make_routers(8, 8)
    routers[0].send_instructions({rank: [give(rank, 0)] for rank in range(8)})
    assert wires.sent == 7
    routers[5].send_events([TaskStarted(5, 0, 0)])
    assert wires.sent == 8
    assert wires.under_way[5, 0]


@pytest.mark.parametrize("sign", [Probe(0), Alive(5, 3, True)])
def test_signs_of_life_are_no_messages(sign: Probe | Alive) -> None:
    routers, wires = make_routers(8, 2)
    wires.under_way[5, 4] = deque([pickle.dumps(sign)])
    inbox = routers[4].receive()
    while not inbox.signs:
        inbox = routers[4].receive()
    assert inbox.signs == [sign]
    assert inbox.passed_on == 0


def take_in(router: Router) -> None:
    for _ in range(100):
        router.receive()


def test_an_unknown_message_is_an_error() -> None:
    routers, wires = make_routers(2, 2)
    wires.under_way[1, 0] = deque([pickle.dumps({"kind": "progress"})])
    with pytest.raises(AssertionError, match="rank 0 has got a dict"):
        take_in(routers[0])


def test_leaders_follow_the_order_in_which_members_have_come():
    """Rank 0 has died, and another process has taken its number: it comes last."""
    wires, dice, members = Wires(), random.Random(0), (1, 2, 3, 4, 0)
    routers = {rank: Router(Wire(rank, members, wires, dice), 2) for rank in members}  # type: ignore[arg-type]
    assert {rank: router._leader_of(rank) for rank, router in routers.items()} == {1: 1, 2: 1, 3: 3, 4: 3, 0: 0}
