"""A connection of each rank to rank 0, whose end is a death, for jobs whose launcher tells nobody of one.

The system closes a dead process's connections, so that rank 0 hears of it at once, and those who are left by its word,
while nobody asks anything. Of a host that has vanished it hears after a minute, by TCP's own probes. Rank 0 also says
who is left once all of these have come to be mended, lets in who takes the place of a rank that has gone, and passes on
how the job ends. Its own death ends the job: it holds the store at which the ranks meet, or is beside the agent that
does.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from hetsync.errors import INTERNAL_ERROR, OwnMistakeError, cause, complain
from hetsync.plane.base import LateError, LostError, named
from hetsync.plane.connections import PIECES, Connection, Word, listening, probed
from hetsync.plane.door import Door, Visitor
from hetsync.plane.ending import leave
from hetsync.plane.rendezvous import Rendezvous

SECONDS_TO_TELL = 2.0  # all ranks that the job ends
SECONDS_TO_GREET = 5.0  # for whoever has connected
SECONDS_TO_END = 20.0  # by itself, where rank 0 has gone


class Roll:
    """Who is left, by rank 0's books. Pure: what happens goes in, and what to tell all who are left comes out.

    An epoch ends with a death, or once somebody asks for its end; the next begins when all who are left have come, or
    when all have let another in, which has knocked.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.left = tuple(ranks)
        self._epoch = 0
        self._over = False
        self._come = set[int]()
        self._knocking = set[int]()
        self._let_in: dict[int, int] = {}  # whom, by whom, in this epoch

    @property
    def knocking(self) -> tuple[int, ...]:
        return tuple(self._knocking)

    @property
    def missing(self) -> tuple[int, ...]:
        """Those who have not come yet."""
        return tuple(rank for rank in self.left if rank not in self._come)

    def gone(self, rank: int) -> list[Word]:
        self.left = tuple(each for each in self.left if each != rank)
        self._come.discard(rank)
        return self._end_epoch(f"rank {rank} has gone")

    def expelled(self, rank: int, epoch: int) -> list[Word]:
        """One of them, as others do not reach it. Of an epoch that is over it comes to nothing."""
        return self.gone(rank) if epoch == self._epoch and not self._over and rank in self.left else []

    def come(self, rank: int) -> list[Word]:
        self._come.add(rank)
        return self._end_epoch(f"rank {rank} has lost another, or a message")

    def knock(self, newcomer: int) -> list[Word]:
        """It is there, and waits to be let in."""
        self._knocking.add(newcomer)
        return self._open()

    def turn_away(self, newcomer: int) -> None:
        """It has gone before it was let in."""
        self._knocking.discard(newcomer)

    def let_in(self, rank: int, epoch: int, newcomer: int) -> list[Word]:
        """By one of those who are left. Of an epoch that is over it comes to nothing."""
        if epoch == self._epoch and not self._over:
            self._let_in[rank] = newcomer
        return self._open()

    def _open(self) -> list[Word]:
        wanted = {self._let_in.get(rank) for rank in self.left}
        if self._over or len(wanted) != 1 or not wanted & self._knocking:
            return []
        newcomer = next(each for each in wanted if each is not None)
        self._knocking.discard(newcomer)
        self.left = (*self.left, newcomer)
        return [self._begin_epoch()]

    def _end_epoch(self, why: str) -> list[Word]:
        words: list[Word] = [] if self._over else [["over", why]]
        self._let_in.clear()
        self._over = bool(self.missing)
        return words if self._over else [*words, self._begin_epoch()]

    def _begin_epoch(self) -> Word:
        self._epoch += 1
        self._come.clear()
        self._let_in.clear()
        return ["left", self._epoch, list(self.left)]


