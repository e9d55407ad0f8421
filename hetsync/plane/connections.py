"""Words between ranks over TCP, beside what the planes' libraries carry.

A process's death closes its connections, and a host that has vanished is noticed by TCP's own probes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PIECES = 8  # at most, that a greeting comes in
# TCP probes a connection that is silent for so long, and so often: a host that answers none has gone.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 20, 10, 4
SILENCE_SECONDS = IDLE_SECONDS + PROBES * PROBE_SECONDS

Word = list[Any]  # its kind, and what belongs to it


class Connection:
    """Words over a socket, each a line of JSON."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._rest = b""
        # Or a child that loads data would keep the connection of its dead parent alive.
        os.register_at_fork(after_in_child=_close_in_child(weakref.ref(self)))

    def send(self, *word: Any) -> bool:
        """False where the other has gone."""
        try:
            self.socket.sendall(json.dumps(word).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Word] | None:
        """Sleeps until something has come; None where the other has gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes a thread that waits in `receive`
        self.socket.close()


def _close_in_child(connection: weakref.ref[Connection]) -> Callable[[], None]:
    def close() -> None:
        if (held := connection()) is not None:
            held.socket.close()

    return close


def listening() -> socket.socket:
    """At a free port of every interface, as libraries of sums do."""
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def probed(connected: socket.socket) -> socket.socket:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # Probes rest while a word has not been acknowledged: then this holds, in place of a quarter of an hour.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)
    return connected
