"""The last events, to be told when one comes that cannot be."""

from __future__ import annotations

from collections import deque

from hetsync.sync.messages import Event

KEPT = 40


class ProtocolError(AssertionError):
    """An event that cannot happen in this state: an internal error, with the story so far."""


class Story:
    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)

    def goes_on(self, event: Event) -> None:
        self._events.append(event)

    def error(self, what: str, version: int) -> ProtocolError:
        """`what` is wrong after `version` rounds."""
        events = "\n  ".join(map(str, self._events))
        return ProtocolError(f"{what}; version {version}; events so far:\n  {events}")