class Lifeline:
    """One rank's. Threads may share it.

    Attributes:
        epoch: Counts from 0, from one death to the next.
        ranks: Who is left in this epoch.
        why: The last one that is over has ended, for people to read.
        cut: There is no rank 0 any more.
    """

    def __init__(
        self, ranks: Sequence[int], connection: Connection | None, hub: _Hub | None = None, epoch: int = 0
    ) -> None:
        """Without a connection nobody goes or comes."""
        self.epoch, self.ranks = epoch, tuple(ranks)
        self.why, self.cut = "", False
        self._over = epoch - 1  # this epoch, and all before
        self._closing = False
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._place: tuple[int, str] | None = None  # where the newest newcomer is to knock
        self._hub = hub
        self._connection = connection
        if connection is not None:
            self._follower = threading.Thread(None, self._follow, "hetsync-lifeline", args=(connection,), daemon=True)
            self._follower.start()

    @staticmethod
    def of_all(rendezvous: Rendezvous) -> Lifeline:
        """Collective. UserError where rank 0 cannot be reached, or others do not come in time."""
        hub = _Hub.opened(rendezvous) if rendezvous.rank == 0 else None
        connection = hub.own_end if hub is not None else _connected_to_first(rendezvous)
        return Lifeline(range(rendezvous.size), connection, hub)

    @staticmethod
    def of_newcomer(rank: int, host: str, door: tuple[int, str], seconds: float) -> Lifeline:
        """Once all have let this rank in. LostError where they do not so in time."""
        port, token = door
        try:
            connection = Connection(probed(socket.create_connection((host, port), seconds)))
        except OSError as error:
            raise LostError(f"rank 0 cannot be reached at {host}, port {port} ({cause(error)})") from error
        connection.send(rank, token)
        lifeline = Lifeline([rank], connection, epoch=-1)
        with lifeline._news:
            lifeline._news.wait_for(lambda: lifeline.cut or lifeline.epoch >= 0, seconds)
        if lifeline.epoch < 0:
            lifeline.close()  # or it would end this process, as one that waits for rank 0
            raise LostError("the ranks have not let this one in")
        return lifeline

    def over(self, epoch: int) -> bool:
        """Has somebody gone since this one began?"""
        return epoch <= self._over

    def await_word(self, epoch: int, seconds: float) -> bool:
        """Whether an epoch is over, waiting so long for it: libraries may notice a death before rank 0 does. Where the
        job ends the process does, too."""
        with self._news:
            return self._news.wait_for(lambda: self.over(epoch), seconds)

    def next_epoch(self, limit_seconds: float) -> None:
        """Collective among those who are left. LateError names who does not come; LostError where rank 0 has gone."""
        before = self.epoch
        self._send("come")
        with self._news:
            begun = self._news.wait_for(lambda: self.cut or self.epoch > before, limit_seconds)
        if self.cut:
            raise LostError(self.why)
        if not begun:
            late = named(self._hub.roll.missing if self._hub is not None else [0])
            raise LateError(f"after a rank had gone, the others waited {limit_seconds:.0f} s for {late}")

    def open_door(self, newcomer: int, limit_seconds: float) -> tuple[int, str]:
        """On rank 0: the port at which the next one of this number is to knock, and what it has to say there. Who was
        told something else before is not let in any more."""
        self._place = None
        self._send("open", newcomer)
        with self._news:
            self._news.wait_for(lambda: self._place is not None, limit_seconds)
        if self._place is None:
            raise LateError(f"rank 0 waited {limit_seconds:.0f} s for a port of its own")
        return self._place

    def let_in(self, newcomer: int, limit_seconds: float) -> bool:
        """Collective: the next epoch begins with one rank more, the last. False where this one is over, or it does not
        come in time."""
        before = self.epoch
        self._send("let in", before, newcomer)
        with self._news:
            self._news.wait_for(lambda: self.over(before) or self.epoch > before, limit_seconds)
            return self.epoch > before and not self.over(before)

    def expel(self, rank: int) -> None:
        """It has been let in, and does not come: the others go on without it, as after its death."""
        self._send("expel", self.epoch, rank)

    def _send(self, *word: Any) -> bool:
        return self._connection is not None and self._connection.send(*word)

    def end_job(self, code: int) -> NoReturn:
        """End all ranks with this exit code."""
        if self._send("end", code):
            time.sleep(SECONDS_TO_TELL)  # rank 0's word ends this process before
        leave(code)

    def expect_close(self) -> None:
        """Before the last that ranks do together: who leaves from now on has not died."""
        self._closing = True
        if self._hub is not None:
            self._hub.closing = True

    def close(self) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.close()

    def _follow(self, connection: Connection) -> None:
        while (words := connection.receive()) is not None:
            for word in words:
                self._heed(*word)
        if not self._closing:
            with self._news:
                self.cut = True
                self._end_epoch("rank 0 has gone, and with it what the ranks meet at")
            # Of a host that has vanished the store's calls hear nothing, and no limit of Python's ends them.
            if not self._closed.wait(SECONDS_TO_END):
                leave(INTERNAL_ERROR, f"{self.why}; something still waits for it")

    def _heed(self, kind: str, *told: Any) -> None:
        if kind == "end":
            leave(*told)
        with self._news:
            if kind == "over":
                self._end_epoch(*told)
            elif kind == "door":
                port, token = told
                self._place = port, token
                self._news.notify_all()
            else:
                self.epoch, ranks = told
                self.ranks = tuple(ranks)
                self._news.notify_all()

    def _end_epoch(self, why: str) -> None:
        self._over, self.why = self.epoch, why
        self._news.notify_all()


