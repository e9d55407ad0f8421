"""Places of ranks that have gone, which processes take that somebody has started by hand: as rank 0 sees them, which
has opened them, and as such a process sees itself until it has entered.

All that the two tell each other are keys of the job's store. Who has asked for a place says every second that it lives.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, cast

import torch.distributed as dist

from hetsync.errors import UserError, announce, complain
from hetsync.plane import codec
from hetsync.plane.base import Invitation, LostError, Newcomer, Summoned
from hetsync.plane.ending import leave
from hetsync.stop_signal import STATUSES, handled

POLL_SECONDS = 0.1
ALIVE_SECONDS = 1.0
SILENT_SECONDS = 30.0
QUIET_SECONDS = 3.0  # of one that is to be let in
MADE, OVER = "places made", "places are over"  # keys


class First(NamedTuple):
    """What is written at a place."""

    rank: int
    ranks_at_start: int
    door: tuple[int, str]
    told: bytes


class _Place:
    """Its keys."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self._store = store
        self._name = f"place {number}"

    def tell(self, what: str, value: Any) -> None:
        self._store.set(f"{self._name}/{what}", codec.dumps(value))  # type: ignore[arg-type]

    def hear(self, what: str) -> Any:
        """None where it has not been told."""
        key = f"{self._name}/{what}"
        return codec.loads(self._store.get(key)) if self._store.check([key]) else None

    def count(self, what: str, by: int) -> int:
        return self._store.add(f"{self._name}/{what}", by)

    def clear(self) -> None:
        """Nobody reads there any more, but for whoever is still to leave."""
        for what in ("first", "ready", "invitation"):
            self._store.delete_key(f"{self._name}/{what}")


class StoreSummoned(Summoned):
    """On rank 0."""

    def __init__(self, store: dist.Store, first: First) -> None:
        """`store`: a connection of its own."""
        self._rank, self._store = first.rank, store
        self._place = _Place(store, store.add(MADE, 1))
        self._place.tell("first", first)
        self._invited = self._dismissed = False
        self._heard_at = 0.0  # the moment
        threading.Thread(None, self._watch, f"hetsync-place-{first.rank}", daemon=True).start()

    def _watch(self) -> None:
        """Over whoever takes it, until it is invited."""
        beats = -1
        try:
            while not (self._invited or self._dismissed):
                if self.ready is None:
                    self.ready = self._place.hear("ready")
                heard, before = self._place.count("alive", 0), beats
                beats = heard
                if heard != before or not self._place.count("claims", 0):
                    self._heard_at = time.monotonic()
                silent = time.monotonic() - self._heard_at > SILENT_SECONDS
                if silent or self._place.hear("given up"):
                    how = "gives no sign of life" if silent else "has given up"
                    complain(f"the process that was to take the place of rank {self._rank} {how}")
                    self._end()
                    return
                time.sleep(POLL_SECONDS)
        except (RuntimeError, UserError, LostError) as error:
            complain(f"no process takes the place of rank {self._rank}: {error}")
            self.gone = True

    @property
    def over(self) -> bool:
        return self._invited or self.gone

    def invite(self, told: Any) -> str:
        if self.gone or time.monotonic() - self._heard_at > QUIET_SECONDS:  # all would wait for it
            raise LostError(f"the process that is to take the place of rank {self._rank} gives no sign of life")
        self._invited = True
        self._place.tell("invitation", Invitation("", told))
        return ""

    def dismiss(self, seconds: float) -> None:
        if not self._invited:
            self._dismissed = True
            self._end()

    def _end(self) -> None:
        self._place.tell("dismissal", True)
        self._place.clear()
        self.gone = True


class StoreNewcomer(Newcomer):
    """Attributes:
    door: Of rank 0's lifelines.
    """

    def __init__(self, store: dist.Store) -> None:
        """Waits for a place, as long as the job lasts. `store`: a connection of its own."""
        self._store = store
        self._entering = threading.Event()
        self._signals = ExitStack()
        self._place, first = self._taken()
        self.rank, self.ranks_at_start, self.door = first.rank, first.ranks_at_start, first.door
        self._told = first.told
        self._signals.enter_context(leaving_at_signals(self.give_up))
        announce(f"this process takes the place of rank {self.rank}, once it has got ready")
        threading.Thread(None, self._live, "hetsync-newcomer", daemon=True).start()

    def _taken(self) -> tuple[_Place, First]:
        seen, waits = 0, False
        try:
            with leaving_at_signals():
                while not self._store.check([OVER]):
                    for number in range(seen + 1, self._store.add(MADE, 0) + 1):
                        place = _Place(self._store, number)
                        first = place.hear("first")
                        if first is None and not place.count("claims", 0) and not place.hear("dismissal"):
                            break  # it is about to be written
                        seen = number
                        if first is not None and place.count("claims", 1) == 1:
                            return place, first
                    if not waits:
                        complain("no rank has died whose place is free: this process waits for one until the job ends")
                    waits = True
                    time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store has gone
            pass
        leave_unneeded("the job has ended")

    def _live(self) -> None:
        """It ends at once where it is not needed any more, whatever it does."""
        try:
            while not self._entering.wait(ALIVE_SECONDS):
                self._place.count("alive", 1)
                if self._store.check([OVER]) or self._place.hear("dismissal"):
                    break
            else:
                return
        except RuntimeError:
            pass
        leave_unneeded("the job has ended, or has found another process")

    @property
    def told(self) -> Any:
        return codec.loads(self._told)

    def give_up(self) -> None:
        """It is about to end: the place is free at once."""
        with suppress(RuntimeError):
            self._place.tell("given up", True)

    def knock(self, told: Any) -> Invitation:
        try:
            self._place.tell("ready", told)
            while (invitation := self._place.hear("invitation")) is None:
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            leave_unneeded("the job has ended")
        self._entering.set()
        with suppress(RuntimeError):
            self._place.clear()
        self._signals.close()
        return cast(Invitation, invitation)


@contextmanager
def leaving_at_signals(give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, a signal ends this process alone: a job that it has entered later would hear of it."""

    def leave_by(number: int, frame: object) -> NoReturn:
        give_up()
        leave(STATUSES[signal.Signals(number)], f"stopped by {signal.Signals(number).name} before it had joined")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled(leave_by):
        yield


def leave_unneeded(why: str) -> NoReturn:
    leave(0, f"this process is not needed: {why}")
