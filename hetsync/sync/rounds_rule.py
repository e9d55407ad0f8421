"""Fewer and smaller rounds by rule, in delayed mode, where they keep devices from computing.

Ranks tell with each task how long synchronisation has kept them from computing: by its own work, and by waits
(`TaskFinished`). Three things make them less. A greater quorum q, of half a full set, lets a round wait for more
contributions: about two rounds in place of four, with steps and contributions as before. Twice the fragments of a large
model halve what a round sums, and so the time that the link takes for it. Twice the K is half of the work, and lets a
rank run twice as many slices ahead, so that it need not wait for a slow link. All part local weights further between
two rounds, which costs progress a sample, K most, and the more so at a high learning rate: so a step must promise more
than it costs (docs/results/rounds.md, fragments.md).

Pure: no clock, and the simulator runs the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import NamedTuple

from hetsync.config.schema import SyncConfig
from hetsync.sync.messages import Settings, settings_of

GREATER_QUORUM = 0.5
SAVED_BY_QUORUM = 0.44  # of rounds and their work, by the greater quorum
QUORUM_COSTS = 0.03  # of the time to a target
SAVED_BY_FRAGMENTS = 0.25  # of work, by twice as many: the copies of a round's sum, but not those of a finished task
FRAGMENTS_COSTS = 0.08  # 0.05 of the time to a target, by four in place of two, and the quorum's
MOST_ACCUMULATION = 4  # K = 8 at a rate that suits a batch ended at chance
DOUBLING_COSTS = 0.2  # of a slice, by K = 2; 4 must save twice that
KEPT = 0.5  # of what a step promised, or it is taken back
RETRY_WINDOWS = 32  # before it is tried again; four times as many after each refusal
LOWER_AT = 0.25  # of what raised it: where it would not be raised again at once
CALM_WINDOWS = 8  # in a row before rounds become more; four times as many after each raise, so that it does not swing
SETTLING_TASKS = 4  # of each rank, after the start or a change: rounds have yet to come to their number
WINDOW_ROUNDS = 4
WINDOW_TASKS = 10  # of each rank
WINDOW_SECONDS = 1.0  # of each rank's device: less shows the moment more than the job


@dataclass(frozen=True)
class RoundsChange:
    """K, q and fragments from `round` on, and why: synchronisation's own work and waits, over what devices compute."""

    round: int
    accumulation: int
    quorum: float
    work: float
    waits: float
    reason: str
    fragments: int = 1

    def applied_to(self, settings: Settings) -> Settings:
        return replace(settings, accumulation=self.accumulation, quorum=self.quorum, fragments=self.fragments)


class Rung(NamedTuple):
    """K, q and fragments, and the step to them from the rung before: the parts of work and of waits that it saves, and
    how much of a slice it must save."""

    accumulation: int
    quorum: float
    fragments: int
    work_saved: float = 0.0
    waits_saved: float = 0.0
    costs: float = 0.0

    @property
    def called(self) -> str:
        called = f"K = {self.accumulation}, q = {self.quorum:g}"
        return called if self.fragments == 1 else f"{called}, {self.fragments} fragments"

    def saving(self, work: float, waits: float) -> float:
        return self.work_saved * work + self.waits_saved * waits


def ladder(sync: SyncConfig) -> tuple[Rung, ...]:
    """From the most and largest rounds to the fewest and smallest that a rule may come to."""
    k, q, fragments = sync.first_accumulation, sync.first_quorum, sync.first_fragments
    rungs = [Rung(k, q, fragments)]
    if sync.quorum == "auto":
        q = GREATER_QUORUM
        rungs.append(Rung(k, q, fragments, SAVED_BY_QUORUM, 0.0, QUORUM_COSTS))
    if sync.fragments == "auto":
        fragments = sync.most_fragments
        rungs.append(Rung(k, q, fragments, SAVED_BY_FRAGMENTS, 1.0, FRAGMENTS_COSTS))
    while sync.accumulation == "auto" and k < MOST_ACCUMULATION:
        rungs.append(Rung(2 * k, q, fragments, 0.5, 1.0, DOUBLING_COSTS * k))
        k *= 2
    return tuple(rungs)


def rung_of(rungs: Sequence[Rung], settings: Settings) -> int:
    """Where settings are: at the last rung whose K, q and fragments they have, or more."""
    has = settings.accumulation, settings.quorum, settings.fragments
    wanted = [(rung.accumulation, rung.quorum, rung.fragments) for rung in rungs]
    held = [number for number, of in enumerate(wanted) if all(map(le, of, has))]
    return max(held, default=0)


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


