"""Who is left, and how each rank hears of it: by rank 0's books, and over real connections between threads."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from hetsync.errors import UserError
from hetsync.plane import store_members
from hetsync.plane.base import LateError, LostError, MembersLost
from hetsync.plane.connections import Connection
from hetsync.plane.lifelines import Lifeline, Roll
from hetsync.plane.rendezvous import Rendezvous
from hetsync.plane.store_members import StoreMembers

RANKS = 3
SECONDS = 20.0


def test_an_epoch_begins_when_all_who_are_left_have_come() -> None:
    roll = Roll(range(4))
    assert roll.gone(2) == [["over", "rank 2 has gone"]]
    assert roll.come(3) == []
    assert roll.missing == (0, 1)
    assert roll.come(0) == []
    assert roll.come(1) == [["left", 1, [0, 1, 3]]]
    assert roll.gone(3) == [["over", "rank 3 has gone"]]


def test_a_death_meanwhile_is_waited_for_no_more() -> None:
    roll = Roll(range(4))
    roll.gone(2)
    roll.come(0)
    roll.come(1)
    assert roll.gone(3) == [["left", 1, [0, 1]]]
    roll = Roll(range(3))
    roll.come(2)
    assert roll.gone(2) == [], "who has come may die"
    assert roll.missing == (0, 1)


def test_whoever_comes_first_ends_the_epoch() -> None:
    roll = Roll(range(2))
    ((kind, _),) = roll.come(1)
    assert kind == "over"
    assert roll.come(0) == [["left", 1, [0, 1]]]


def test_a_newcomer_is_let_in_once_all_want_it_and_it_is_there() -> None:
    roll = Roll([0, 1])
    assert roll.let_in(0, 0, 2) == []
    assert roll.knock(2) == []
    assert roll.let_in(1, 0, 2) == [["left", 1, [0, 1, 2]]]
    assert roll.gone(2) == [["over", "rank 2 has gone"]], "it is one of them"
    late = Roll([0, 1])
    late.let_in(0, 0, 2)
    late.let_in(1, 0, 2)
    assert late.knock(2) == [["left", 1, [0, 1, 2]]]


def test_a_death_meanwhile_keeps_it_out() -> None:
    roll = Roll([0, 1, 3])
    roll.knock(2)
    roll.let_in(0, 0, 2)
    assert roll.gone(3) == [["over", "rank 3 has gone"]]
    assert roll.let_in(1, 0, 2) == [], "of an epoch that is over"
    roll.come(0)
    assert roll.come(1) == [["left", 1, [0, 1]]]
    assert roll.let_in(0, 1, 2) == []
    assert roll.let_in(1, 0, 2) == [], "a word of before"
    roll.turn_away(2)
    assert roll.let_in(1, 1, 2) == [], "it has gone"


def test_who_does_not_connect_is_expelled_from_its_own_epoch_only() -> None:
    roll = Roll(range(3))
    assert roll.expelled(2, epoch=1) == []
    assert roll.expelled(2, epoch=0) == [["over", "rank 2 has gone"]]
    assert roll.expelled(1, epoch=0) == [], "it is over"
    roll.come(0)
    assert roll.come(1) == [["left", 1, [0, 1]]]
    assert roll.expelled(2, epoch=1) == []


@pytest.fixture
def rendezvous() -> Callable[[int], Rendezvous]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda rank: Rendezvous("127.0.0.1", server.port, rank, RANKS, "test", SECONDS, server)


@pytest.fixture
def lifelines(rendezvous: Callable[[int], Rendezvous]) -> Iterator[list[Lifeline]]:
    with ThreadPoolExecutor(RANKS) as threads:
        opened = list(threads.map(lambda rank: Lifeline.of_all(rendezvous(rank)), range(RANKS)))
    yield opened
    for lifeline in reversed(opened):
        lifeline.expect_close()
        lifeline.close()
    for thread in threading.enumerate():
        if thread.name == "hetsync-lifeline":
            thread.join(SECONDS / 2)
            assert not thread.is_alive(), "it would end this process"


def test_those_who_are_left_hear_of_a_death_and_agree(lifelines: list[Lifeline]) -> None:
    first, second, last = lifelines
    last.close()  # as the system does for a dead process
    for lifeline in (first, second):
        assert lifeline.await_word(0, SECONDS)
        assert (lifeline.why, lifeline.cut) == ("rank 2 has gone", False)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda lifeline: lifeline.next_epoch(SECONDS), (first, second)))
    for lifeline in (first, second):
        assert (lifeline.epoch, lifeline.ranks) == (1, (0, 1))
        assert lifeline.over(0)
        assert not lifeline.over(1)


def test_who_does_not_come_is_named(lifelines: list[Lifeline]) -> None:
    with pytest.raises(LateError, match="for rank 1, 2"):
        lifelines[0].next_epoch(0.1)


def test_the_death_of_rank_0_is_the_end(lifelines: list[Lifeline]) -> None:
    hub = lifelines[0]._hub
    assert hub is not None
    hub._connections[1].close()
    assert lifelines[1].await_word(0, SECONDS)
    assert lifelines[1].cut
    with pytest.raises(LostError, match="rank 0 has gone"):
        lifelines[1].next_epoch(SECONDS)


@pytest.mark.parametrize("ends", [True, False])
def test_who_still_waits_for_rank_0_s_host_is_ended(
    lifelines: list[Lifeline], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A call into the store of a host that has vanished would last for a quarter of an hour."""
    left: list[int] = []
    monkeypatch.setattr("hetsync.plane.lifelines.SECONDS_TO_END", 0.3)
    monkeypatch.setattr("hetsync.plane.lifelines.leave", lambda code, sentence: left.append(code))
    hub = lifelines[0]._hub
    assert hub is not None
    hub._connections[1].close()
    assert lifelines[1].await_word(0, SECONDS)
    if ends:
        lifelines[1].close()
    lifelines[1]._follower.join(SECONDS)
    assert left == ([] if ends else [1])


