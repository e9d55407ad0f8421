"""Who is late is named, and who is silent for long is excluded; whoever was busy itself accuses nobody."""

from __future__ import annotations

from typing import Any

import pytest

from hetsync.plane.base import StalledError
from hetsync.plane.local import LocalPlane
from hetsync.processes import Process
from hetsync.sync import watchdog
from hetsync.sync.messages import Alive, Exclude, Look, Probe, Seen
from hetsync.sync.slowness import HISTORY, LEAST_HISTORY, SlowRanks
from hetsync.sync.watchdog import Silence, Watchdog

LIMIT = 40.0


def passing(silence: Silence, seconds: float, since: float, ranks: list[int], step: float = 0.5) -> list[int]:
    """Who is asked meanwhile."""
    asked = []
    for count in range(int(seconds / step) + 1):
        asked += silence.to_be_asked(since + count * step, ranks)
    return asked


def test_who_does_not_answer_has_been_silent_for_too_long() -> None:
    silence = Silence(LIMIT)
    assert set(passing(silence, 20, 0, [1, 2])) == {1, 2}
    silence.heard([1])
    assert passing(silence, 15, 20.5, [1, 2]) != []
    assert silence.too_long([1, 2]) == []
    passing(silence, 6, 36, [1, 2])
    assert silence.too_long([1, 2]) == [2]
    assert 2 in silence.silent


def test_what_this_process_has_missed_is_nobody_s_silence() -> None:
    """It was stopped for an hour: the others' words are still unread."""
    silence = Silence(LIMIT)
    silence.to_be_asked(0, [1])
    silence.to_be_asked(3600, [1])
    assert silence.too_long([1]) == []


def test_who_was_never_asked_is_never_too_late() -> None:
    silence = Silence(LIMIT)
    for second in range(200):
        silence.heard([1])
        assert silence.to_be_asked(second, [1]) == []
    assert silence.too_long([1]) == []


class Peers(LocalPlane):
    """Of three ranks on two hosts; this is rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.members = (0, 1, 2)
        self.told: list[tuple[int, Any]] = []

    def send(self, message: Any, to: int) -> None:
        self.told.append((to, message))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    return now


def dog_of(plane: Peers, silent_seconds: float | None = None) -> Watchdog:
    dog = Watchdog(plane, lambda: 7, timeout_seconds=10.0, silent_seconds=silent_seconds)
    dog.processes = {0: Process("a 1", 1), 1: Process("b 1", 2), 2: Process("b 1", 3)}
    return dog


def sign() -> Alive:
    return Alive(0, 8, True)


def test_the_last_words_name_rank_host_activity_and_seconds(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    plane = Peers()
    dog = dog_of(plane)
    clock[0] = 11.0
    dog.check(sign)
    assert plane.told == [(1, Probe()), (2, Probe())]
    dog.answer(Alive(1, 7, False, "computing", 12.5, 'File "loop.py", line 3'), sign)
    clock[0] = 14.0
    dog.check(sign)
    assert plane.told[-1] == (1, Look(2))  # a peer on its host
    dog.check(sign)
    dog.answer(Seen(2, "stopped", ""), sign)
    with pytest.raises(StalledError) as ended:
        dog.check(sign)
    said = str(ended.value)
    assert "nothing moved for 10 s in round 7; no sign of life from rank 2; rank 1 has not joined it" in said
    assert "; rank 1: process 2 on b, computing for 12 s" in said
    assert "; rank 2: process 3 on b, which is stopped" in said
    assert 'rank 1 was at\nFile "loop.py", line 3' in capfd.readouterr().err


def test_who_is_silent_is_ended_by_a_peer_once(clock: list[float]) -> None:
    plane = Peers()
    dog = dog_of(plane, LIMIT)
    for _ in range(200):
        clock[0] += 0.5
        dog.heard([1])
        dog.watch_silence(lambda: True)
    assert [told for told in plane.told if not isinstance(told[1], Probe)] == [(1, Exclude(2))]
    assert dog.excluded == {2: "silent"}


def test_nobody_is_excluded_where_the_others_would_not_go_on(clock: list[float]) -> None:
    plane = Peers()
    dog = dog_of(plane, LIMIT)
    for _ in range(200):
        clock[0] += 0.5
        dog.heard([1])
        dog.watch_silence(lambda: False)
    assert dog.excluded == {}


def test_nobody_is_excluded_who_has_no_peer(clock: list[float]) -> None:
    plane = Peers()
    dog = dog_of(plane, LIMIT)
    dog.processes = {0: Process("a 1", 1), 1: Process("a 1", 2), 2: Process("b 1", 3)}
    for _ in range(200):
        clock[0] += 0.5
        dog.heard([1])
        dog.watch_silence(lambda: True)
    assert dog.excluded == {}


def test_a_rank_crawls_by_its_own_measure_and_only_in_a_row() -> None:
    slow = SlowRanks(10.0)
    for _ in range(LEAST_HISTORY):
        assert not slow.observe(0, 1.0)
        assert not slow.observe(1, 0.01)
    assert not any(slow.observe(0, seconds) for seconds in (11.0, 11.0, 1.0, 11.0, 11.0))
    assert slow.observe(0, 11.0)
    assert not any(slow.observe(1, 0.09) for _ in range(2 * HISTORY))  # nine times as slow for good is its measure now
    assert not slow.observe(2, 100.0)
