"""Nobody waits without a bound: who is late is asked, and named."""

from __future__ import annotations

import time
from collections.abc import Callable

from hetsync.plane.base import Plane, StalledError, named, wait_limit
from hetsync.sync.messages import Alive, Probe

PROBE_SECONDS = 2.0  # to answer a probe


class Watchdog:
    """The clock over one rank's communication thread. Rank 0 finds out who is late."""

    def __init__(self, plane: Plane, version: Callable[[], int] | None, timeout_seconds: float) -> None:
        """`version`, where the coordinator is: the number of rounds that are complete there."""
        self._plane = plane
        self._version = version
        self._limit_seconds = wait_limit(plane.rank, timeout_seconds) + (0 if version is not None else PROBE_SECONDS)
        self._moved_at = time.monotonic()
        self._probed_at: float | None = None
        self._signs: dict[int, Alive] = {}

    def moved(self) -> None:
        """Something happened, or nothing need happen now."""
        self._moved_at, self._probed_at = time.monotonic(), None

    def answer(self, message: Probe | Alive, sign: Alive) -> None:
        """Rank 0 asks for signs of life, the others give theirs."""
        if isinstance(message, Alive):
            self._signs[message.rank] = message
        else:
            self.moved()  # rank 0 lives
            self._plane.send(sign, self._plane.members[0])

    def check(self, sign: Alive) -> None:
        """Nothing happened this time. Raises StalledError when that has lasted too long."""
        now = time.monotonic()
        if now < self._moved_at + self._limit_seconds:
            return
        if self._version is None:
            if sign.waiting:
                raise StalledError(f"no word from {named(self._plane.members[:1])} for {self._limit_seconds:.0f} s")
        elif self._probed_at is None:
            self._probed_at, self._signs = now, {self._plane.rank: sign}
            for rank in self._plane.members[1:]:
                self._plane.send(Probe(), rank)
        elif now > self._probed_at + PROBE_SECONDS:
            raise StalledError(self._report(self._version()))

    def _report(self, version: int) -> str:
        silent = [rank for rank in self._plane.members if rank not in self._signs]
        last = max(sign.joined for sign in self._signs.values())
        late = [rank for rank, sign in sorted(self._signs.items()) if sign.joined < last]
        computing = [rank for rank, sign in sorted(self._signs.items()) if not sign.waiting]
        report = f"nothing moved for {self._limit_seconds:.0f} s in round {version}"
        if silent:
            report += f"; no sign of life from {named(silent)}"
        if late:
            report += f"; {named(late)} has not joined it"
        if computing:
            report += f"; still on its task or its evaluation: {named(computing)}"
        return report + " (raise run.timeout_seconds if the work takes that long)"
