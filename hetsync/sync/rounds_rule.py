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

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hetsync.config.schema import SyncConfig
from hetsync.sync.messages import Settings, settings_of

GREATER_QUORUM = 0.5
SAVED_BY_QUORUM = 0.44  # of rounds and their work, by the greater quorum
QUORUM_COSTS = 0.03  # of the time to a target
RULED_GRACE = 1
SAVED_BY_GRACE = 0.3  # of rounds and their work, beside the greater quorum
GRACE_COSTS = 0.02  # a judgement: none on average, up to 0.07 beside the quorum's (docs/results/rounds.md)
GRACE_COSTS_FRAGMENTED = 0.06  # beside two fragments (docs/results/fragments.md)
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


class Step(NamedTuple):
    """One key of the settings, from a value to a greater one: the parts of work and of waits that it saves, and how
    much of a slice it must save."""

    key: str
    before: Any
    value: Any
    work_saved: float
    waits_saved: float
    costs: float

    def is_taken(self, settings: Settings) -> bool:
        return bool(getattr(settings, self.key) >= self.value)

    def is_next(self, settings: Settings) -> bool:
        return bool(self.before <= getattr(settings, self.key) < self.value)

    def taken(self, settings: Settings) -> Settings:
        return replace(settings, **{self.key: self.value})

    def taken_back(self, settings: Settings) -> Settings:
        return replace(settings, **{self.key: self.before})

    def saving(self, work: float, waits: float) -> float:
        return self.work_saved * work + self.waits_saved * waits


def steps_of(sync: SyncConfig) -> tuple[Step, ...]:
    """What a rule may do, in the order in which it tries it."""
    first, steps = settings_of(sync), []
    if sync.quorum == "auto" and not first.grace_within_bound:
        steps.append(Step("quorum", first.quorum, GREATER_QUORUM, SAVED_BY_QUORUM, 0.0, QUORUM_COSTS))
    # With a greater quorum than that rounds are as few.
    if sync.grace == "auto" and first.quorum <= GREATER_QUORUM and replace(first, grace=RULED_GRACE).grace_within_bound:
        costs = GRACE_COSTS if first.fragments == 1 else GRACE_COSTS_FRAGMENTED
        steps.append(Step("grace", 0, RULED_GRACE, SAVED_BY_GRACE, 0.0, costs))
    if sync.fragments == "auto":
        steps.append(Step("fragments", first.fragments, sync.most_fragments, SAVED_BY_FRAGMENTS, 1.0, FRAGMENTS_COSTS))
    accumulation = first.accumulation
    while sync.accumulation == "auto" and accumulation < MOST_ACCUMULATION:
        steps.append(Step("accumulation", accumulation, 2 * accumulation, 0.5, 1.0, DOUBLING_COSTS * accumulation))
        accumulation *= 2
    return tuple(steps)


def called(settings: Settings) -> str:
    grace = f", grace {settings.grace}" if settings.grace else ""
    fragments = f", {settings.fragments} fragments" if settings.fragments > 1 else ""
    return f"K = {settings.accumulation}, q = {settings.quorum:g}{grace}{fragments}"


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


@dataclass
class Refusal:
    """Of a step that has saved too little: after so many windows it is tried again, and after more the next time."""

    retry_in: int = 0
    retry_after: int = RETRY_WINDOWS

    def renew(self) -> None:
        self.retry_in, self.retry_after = self.retry_after, 4 * self.retry_after


class RoundsRule:
    """Call `observe` with full tasks of the settings in force, and `decide` as often as you like."""

    def __init__(self, steps: Sequence[Step], version: int = 0) -> None:
        self._steps = steps
        self._window_ends = version + WINDOW_ROUNDS
        self._windows: defaultdict[int, Window] = defaultdict(Window)
        self._settling: defaultdict[int, int] = defaultdict(lambda: SETTLING_TASKS)  # tasks of each rank
        self._refusals: defaultdict[Step, Refusal] = defaultdict(Refusal)
        self._promised: tuple[Step, float] | None = None  # a step, and the overhead that the next window should show
        self._calm = 0  # windows in a row that would bear more rounds
        self._times_taken: Counter[Step] = Counter()

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
        new, besides = self._choose(settings, work, waits)
        if new == settings:
            return None
        self._settle(version)
        reason = f"rounds take {work:.0%} of a slice, and waits {waits:.0%}{besides}: {called(new)}"
        return RoundsChange(version, new.accumulation, new.quorum, work, waits, reason, new.fragments, new.grace)

    def _choose(self, settings: Settings, work: float, waits: float) -> tuple[Settings, str]:
        """Settings, and what else is to be said of them."""
        promised, self._promised = self._promised, None
        if promised is not None and work + waits > promised[1]:
            step, _ = promised
            self._refusals[step].renew()
            self._times_taken[step] -= 1
            back = step.taken_back(settings) if step.is_taken(settings) else settings
            return back, ", so fewer or smaller ones save too little"
        for refusal in self._refusals.values():
            refusal.retry_in -= 1
        for step in self._steps:
            if step.key == "quorum" and settings.grace_within_bound:
                continue  # rounds wait for more than that
            saving = step.saving(work, waits)
            if step.is_next(settings) and saving > step.costs and self._refusals[step].retry_in <= 0:
                self._promised = step, work + waits - KEPT * saving
                self._calm = 0
                self._times_taken[step] += 1
                return step.taken(settings), ""
        return self._calmed(settings, work + waits), ""

    def _calmed(self, settings: Settings, overhead: float) -> Settings:
        """One step back, where it has long been of little use."""
        newest = next((step for step in reversed(self._steps) if step.is_taken(settings)), None)
        if newest is None or overhead >= LOWER_AT * newest.costs / newest.work_saved / 2:  # about half is left of that
            self._calm = 0
            return settings
        self._calm += 1
        if self._calm < CALM_WINDOWS * 4 ** self._times_taken[newest]:
            return settings
        self._calm = 0
        return newest.taken_back(settings)


def rule_for(sync: SyncConfig, version: int = 0) -> RoundsRule | None:
    """None where the recipe leaves it nothing to set."""
    steps = steps_of(sync)
    return RoundsRule(steps, version) if steps else None


def found_before(sync: SyncConfig, settings: Settings) -> Settings:
    """What a job goes on with whose rule had come to these."""
    found = settings_of(sync)
    for step in steps_of(sync):
        if step.is_taken(settings):
            found = step.taken(found)
    return found