class _Hub:
    """Where all lifelines meet, with a thread of its own."""

    def __init__(self, connections: dict[int, Connection], own_end: Connection) -> None:
        self.roll = Roll(sorted(connections))
        self.own_end = own_end
        self.closing = False
        self._connections = connections
        self._door: Door | None = None
        self._selector = selectors.DefaultSelector()
        for rank, connection in connections.items():
            self._selector.register(connection.socket, selectors.EVENT_READ, rank)
        threading.Thread(None, self._serve, "hetsync-lifelines", daemon=True).start()

    @staticmethod
    def opened(rendezvous: Rendezvous) -> _Hub:
        """Once all have connected."""
        mine, own_end = map(Connection, socket.socketpair())
        connections, token = {rendezvous.rank: mine}, secrets.token_hex()
        with listening() as server:
            store = rendezvous.connect()
            store.set("lifeline", json.dumps([server.getsockname()[1], token]))
            deadline = time.monotonic() + rendezvous.timeout_seconds
            while missing := [rank for rank in range(rendezvous.size) if rank not in connections]:
                server.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    greeted = _greeted(server.accept()[0], token, missing)
                except TimeoutError as error:
                    raise OwnMistakeError(
                        f"rank 0 waited {rendezvous.timeout_seconds:.0f} s for {named(missing)} to connect: has it been"
                        " started, and are the ports of rank 0's host open between the hosts?"
                    ) from error
                if greeted is not None:
                    rank, connection = greeted
                    connections[rank] = connection
        return _Hub(connections, own_end)

    def _serve(self) -> None:
        try:
            while self._connections:
                for rank, word in self._heard(None):
                    if word is None or rank in self._connections:  # not expelled meanwhile
                        self._heed(rank, word)
        except Exception as error:  # deaf, the ranks would wait for ever
            leave(INTERNAL_ERROR, f"rank 0 hears of no death any more: {type(error).__name__}: {error}")
        if self._door is not None:
            self._door.close()

    def _heed(self, rank: int, word: Word | None) -> None:
        kind, *told = word or [None]
        if kind is None:
            self._tell_all([] if self.closing else self.roll.gone(rank))
        elif kind == "come":
            self._tell_all(self.roll.come(rank))
        elif kind == "let in":
            self._tell_all(self.roll.let_in(rank, *told))
        elif kind == "expel":
            self._expel(*told)
        elif kind == "open":
            self._connections[rank].send("door", *self._open_door(*told))
        else:
            self._end_job(*told)

    def _expel(self, epoch: int, rank: int) -> None:
        if words := self.roll.expelled(rank, epoch):
            complain(f"rank {rank} has been let in, but does not connect: the others go on without it")
            self._drop(rank)
            self._tell_all(words)

    def _drop(self, rank: int) -> None:
        connection = self._connections.pop(rank)
        self._selector.unregister(connection.socket)
        connection.close()

    def _open_door(self, newcomer: int) -> tuple[int, str]:
        if self._door is None:
            self._door = Door(self._selector)
        self._send_away([newcomer])
        return self._door.port, self._door.new_token(newcomer)

    def _send_away(self, newcomers: Iterable[int]) -> None:
        for newcomer in newcomers:
            self.roll.turn_away(newcomer)
            if self._door is not None:
                self._door.send_away(newcomer)

    def _heard(self, seconds: float | None) -> list[tuple[int, Word | None]]:
        """By rank; None where it has gone."""
        heard: list[tuple[int, Word | None]] = []
        for key, _ in self._selector.select(seconds):
            if not isinstance(key.data, int):
                self._answer(key.data)
                continue
            rank, words = key.data, self._connections[key.data].receive()
            if words is None:
                self._drop(rank)
                heard.append((rank, None))
            else:
                heard += [(rank, word) for word in words]
        return heard

    def _answer(self, visitor: Visitor | None) -> None:
        """At the door."""
        assert self._door is not None
        if visitor is None:
            self._door.receive_visitor()
            return
        if visitor not in self._door.visitors:  # sent away since it was heard
            return
        before, now = visitor.rank, self._door.hear(visitor)
        if before is not None:
            self.roll.turn_away(before)
        if now is not None and now not in self._connections:
            self._tell_all(self.roll.knock(now))

    def _tell_all(self, words: Sequence[Word]) -> None:
        for word in words:
            if word[0] == "over":  # who knocks was to enter an epoch that does not come
                self._send_away(self.roll.knocking)
            for rank in self.roll.left:
                if rank not in self._connections and self._door is not None and self._door.has(rank):
                    self._connections[rank] = self._door.hand_over(rank)
                if rank in self._connections:
                    self._connections[rank].send(*word)

    def _end_job(self, code: int) -> NoReturn:
        for rank, connection in self._connections.items():
            if rank > 0:
                connection.send("end", code)
        deadline = time.monotonic() + SECONDS_TO_TELL
        while set(self._connections) != {0} and (left := deadline - time.monotonic()) > 0:
            self._heard(left)  # the store ends with this process: it is the last
        leave(code)


