"""Where newcomers knock that are to take the place of a rank that has gone."""

from __future__ import annotations

import secrets
import selectors
from contextlib import suppress

from hetsync.plane.connections import PIECES, Connection, listening, probed

MOST_SILENT_VISITORS = 16


class Visitor:
    """Who has connected at the door; `rank` is the number that it wants, once it has said the token."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.pieces = 0


class Door:
    """Where newcomers knock, watched by the hub's selector. Strangers wait there for nothing, and hold up nobody."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._server = listening()
        self.port: int = self._server.getsockname()[1]
        self.visitors: list[Visitor] = []
        self._tokens: dict[int, str] = {}
        self._selector = selector
        selector.register(self._server, selectors.EVENT_READ, None)

    def new_token(self, newcomer: int) -> str:
        self._tokens[newcomer] = secrets.token_hex()
        return self._tokens[newcomer]

    def receive_visitor(self) -> None:
        with suppress(OSError):
            connected = self._server.accept()[0]
            visitor = Visitor(Connection(probed(connected)))
            self.visitors.append(visitor)
            self._selector.register(connected, selectors.EVENT_READ, visitor)
            silent = [each for each in self.visitors if each.rank is None]
            if len(silent) > MOST_SILENT_VISITORS:
                self._send_away(silent[0])

    def hear(self, visitor: Visitor) -> int | None:
        """What somebody says who has knocked: the rank's number, once. Whoever says anything else has to go."""
        with suppress(ValueError, TypeError, RecursionError):
            words = visitor.connection.receive()
            visitor.pieces += 1
            if words == [] and visitor.rank is None and visitor.pieces < PIECES:
                return None
            ((rank, told),) = words or []
            token = self._tokens.get(rank) if visitor.rank is None and type(rank) is int else None
            if token is not None and secrets.compare_digest(str(told), token):
                visitor.rank = rank
                return int(rank)
        self._send_away(visitor)
        return None

    def has(self, rank: int) -> bool:
        return any(visitor.rank == rank for visitor in self.visitors)

    def hand_over(self, rank: int) -> Connection:
        """It is a member from now on."""
        visitor = next(each for each in self.visitors if each.rank == rank)
        self.visitors.remove(visitor)
        self._selector.modify(visitor.connection.socket, selectors.EVENT_READ, rank)
        return visitor.connection

    def send_away(self, newcomer: int) -> None:
        for visitor in [each for each in self.visitors if each.rank == newcomer]:
            self._send_away(visitor)

    def close(self) -> None:
        self._selector.unregister(self._server)
        self._server.close()
        for visitor in list(self.visitors):
            self._send_away(visitor)

    def _send_away(self, visitor: Visitor) -> None:
        self.visitors.remove(visitor)
        self._selector.unregister(visitor.connection.socket)
        visitor.connection.close()
