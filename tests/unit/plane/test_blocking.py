"""Who waits for others waits for so long as it has been there itself."""

from __future__ import annotations

import pytest

from hetsync import threads
from hetsync.plane.base import LateError
from hetsync.plane.blocking import wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """It goes on while somebody sleeps."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threads.time, "sleep", sleep)
    return now


def test_who_does_not_come_is_named_after_the_limit(clock: list[float]) -> None:
    with pytest.raises(LateError, match="waited 5 s for rank 1"):
        wait_until(lambda: False, 5.0, lambda: "rank 1")
    assert 5.0 <= clock[0] < 5.1


def test_who_was_stopped_waits_for_the_others_again(clock: list[float]) -> None:
    """The whole job was, for an hour."""
    looks = 0

    def done() -> bool:
        nonlocal looks
        looks += 1
        if looks == 10:
            clock[0] += 3600.0
        return looks == 100

    wait_until(done, 5.0, lambda: "rank 1")
    assert looks == 100
