"""What synchronisation takes of a rank's main thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spent:
    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self.cpu_seconds = 0.0  # on copies and books

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for other ranks."""
        began = time.monotonic()
        yield
        self.wait_seconds += time.monotonic() - began

    @contextmanager
    def working(self) -> Iterator[None]:
        """The block copies, or keeps books."""
        began = time.thread_time()
        yield
        self.cpu_seconds += time.thread_time() - began
