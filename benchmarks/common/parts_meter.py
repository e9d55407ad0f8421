"""CPU seconds of methods, by purpose."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Parts = Mapping[str, Sequence[tuple[type, str]]]  # by purpose, methods of classes


class PartsMeter:
    """A part that runs within another counts for its own purpose only.

    `seconds`: by purpose, of all threads. `of_main`: of these, the main thread's.
    """

    def __init__(self, parts: Parts) -> None:
        """The methods are timed from now on."""
        self.seconds: Counter[str] = Counter()
        self.of_main: Counter[str] = Counter()
        self._threads = threading.local()
        self._lock = threading.Lock()
        for purpose, methods in parts.items():
            for owner, name in methods:
                setattr(owner, name, self._timed(getattr(owner, name), purpose))

    def _timed(self, method: Any, purpose: str) -> Any:
        @functools.wraps(method)
        def timed(*words: Any, **named: Any) -> Any:
            outer, self._threads.inner = getattr(self._threads, "inner", 0.0), 0.0
            began = time.thread_time()
            try:
                return method(*words, **named)
            finally:
                spent = time.thread_time() - began
                self._add(purpose, spent - self._threads.inner)
                self._threads.inner = outer + spent

        return timed

    def _add(self, purpose: str, seconds: float) -> None:
        with self._lock:
            self.seconds[purpose] += seconds
            if threading.current_thread() is threading.main_thread():
                self.of_main[purpose] += seconds