def _connected_to_first(rendezvous: Rendezvous) -> Connection:
    store, seconds = rendezvous.connect(), rendezvous.timeout_seconds
    try:
        store.wait(["lifeline"], timedelta(seconds=seconds))
        port, token = json.loads(store.get("lifeline"))
        connected = socket.create_connection((rendezvous.host, port), seconds)
    except (RuntimeError, OSError) as error:
        raise OwnMistakeError(
            f"rank {rendezvous.rank} does not reach rank 0 at {rendezvous.host} ({cause(error)}): has it been started,"
            " and are the ports of its host open between the hosts?"
        ) from error
    connection = Connection(probed(connected))
    connection.send(rendezvous.rank, token)
    return connection


def _greeted(connected: socket.socket, token: str, missing: Container[int]) -> tuple[int, Connection] | None:
    """The rank that has connected; None where it is none of those that are still missing."""
    connected.settimeout(SECONDS_TO_GREET)
    connection = Connection(connected)
    with suppress(ValueError, TypeError, RecursionError):
        words: list[Word] | None = []
        for _ in range(PIECES):
            words = words or connection.receive()
        ((rank, told),) = words or []
        if rank in missing and secrets.compare_digest(str(told), token):
            probed(connected)
            return rank, connection
    connection.close()
    return None
