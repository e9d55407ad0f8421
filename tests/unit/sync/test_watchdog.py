"""Who is late is named, and who is silent for long is excluded; whoever was busy itself accuses nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetsync import threads
from hetsync.plane.base import StalledError
from hetsync.plane.local import LocalPlane
from hetsync.processes import Process
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


def test_who_was_never_asked_is_never_too_late() -> None:
    silence = Silence(LIMIT)
    for second in range(200):
        silence.heard([1])
        assert silence.to_be_asked(second, [1]) == []
    assert silence.too_long([1]) == []


class Peers(LocalPlane):
    """Of three ranks on two hosts; this is one of them."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank, self.members = rank, (0, 1, 2)
        self.told: list[tuple[int, Any]] = []

    def send(self, message: Any, to: int) -> None:
        self.told.append((to, message))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    return now


def pass_by(clock: list[float], seconds: float, look: Callable[[], None]) -> None:
    """So many seconds, with looks that are no further apart than a poll may be."""
    until = clock[0] + seconds
    while clock[0] < until:
        clock[0] += 0.5
        look()


def dog_of(plane: Peers, silent_seconds: float | None = None) -> Watchdog:
    version = (lambda: 7) if plane.rank == 0 else None
    dog = Watchdog(plane, version, timeout_seconds=10.0, silent_seconds=silent_seconds)
    dog.processes = {0: Process("a 1", 1), 1: Process("b 1", 2), 2: Process("b 1", 3)}
    return dog


def orders(plane: Peers) -> list[tuple[int, Any]]:
    return [told for told in plane.told if not isinstance(told[1], Probe)]


def sign() -> Alive:
    return Alive(0, 8, True)


def test_the_last_words_name_rank_host_activity_and_seconds(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    plane = Peers()
    dog = dog_of(plane)
    pass_by(clock, 11.0, lambda: dog.check(sign))
    assert plane.told == [(1, Probe(0)), (2, Probe(0))]
    dog.answer(Alive(1, 7, False, "computing", 12.5, 'File "loop.py", line 3'), sign)
    pass_by(clock, 1.5, lambda: dog.check(sign))
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("before", "after"), [(5.0, 3.0), (10.0, 1.0)])  # the first has not asked the others, or has
def test_who_was_stopped_waits_for_the_others_again(clock: list[float], rank: int, before: float, after: float) -> None:
    """The whole job was, for an hour: nobody could say or do anything meanwhile."""
    dog = dog_of(Peers(rank))
    pass_by(clock, before, lambda: dog.check(sign))
    clock[0] += 3600.0
    dog.check(sign)
    pass_by(clock, after, lambda: dog.check(sign))


def test_who_is_silent_is_ended_by_a_peer_once(clock: list[float]) -> None:
    plane = Peers()
    dog = dog_of(plane, LIMIT)
    for _ in range(200):
        clock[0] += 0.5
        dog.heard([1])
        dog.watch_silence()
    assert orders(plane) == [(1, Exclude(2, if_silent=True))]
    assert dog.excluded == {2: "silent"}


def test_another_peer_ends_it_where_the_first_one_does_not(clock: list[float]) -> None:
    plane = Peers()
    plane.members = (0, 1, 2, 3)
    dog = dog_of(plane, LIMIT)
    dog.processes = {**dog.processes, 3: Process("b 1", 4)}
    for _ in range(200):
        clock[0] += 0.5
        dog.heard([1, 3])
        dog.watch_silence()
    assert [peer for peer, _ in orders(plane)] == [1, 3]


