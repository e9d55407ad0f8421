"""Places of ranks that have gone, by a store within one process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch.distributed as dist

from hetsync.errors import complain
from hetsync.plane import codec, store_places
from hetsync.plane.base import LostError
from hetsync.plane.store_places import OVER, First, StoreNewcomer, StoreSummoned
from hetsync.stop_signal import STATUSES

SECONDS = 20.0

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of who leaves


@pytest.fixture
def handlers() -> list[Callable[[int, object], None]]:
    """Of signals, of all that have come to wait for one."""
    return []


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch, handlers: list[Callable[[int, object], None]]) -> Iterator[list[int]]:
    """Statuses of those who have left; in life the process ends there."""
    statuses: list[int] = []

    def leave(status: int, sentence: str = "") -> None:
        statuses.append(status)
        complain(sentence)
        raise SystemExit(status)

    def handling(handler: Callable[[int, object], None]) -> AbstractContextManager[None]:
        handlers.append(handler)
        return nullcontext()

    monkeypatch.setattr(store_places, "leave", leave)
    monkeypatch.setattr(store_places, "handled", handling)  # signals of this process are pytest's
    for name in ("POLL_SECONDS", "ALIVE_SECONDS"):
        monkeypatch.setattr(store_places, name, 0.01)
    yield statuses
    for thread in threading.enumerate():
        if thread.name.startswith(("hetsync-newcomer", "hetsync-place")):
            thread.join(SECONDS)
            assert not thread.is_alive(), "it may end this process"


def opened(store: dist.Store, rank: int) -> StoreSummoned:
    return StoreSummoned(store, First(rank, 4, (1, "word"), codec.dumps(f"rank {rank}")))


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_place_has_one_newcomer_which_is_invited() -> None:
    store = dist.HashStore()
    places = [opened(store, 2), opened(store, 3)]
    newcomers = [StoreNewcomer(store) for _ in places]
    assert [(each.rank, each.ranks_at_start, each.door, each.told) for each in newcomers] == [
        (2, 4, (1, "word"), "rank 2"),
        (3, 4, (1, "word"), "rank 3"),
    ]
    newcomers[0]._place.tell("ready", "fast")
    until(lambda: places[0].ready == "fast")
    places[0].invite("welcome")
    assert newcomers[0].knock("fast").told == "welcome"
    assert places[1].ready is None
    places[1].dismiss(0)


def test_who_gives_no_sign_of_life_loses_its_place(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(store_places, "SILENT_SECONDS", 0.2)
    place = opened(store, 2)
    time.sleep(0.3)
    assert not place.gone, "whoever may take it still has time"
    monkeypatch.setattr(StoreNewcomer, "_live", lambda self: None)  # it dies as soon as it has claimed the place
    StoreNewcomer(store)
    until(lambda: place.gone)
    with pytest.raises(LostError, match="gives no sign of life"):
        place.invite("welcome")
    store.set(OVER, "")
    with pytest.raises(SystemExit):
        StoreNewcomer(store)  # nobody takes the same place again
    assert left == [0]


def test_who_gives_up_leaves_the_place_to_another_at_once(left: list[int]) -> None:
    store = dist.HashStore()
    place = opened(store, 2)
    StoreNewcomer(store).give_up()
    until(lambda: place.gone)
    again = opened(store, 2)
    assert StoreNewcomer(store).rank == 2
    again.dismiss(0)
    until(lambda: left == [0, 0])


def test_who_has_fallen_silent_is_not_invited(monkeypatch: pytest.MonkeyPatch) -> None:
    """All would wait for it."""
    store = dist.HashStore()
    place = opened(store, 2)
    monkeypatch.setattr(store_places, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(StoreNewcomer, "_live", lambda self: None)
    StoreNewcomer(store)
    time.sleep(0.5)
    with pytest.raises(LostError, match="gives no sign of life"):
        place.invite("welcome")
    place.dismiss(0)


def test_who_is_not_needed_leaves(left: list[int]) -> None:
    store = dist.HashStore()
    place = opened(store, 2)
    StoreNewcomer(store)
    place.dismiss(0)
    until(lambda: left == [0])


def test_a_signal_ends_who_waits_for_a_place_and_who_has_one(
    left: list[int], handlers: list[Callable[[int, object], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    place = opened(store, 2)
    StoreNewcomer(store)
    waiting, having = handlers
    for handler in (waiting, having):
        with pytest.raises(SystemExit):
            handler(signal.SIGTERM, None)
    assert left == 2 * [STATUSES[signal.SIGTERM]]
    assert capsys.readouterr().err.count("stopped by SIGTERM before it had joined") == 2
    until(lambda: place.gone)  # free at once
    store.set(OVER, "")
