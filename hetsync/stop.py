"""SIGUSR1 asks a job to save and stop. It may come at any time, also before there is a job to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class StopSignal:
    """Catches the signal from its making on; rank 0 listens, the other ranks just survive it."""

    def __init__(self) -> None:
        self._caught = False
        self._listener: Callable[[], None] | None = None
        signal.signal(signal.SIGUSR1, self._catch)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call the listener at the signal, and at once if it has come already."""
        self._listener = listener
        if self._caught:
            listener()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = True
        if self._listener is not None:
            self._listener()