@pytest.mark.parametrize("answers", [True, False])
def test_a_peer_ends_only_who_is_silent_to_it_too(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The accuser's word may have waited behind a link that was cut, as did what it has not heard."""
    killed: list[Process] = []
    monkeypatch.setattr(Process, "kill", lambda process: killed.append(process))
    plane = Peers(rank=2)
    dog = dog_of(plane, LIMIT)
    dog.answer(Exclude(0, if_silent=True), sign)
    assert plane.told == [(0, Probe(2))]
    if answers:
        dog.answer(Alive(0, 8, False), sign)
    watch(dog, clock, 3.0)
    assert killed == ([] if answers else [dog.processes[0]])


def test_who_was_stopped_ends_nobody_whom_others_accuse(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Process] = []
    monkeypatch.setattr(Process, "kill", lambda process: killed.append(process))
    dog = dog_of(Peers(rank=2), LIMIT)
    dog.answer(Exclude(0, if_silent=True), sign)
    clock[0] += 3600.0
    dog.watch_silence()
    assert killed == []
    watch(dog, clock, 3.0)
    assert killed == [dog.processes[0]]


def test_a_rank_that_crawls_is_ended_though_it_answers(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Process] = []
    monkeypatch.setattr(Process, "kill", lambda process: killed.append(process))
    dog = dog_of(Peers(rank=2), LIMIT)
    dog.answer(Exclude(1), sign)
    assert killed == [dog.processes[1]]


def test_who_speaks_again_is_excluded_no_more(clock: list[float]) -> None:
    _, dog = second("a 1")
    watch(dog, clock, 2 * LIMIT)
    assert dog.excluded == {0: "silent"}
    dog.answer(Alive(0, 8, False), sign)
    assert dog.excluded == {}


def test_nobody_is_excluded_who_has_no_peer(clock: list[float]) -> None:
    plane = Peers()
    dog = dog_of(plane, LIMIT)
    dog.processes = {0: Process("a 1", 1), 1: Process("a 1", 2), 2: Process("b 1", 3)}
    for _ in range(200):
        clock[0] += 0.5
        dog.heard([1])
        dog.watch_silence()
    assert dog.excluded == {}


# The first rank's own silence.


def second(first_at: str = "b 1") -> tuple[Peers, Watchdog]:
    """With the first on its host, or on another, where rank 2 is."""
    plane = Peers(rank=1)
    dog = dog_of(plane, LIMIT)
    dog.processes = {0: Process(first_at, 1), 1: Process("b 1", 2), 2: Process("a 1", 3)}
    return plane, dog


def watch(dog: Watchdog, clock: list[float], seconds: float) -> None:
    pass_by(clock, seconds, dog.watch_silence)


def test_the_second_rank_has_the_first_ended_by_a_peer(clock: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    plane, dog = second("a 1")
    watch(dog, clock, LIMIT)
    assert set(plane.told) == {(0, Probe(1))}
    watch(dog, clock, LIMIT)
    assert orders(plane) == [(2, Exclude(0, if_silent=True))]
    assert dog.excluded == {0: "silent"}
    assert "hetsync: rank 0 (process 1 on a) is silent for 60 s: it is excluded" in capfd.readouterr().err


def test_of_the_first_s_host_the_second_ends_it_itself(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[Process] = []
    monkeypatch.setattr(Process, "kill", lambda process: killed.append(process))
    _, dog = second()
    watch(dog, clock, 2 * LIMIT)
    assert killed == [dog.processes[0]]
    assert "rank 0 has gone" in capfd.readouterr().err  # there is no such process


def test_a_first_rank_that_answers_is_not_silent_and_nobody_else_watches_it(clock: list[float]) -> None:
    plane, dog = second()
    third = Peers(rank=2)
    other = dog_of(third, LIMIT)
    for _ in range(400):
        watch(dog, clock, 0.5)
        other.watch_silence()
        if plane.told[-1:] == [(0, Probe(1))]:
            plane.told.clear()
            dog.answer(Alive(0, 8, False, "computing", clock[0]), sign)
    assert dog.excluded == {}
    assert third.told == []


def test_the_second_accuses_nobody_after_a_pause_of_its_own(clock: list[float]) -> None:
    _, dog = second()
    watch(dog, clock, LIMIT)
    clock[0] += 3600
    watch(dog, clock, LIMIT / 4)
    assert dog.excluded == {}


def test_where_two_accuse_each_other_the_second_goes(clock: list[float]) -> None:
    """They hear each other no more: the first has just been heard of when the second has just been asked."""
    first = Peers()
    accuser = dog_of(first, LIMIT)
    _, accused = second()
    watch(accused, clock, LIMIT / 4 - 0.5)  # nothing was said for so long: this was to be its next probe
    while not accuser.excluded:
        clock[0] += 0.5
        accuser.heard([2])
        accuser.watch_silence()
        accused.watch_silence()
    assert accuser.excluded == {1: "silent"}
    assert accused.excluded == {}
    watch(accused, clock, LIMIT / 5)
    assert accused.excluded == {}, "it has time to end"


def test_who_asks_is_answered_and_only_the_first_is_word_enough(clock: list[float]) -> None:
    plane = Peers()
    dog = dog_of(plane)
    pass_by(clock, 9.5, lambda: dog.check(sign))
    dog.answer(Probe(1), sign)
    assert plane.told == [(1, sign())]
    pass_by(clock, 1.0, lambda: dog.check(sign))
    assert plane.told[1:] == [(1, Probe(0)), (2, Probe(0))], "the job has not moved by that"


def test_a_rank_crawls_by_its_own_measure_and_only_in_a_row() -> None:
    slow = SlowRanks(10.0)
    for _ in range(LEAST_HISTORY):
        assert not slow.observe(0, 8, 1.0)
        assert not slow.observe(1, 8, 0.01)
    assert not any(slow.observe(0, 8, seconds) for seconds in (11.0, 11.0, 1.0, 11.0, 11.0))
    assert slow.observe(0, 8, 11.0)
    assert not any(slow.observe(1, 8, 0.09) for _ in range(2 * HISTORY))  # nine times as slow for good is its measure
    assert not slow.observe(2, 8, 100.0)


def test_slices_of_other_sizes_make_no_rank_crawl_and_hide_none_that_does() -> None:
    """Though some of their cost is fixed, and shares move all the time."""
    slow, sizes = SlowRanks(3.0), (32, 117, 2, 30, 31, 33)

    def seconds(samples: int) -> float:
        return 0.1 + 0.001 * samples

    for count in range(2 * HISTORY):
        samples = sizes[count % len(sizes)]
        assert not slow.observe(0, samples, seconds(samples))
    assert [slow.observe(0, samples, 20 * seconds(samples)) for samples in (32, 31, 33)] == [False, False, True]
