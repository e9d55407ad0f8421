"""Fewer and smaller rounds by rule, in delayed mode, where they keep devices from computing.

Ranks tell with each task how long synchronisation has kept them from computing: by its own work, and by waits
(`TaskFinished`). Four things make them less. A greater quorum q, of half a full set, lets a round wait for more
contributions: about two rounds in place of four, with steps and contributions as before. Grace lets it wait for all, or
until a rank has finished a second task: about one. Twice the fragments of a large
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
from typing import NamedTuple

from hetsync.config.schema import SyncConfig
from hetsync.sync.messages import Settings, settings_of

GREATER_QUORUM = 0.5
SAVED_BY_QUORUM = 0.44  # of rounds and their work, by the greater quorum
QUORUM_COSTS = 0.03  # of the time to a target
RULED_GRACE = 1
SAVED_BY_GRACE = 0.3  # of rounds and their work, beside the greater quorum
GRACE_COSTS = 0.02
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
    """K, q, grace and fragments from `round` on, and why: synchronisation's own work and waits, over what devices
    compute."""

    round: int
    accumulation: int
    quorum: float
    work: float
    waits: float
    reason: str
    fragments: int = 1
    grace: int = 0

    def applied_to(self, settings: Settings) -> Settings:
        return replace(
            settings,
            accumulation=self.accumulation,
            quorum=self.quorum,
            fragments=self.fragments,
            grace=self.grace,
        )


class Rung(NamedTuple):
    """Settings of which K, q, grace and fragments count, and the step to them from the rung before: what it `raises`,
    the parts of work and of waits that it saves, and how much of a slice it must save."""

    settings: Settings
    raises: str = ""
    work_saved: float = 0.0
    waits_saved: float = 0.0
    costs: float = 0.0

    def saving(self, work: float, waits: float) -> float:
        return self.work_saved * work + self.waits_saved * waits


def called(settings: Settings) -> str:
    grace = f", grace {settings.grace}" if settings.grace else ""
    fragments = f", {settings.fragments} fragments" if settings.fragments > 1 else ""
    return f"K = {settings.accumulation}, q = {settings.quorum:g}{grace}{fragments}"


def ladder(sync: SyncConfig) -> tuple[Rung, ...]:
    """From the most and largest rounds to the fewest and smallest that a rule may come to."""
    now = settings_of(sync)
    rungs = [Rung(now)]
    if sync.quorum == "auto":
        now = replace(now, quorum=GREATER_QUORUM)
        rungs.append(Rung(now, "quorum", SAVED_BY_QUORUM, 0.0, QUORUM_COSTS))
    graceful = replace(now, grace=RULED_GRACE)
    if sync.grace == "auto" and now.quorum < 1 and graceful.grace_within_bound:
        now = graceful
        rungs.append(Rung(now, "grace", SAVED_BY_GRACE, 0.0, GRACE_COSTS))
    if sync.fragments == "auto":
        now = replace(now, fragments=sync.most_fragments)
        rungs.append(Rung(now, "fragments", SAVED_BY_FRAGMENTS, 1.0, FRAGMENTS_COSTS))
    while sync.accumulation == "auto" and now.accumulation < MOST_ACCUMULATION:
        costs = DOUBLING_COSTS * now.accumulation
        now = replace(now, accumulation=2 * now.accumulation)
        rungs.append(Rung(now, "accumulation", 0.5, 1.0, costs))
    return tuple(rungs)


def rung_of(rungs: Sequence[Rung], settings: Settings) -> int:
    """Where settings are: at the last rung that has raised something to what they have, or less."""
    held = (
        number
        for number, (of_rung, raised, *_) in enumerate(rungs)
        if raised and getattr(settings, raised) >= getattr(of_rung, raised)
    )
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
        self._refused: set[int] = set()  # rungs with the K of that before
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
        new = self._rungs[chosen].settings
        reason = f"rounds take {work:.0%} of a slice, and waits {waits:.0%}{besides}: {called(new)}"
        return RoundsChange(version, new.accumulation, new.quorum, work, waits, reason, new.fragments, new.grace)

    def _choose(self, at: int, work: float, waits: float) -> tuple[int, str]:
        """A rung, and what else is to be said of it."""
        promised, self._promised = self._promised, None
        if promised is not None and work + waits > promised:
            back = min(at, self._came_from)
            if self._rungs[at].raises != "accumulation":  # which is no reason against a greater one
                self._refused.add(at)
            else:
                self._most = max(back, at - 1)
            if self._retry_in <= 0:
                self._retry_in = self._retry_after
                self._retry_after *= 4
            return back, ", so fewer or smaller ones save too little"
        self._retry_in -= 1
        if self._retry_in == 0:
            self._most = len(self._rungs) - 1
            self._refused.clear()
        for number in range(at + 1, self._most + 1):
            if number in self._refused:
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
    return rungs[rung_of(rungs, settings)].settings