def test_what_waits_for_one_who_lives_fails_once_another_has_gone(
    lifelines: list[Lifeline], rendezvous: Callable[[int], Rendezvous]
) -> None:
    """Whoever collected its group would wait for it: rank 0 for rank 1, which may wait for rank 0."""
    members = [StoreMembers(rendezvous(n).connect, lifelines[n], n, SECONDS, tolerant=True) for n in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        groups = list(threads.map(lambda each: each.group("sums"), members))
        pending = groups[0].allreduce([torch.ones(5000)])
        lifelines.pop().close()
        left = list(threads.map(lambda each: each.mended(), members[:2]))
    assert [each.ranks for each in left] == [(0, 1)] * 2
    deadline = time.monotonic() + SECONDS
    while not pending.is_completed():
        assert time.monotonic() < deadline, "still pending"
        time.sleep(0.001)
    with pytest.raises(RuntimeError):
        pending.wait()
    del members[1:], groups[1:]


def without_the_last(lifelines: list[Lifeline]) -> list[Lifeline]:
    lifelines.pop().close()
    with ThreadPoolExecutor(len(lifelines)) as threads:
        list(threads.map(lambda lifeline: lifeline.next_epoch(SECONDS), lifelines))
    return lifelines


def test_a_newcomer_is_one_of_them(lifelines: list[Lifeline]) -> None:
    left = without_the_last(lifelines)
    door = left[0].open_door(2, SECONDS)
    with ThreadPoolExecutor(RANKS) as threads:
        entered = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", door, SECONDS)
        assert list(threads.map(lambda lifeline: lifeline.let_in(2, SECONDS), left)) == [True, True]
        lifelines.append(entered.result(SECONDS))
    assert [(each.epoch, each.ranks) for each in lifelines] == [(2, (0, 1, 2))] * RANKS
    lifelines.pop(1).close()
    for lifeline in lifelines:
        assert lifeline.await_word(2, SECONDS)
        assert lifeline.why == "rank 1 has gone"


def test_a_newcomer_that_stops_as_it_enters_is_not_waited_for(
    lifelines: list[Lifeline], rendezvous: Callable[[int], Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo would wait for it as long as the time limit lets it."""
    monkeypatch.setattr(store_members, "SECONDS_TO_ENTER", 0.5)
    left = without_the_last(lifelines)
    members = [StoreMembers(rendezvous(n).connect, left[n], n, SECONDS, tolerant=True) for n in range(2)]
    door = left[0].open_door(2, SECONDS)

    def joined(rank: int) -> None:
        with pytest.raises(MembersLost, match="rank 2 has gone"):
            members[rank].joined_by(2).group("meetings")

    with ThreadPoolExecutor(RANKS) as threads:
        entered = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", door, SECONDS)
        list(threads.map(joined, range(2)))
        stopped = entered.result(SECONDS)
        assert stopped.await_word(2, SECONDS)
        assert stopped.cut
        stopped.close()
        list(threads.map(lambda lifeline: lifeline.next_epoch(SECONDS), left))
    assert [each.ranks for each in left] == [(0, 1)] * 2


def test_who_does_not_come_is_not_waited_for(lifelines: list[Lifeline]) -> None:
    left = without_the_last(lifelines)
    left[0].open_door(2, SECONDS)
    with ThreadPoolExecutor(RANKS) as threads:
        assert list(threads.map(lambda lifeline: lifeline.let_in(2, 0.1), left)) == [False, False]
        list(threads.map(lambda lifeline: lifeline.next_epoch(SECONDS), left))
    assert [each.ranks for each in left] == [(0, 1)] * 2


def test_strangers_at_the_door_hold_up_nobody(lifelines: list[Lifeline]) -> None:
    left = without_the_last(lifelines)
    port, token = left[0].open_door(2, SECONDS)
    with ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS)) for _ in range(20)]
        assert silent[0].recv(1) == b"", "only so many wait"
        for greeting in (b'[2, "guess"]\n', b"GET / HTTP/1.0\r\n\r\n", f'["2", "{token}"]\n'.encode()):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            stranger.sendall(greeting)
            assert stranger.recv(1) == b""
        with pytest.raises(OSError):  # noqa: PT011, PT012 - in one of many pieces, whichever
            slow = held.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            for _ in range(100):
                slow.sendall(b"[")
                time.sleep(0.02)
        with ThreadPoolExecutor(RANKS) as threads:
            entered = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", (port, token), SECONDS)
            assert all(threads.map(lambda lifeline: lifeline.let_in(2, SECONDS), left))
            lifelines.append(entered.result(SECONDS))


def test_a_flood_of_strangers_does_not_end_the_hub(lifelines: list[Lifeline]) -> None:
    left = without_the_last(lifelines)
    port, token = left[0].open_door(2, SECONDS)
    for _ in range(400):
        with socket.create_connection(("127.0.0.1", port), SECONDS) as stranger:
            stranger.sendall(b"rubbish\n")
    with ThreadPoolExecutor(RANKS) as threads:
        entered = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", (port, token), SECONDS)
        assert all(threads.map(lambda lifeline: lifeline.let_in(2, SECONDS), left))
        lifelines.append(entered.result(SECONDS))


def test_who_was_invited_before_another_is_not_let_in(lifelines: list[Lifeline]) -> None:
    left = without_the_last(lifelines)
    old, new = left[0].open_door(2, SECONDS), left[0].open_door(2, SECONDS)
    with ThreadPoolExecutor(2 * RANKS) as threads:
        late = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", old, SECONDS)
        entered = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", new, SECONDS)
        assert all(threads.map(lambda lifeline: lifeline.let_in(2, SECONDS), left))
        lifelines.append(entered.result(SECONDS))
        with pytest.raises(LostError):
            late.result(SECONDS)


def test_a_knock_ends_with_its_epoch(lifelines: list[Lifeline]) -> None:
    left = without_the_last(lifelines)
    with ThreadPoolExecutor(RANKS) as threads:
        late = threads.submit(Lifeline.of_newcomer, 2, "127.0.0.1", left[0].open_door(2, SECONDS), SECONDS)
        deadline = time.monotonic() + SECONDS
        while 2 not in left[0]._hub.roll.knocking:
            assert time.monotonic() < deadline, "nobody has knocked"
            time.sleep(0.01)
        list(threads.map(lambda lifeline: lifeline.next_epoch(SECONDS), left))
        assert list(threads.map(lambda lifeline: lifeline.let_in(2, 0.1), left)) == [False, False]
        with pytest.raises(LostError):
            late.result(SECONDS)


def test_who_leaves_at_the_end_has_not_died(lifelines: list[Lifeline]) -> None:
    for lifeline in lifelines:
        lifeline.expect_close()
    lifelines[1].close()
    assert not lifelines[0].await_word(0, 0.1)


def test_a_stranger_is_not_let_in(rendezvous: Callable[[int], Rendezvous]) -> None:
    """Who has not read the store does not know the word."""
    opened: list[Lifeline] = []
    first = threading.Thread(target=lambda: opened.append(Lifeline.of_all(rendezvous(0))))
    first.start()
    port, _ = json.loads(rendezvous(1).connect().get("lifeline"))
    for greeting in (b'[1, "guess"]\n', b"GET / HTTP/1.0\r\n\r\n", b"[[1]]\n", b""):
        with socket.create_connection(("127.0.0.1", port), SECONDS) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    with ThreadPoolExecutor(2) as threads:
        opened += threads.map(lambda rank: Lifeline.of_all(rendezvous(rank)), (1, 2))
    first.join(SECONDS)
    assert len(opened) == RANKS
    for lifeline in opened:
        lifeline.expect_close()
    for lifeline in opened:
        lifeline.close()


def test_who_never_comes_is_named(rendezvous: Callable[[int], Rendezvous]) -> None:
    from dataclasses import replace

    with pytest.raises(UserError, match="rank 0 waited 2 s for rank 1, 2 to connect"):
        Lifeline.of_all(replace(rendezvous(0), timeout_seconds=2.0))


def test_a_child_that_loads_data_does_not_keep_its_dead_parent_s_connection() -> None:
    mine, others = socket.socketpair()
    connection = Connection(mine)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        connection.socket.close()  # as the system does at a death
        others.settimeout(SECONDS)
        assert others.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