class RoundsRule:
    """Call `observe` with full tasks of the settings in force, and `decide` as often as you like."""

    def __init__(self, rungs: Sequence[Rung], version: int = 0) -> None:
        self._rungs = rungs
        self._window_ends = version + WINDOW_ROUNDS
        self._windows: defaultdict[int, Window] = defaultdict(Window)
        self._settling: defaultdict[int, int] = defaultdict(lambda: SETTLING_TASKS)  # tasks of each rank
        self._most = len(rungs) - 1
        self._refused: int | None = None  # a rung that has only more fragments than that before
        self._retry_in = 0  # windows, where a step has been refused
        self._retry_after = RETRY_WINDOWS
        self._promised: float | None = None  # the overhead that a step should bring, until a window has shown it
        self._came_from = 0  # the rung before that step
        self._calm = 0  # windows in a row that would bear more rounds
        self._calm_needed = CALM_WINDOWS

    def observe(self, rank: int, seconds: float, work_seconds: float, wait_seconds: float) -> None:
        """A task took so much of its device's time, and synchronisation beside it."""
        if self._settling[rank]:
            self._settling[rank] -= 1
            return
        window = self._windows[rank]
        window.tasks += 1
        window.seconds += seconds
        window.work_seconds += work_seconds
        window.wait_seconds += wait_seconds

    def restart(self, version: int) -> None:
        """Ranks have changed: what was seen before is of no use, nor what was promised."""
        self.forget_promise()
        self._settle(version)

    def forget_promise(self) -> None:
        """Shares have changed: what follows does not tell the last step's effect alone. What rounds take of a slice has
        hardly changed: shares that are often moved would keep a window that began anew from ever being full."""
        self._promised = None

    def _settle(self, version: int) -> None:
        self._settling.clear()
        self._begin_window(version)

    def _begin_window(self, version: int) -> None:
        self._windows.clear()
        self._window_ends = version + WINDOW_ROUNDS

    def decide(self, settings: Settings, version: int, shares: Mapping[int, int]) -> RoundsChange | None:
        """Other settings, once a window is over, if there is reason for them. `shares` of the ranks at work."""
        if version < self._window_ends or not shares or not all(self._windows[rank].full for rank in shares):
            return None
        # Means over ranks, by their parts of a batch.
        parts = {rank: share / sum(shares.values()) / self._windows[rank].seconds for rank, share in shares.items()}
        work = sum(part * self._windows[rank].work_seconds for rank, part in parts.items())
        waits = sum(part * self._windows[rank].wait_seconds for rank, part in parts.items())
        self._begin_window(version)
        at = rung_of(self._rungs, settings)
        chosen, besides = self._choose(at, work, waits)
        if chosen == at:
            return None
        self._settle(version)
        rung = self._rungs[chosen]
        reason = f"rounds take {work:.0%} of a slice, and waits {waits:.0%}{besides}: {rung.called}"
        return RoundsChange(version, rung.accumulation, rung.quorum, work, waits, reason, rung.fragments)

    def _choose(self, at: int, work: float, waits: float) -> tuple[int, str]:
        """A rung, and what else is to be said of it."""
        promised, self._promised = self._promised, None
        if promised is not None and work + waits > promised:
            back = min(at, self._came_from)
            if self._has_only_more_fragments(at):  # which are no reason against fewer rounds
                self._refused = at
            else:
                self._most = max(back, at - 1)
            self._retry_in = self._retry_after
            self._retry_after *= 4
            return back, ", so fewer or smaller ones save too little"
        self._retry_in -= 1
        if self._retry_in == 0:
            self._most, self._refused = len(self._rungs) - 1, None
        for number in range(at + 1, self._most + 1):
            if number == self._refused:
                continue
            rung = self._rungs[number]
            if (saving := rung.saving(work, waits)) > rung.costs:
                self._promised, self._came_from = work + waits - KEPT * saving, at
                self._calm, self._calm_needed = 0, 4 * self._calm_needed
                return number, ""
        self._calm = self._calm + 1 if at and self._would_not_come_back(at, work, waits) else 0
        if at and self._calm >= self._calm_needed:
            self._calm = 0
            return at - 1, ""
        return at, ""

    def _has_only_more_fragments(self, at: int) -> bool:
        rung, before = self._rungs[at], self._rungs[at - 1]
        return rung.fragments > before.fragments and rung.accumulation == before.accumulation

    def _would_not_come_back(self, at: int, work: float, waits: float) -> bool:
        raised_at = self._rungs[at].costs / self._rungs[at].work_saved  # of which about half is left now
        return work + waits < LOWER_AT * raised_at / 2


def rule_for(sync: SyncConfig, version: int = 0) -> RoundsRule | None:
    """None where the recipe leaves it nothing to set."""
    rungs = ladder(sync)
    return RoundsRule(rungs, version) if len(rungs) > 1 else None


def found_before(sync: SyncConfig, settings: Settings) -> Settings:
    """What a job goes on with whose rule had come to these."""
    rungs = ladder(sync)
    # A checkpoint may be of before there were fragments, or of another number of them.
    rung = rungs[rung_of(rungs, replace(settings, fragments=max(settings.fragments, sync.first_fragments)))]
    return replace(settings_of(sync), accumulation=rung.accumulation, quorum=rung.quorum, fragments=rung.fragments)
