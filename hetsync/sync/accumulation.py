"""K by rule, in delayed mode: rounds become fewer where they keep devices from computing.

Ranks tell with each task how long synchronisation has kept them from computing: by its own work, and by waits
(`TaskFinished`). Twice the K is half of the work, and lets a rank run twice as many slices ahead, so that it need not
wait for a slow link. But local weights then part further between two rounds, which costs progress a sample, the more so
at a high learning rate: so a doubling must promise more than it costs, and K stays small (docs/results/rounds.md).

Pure: no clock, and the simulator runs the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

MOST = 4  # K = 8 at a rate that suits a batch ended at chance
RAISE_AT = 0.2  # of a slice, saved by K = 2; 4 must save twice that
KEPT = 0.5  # of what a doubling promised, or it is taken back
RETRY_WINDOWS = 32  # before it is tried again; four times as many after each refusal
LOWER_AT = 0.25  # of the bound above: where K would not be raised again at once
CALM_WINDOWS = 8  # in a row before K is lowered; four times as many after each raise, so that it does not swing
WINDOW_ROUNDS = 4
WINDOW_TASKS = 10  # of each rank
WINDOW_SECONDS = 1.0  # of each rank's device: less shows the moment more than the job


@dataclass(frozen=True)
class AccumulationChange:
    """K from `round` on, and why: synchronisation's own work and waits, over the devices' computing."""

    round: int
    accumulation: int
    work: float
    waits: float
    reason: str


@dataclass
class Window:
    """Of one rank: sums over its tasks."""

    tasks: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def full(self) -> bool:
        return self.tasks >= WINDOW_TASKS and self.seconds >= WINDOW_SECONDS


class AccumulationRule:
    """Call `observe` with full tasks of the K in force, and `decide` as often as you like."""

    def __init__(self, version: int = 0) -> None:
        self._window_ends = version + WINDOW_ROUNDS
        self._windows: defaultdict[int, Window] = defaultdict(Window)
        self._most = MOST
        self._retry_in = 0  # windows, where a doubling has been refused
        self._retry_after = RETRY_WINDOWS
        self._promised: float | None = None  # the overhead that a raise should bring, until a window has shown it
        self._calm = 0  # windows in a row that would bear a lower K
        self._calm_needed = CALM_WINDOWS

    def observe(self, rank: int, seconds: float, work_seconds: float, wait_seconds: float) -> None:
        """A task took so much of its device's time, and synchronisation beside it."""
        window = self._windows[rank]
        window.tasks += 1
        window.seconds += seconds
        window.work_seconds += work_seconds
        window.wait_seconds += wait_seconds

    def restart(self, version: int) -> None:
        """Shares have changed: what was seen before is of no use."""
        self._windows.clear()
        self._window_ends = version + WINDOW_ROUNDS

    def decide(self, accumulation: int, version: int, shares: Mapping[int, int]) -> AccumulationChange | None:
        """Another K, once a window is over, if there is reason for it. `shares` of the ranks at work."""
        if not shares or version < self._window_ends or not all(self._windows[rank].full for rank in shares):
            return None
        # Means over ranks, by their parts of a batch.
        parts = {rank: share / sum(shares.values()) / self._windows[rank].seconds for rank, share in shares.items()}
        work = sum(part * self._windows[rank].work_seconds for rank, part in parts.items())
        waits = sum(part * self._windows[rank].wait_seconds for rank, part in parts.items())
        self.restart(version)
        chosen, besides = self._choose(accumulation, work, waits)
        if chosen == accumulation:
            return None
        reason = f"rounds take {work:.0%} of a slice, and waits {waits:.0%}{besides}: K = {chosen}"
        return AccumulationChange(version, chosen, work, waits, reason)

    def _choose(self, accumulation: int, work: float, waits: float) -> tuple[int, str]:
        """K, and what else is to be said of it."""
        half, saving = max(1, accumulation // 2), work / 2 + waits
        promised, self._promised = self._promised, None
        if promised is not None and work + waits > promised:
            self._most, self._retry_in = half, self._retry_after
            self._retry_after *= 4
            return half, ", so fewer of them save too little"
        self._retry_in -= 1
        if self._retry_in == 0:
            self._most = MOST
        if 2 * accumulation <= self._most and saving > RAISE_AT * accumulation:
            self._promised = work + waits - KEPT * saving
            self._calm, self._calm_needed = 0, 4 * self._calm_needed
            return 2 * accumulation, ""
        self._calm = self._calm + 1 if work + waits < LOWER_AT * RAISE_AT * half else 0
        if accumulation > 1 and self._calm >= self._calm_needed:
            self._calm = 0
            return half, ""
        return accumulation, ""
