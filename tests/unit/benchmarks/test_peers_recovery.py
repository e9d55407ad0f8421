"""How soon a job is back to speed after a device has slowed down. Imports no MPI."""

import pytest

from benchmarks.peers.recovery import WINDOW_ROUNDS, Spent, recovery, slow_down

SLICES = 60


def rank(seconds, idle_from=SLICES, idle_until=SLICES, idle=0.0):
    """Slices of these lengths in a row; a wait follows those from `idle_from` to `idle_until`."""
    now, found = 0.0, []
    for number in range(SLICES):
        found.append(("compute", now, now + seconds(number)))
        now += seconds(number)
        if idle_from <= number < idle_until:
            found.append(("wait", now, now + idle))
            now += idle
    return found


def with_rounds(timeline, every=1.0):
    stop = max(stop for _, _, stop in timeline)
    return [*timeline, *(("sum", every * n - 0.1, every * n) for n in range(1, int(stop / every)))]


def slows(number):
    return 1.0 if number < 20 else 3.0


def test_a_job_whose_devices_stay_busy_is_back_at_once():
    timelines = [with_rounds(rank(lambda _: 1.0)), rank(slows)]
    assert slow_down(timelines[1]) == 20.0
    assert recovery(timelines, 1, [2.0, 1.0]) == {"window": pytest.approx(1.0), "rounds": 0}


def test_rounds_are_counted_until_devices_are_busy_again():
    waiting = rank(lambda _: 1.0, idle_from=20, idle_until=30, idle=1.0)  # idle half the time from 20 to 40
    found = recovery([with_rounds(waiting), rank(slows)], 1, [1.0, 1.0])
    assert found is not None
    assert found["window"] == pytest.approx(0.75)
    assert found["rounds"] == 20 - 2  # a window with one second of 40 lost is back


def test_evaluation_is_off_the_clock():
    evaluating = [
        ("rest", start, stop) if kind == "wait" else (kind, start, stop)
        for kind, start, stop in rank(lambda _: 1.0, 20, 30, 1.0)
    ]
    found = recovery([with_rounds(evaluating), rank(slows)], 1, [1.0, 1.0])
    assert found == {"window": pytest.approx(1.0), "rounds": 0}


def test_a_job_that_never_comes_back_says_so():
    lame = rank(lambda _: 1.0, idle_from=20, idle=1.0)
    assert recovery([with_rounds(lame), rank(slows)], 1, [1.0, 1.0])["rounds"] is None


def test_nothing_is_told_without_a_slow_down_or_without_rounds_after_it():
    steady = rank(lambda _: 1.0)
    assert recovery([with_rounds(steady), steady], 1, [1.0, 1.0]) is None
    late = [("compute", n, n + (1.0 if n < SLICES - 3 else 3.0)) for n in range(SLICES)]
    assert recovery([with_rounds(steady), late], 1, [1.0, 1.0]) is None
    assert SLICES > WINDOW_ROUNDS


def test_time_spent_within_a_stretch():
    spent = Spent([("compute", 1.0, 2.0), ("wait", 2.0, 3.0), ("compute", 3.0, 5.0)], "compute")
    assert spent.within(0.0, 10.0) == 3.0
    assert spent.within(1.5, 4.0) == 1.5
    assert spent.within(2.0, 3.0) == 0.0
    assert spent.within(0.0, 0.5) == 0.0
