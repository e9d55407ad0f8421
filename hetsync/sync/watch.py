"""Nobody waits without a bound: who is late is asked, and named."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hetsync.plane.base import Plane
from hetsync.sync.messages import Alive, Probe
from hetsync.sync.policy import Policy

PROBE_SECONDS = 2.0  # to answer a probe


class StalledError(RuntimeError):
    """Nothing moved for longer than the limit; the message names who was waited for."""


class Watch:
    """One rank's clock over its communication thread. Rank 0 (which has a policy) finds out who is late."""

    def __init__(self, plane: Plane, policy: Policy | None, timeout_seconds: float) -> None:
        self._plane = plane
        self._policy = policy
        # Rank 0 knows most about who is late, so the others leave it time to say so.
        self._limit_seconds = timeout_seconds if policy is not None else 1.5 * timeout_seconds + PROBE_SECONDS
        self._moved_at = time.monotonic()
        self._probed_at: float | None = None
        self._signs: dict[int, Alive] = {}

    def moved(self) -> None:
        """Something happened, or nothing need happen now."""
        self._moved_at, self._probed_at = time.monotonic(), None

    def answer(self, letter: Probe | Alive, sign: Alive) -> None:
        """Rank 0 asks for signs of life, the others give theirs."""
        if isinstance(letter, Alive):
            self._signs[letter.rank] = letter
        else:
            self.moved()  # rank 0 lives
            self._plane.send(sign, 0)

    def check(self, sign: Alive) -> None:
        """Nothing happened this time. Raises StalledError when that has lasted too long."""
        now = time.monotonic()
        if now < self._moved_at + self._limit_seconds:
            return
        if self._policy is None:
            if sign.waiting:
                raise StalledError(f"no word from rank 0 for {self._limit_seconds:.0f} s")
        elif self._probed_at is None:
            self._probed_at, self._signs = now, {0: sign}
            for rank in range(1, self._plane.size):
                self._plane.send(Probe(), rank)
        elif now > self._probed_at + PROBE_SECONDS:
            raise StalledError(self._story(self._policy))

    def _story(self, policy: Policy) -> str:
        silent = [rank for rank in range(self._plane.size) if rank not in self._signs]
        last = max(sign.joined for sign in self._signs.values())
        late = [rank for rank, sign in sorted(self._signs.items()) if sign.joined < last]
        computing = [rank for rank, sign in sorted(self._signs.items()) if not sign.waiting]
        story = f"nothing moved for {self._limit_seconds:.0f} s in round {policy.version}"
        if silent:
            story += f"; no sign of life from rank {_listed(silent)}"
        if late:
            story += f"; rank {_listed(late)} has not joined it"
        if computing:
            story += f"; still on its piece or its evaluation: rank {_listed(computing)}"
        return story + " (raise run.timeout_seconds if the work takes that long)"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
