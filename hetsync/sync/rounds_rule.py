"""Delay, and fewer and smaller rounds, by rule: where synchronisation keeps devices from computing.

Ranks tell with each task how long it has kept them: by its own work, and by waits (`TaskFinished`). Where the delay
bound is by rule a job begins synchronous, unless a sum is seen to take slices before the first round. Where ranks wait
there for longer than delay costs, they go on without. Then nobody sees any more what they would wait for: so the rule
looks back, for a window of synchronous training, ever more seldom. In delayed mode five things make synchronisation
less. A greater quorum q, of half a full set, lets a round wait for more contributions: about two rounds in place of
four, with steps and contributions as before. Grace lets it wait for all, or until a rank has finished a second task:
about one. A coarser wire makes what a round sends a quarter, or a 124th, twice the fragments of a large model half, and
so the time that the link takes for it. Twice the K is half of the work, and lets a rank run twice as many slices ahead,
so that it need not wait for a slow link. All but the wire part local weights further between two rounds, which costs
progress a sample, K most, and the more so at a high learning rate: so a rise must promise more than it costs
(docs/results/rounds.md, fragments.md, wires.md).

Pure: no clock, and the simulator runs the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from hetsync.config.schema import RULED_DELAY_BOUND, SyncConfig, WireFormat, most_grace
from hetsync.sync.messages import NO_BOUND, Settings, settings_of

RULED = ("delay_bound", "accumulation", "quorum", "grace", "fragments", "wire")
SAVED_BY_DELAY = 0.5  # of rounds' work; all of waits
DELAY_COSTS = 0.1  # of the time to a target, where nobody waits (docs/results/stability.md)
ADAPTIVE_DELAY_COSTS = 0.5  # of Adam and its kin, and of any optimizer that is not known
GREATER_QUORUM = 0.5
SAVED_BY_QUORUM = 0.44  # of rounds and their work, by the greater quorum
QUORUM_COSTS = 0.03  # of the time to a target
RULED_GRACE = 1
SAVED_BY_GRACE = 0.3  # of rounds and their work, beside the greater quorum
GRACE_COSTS = 0.02  # a judgement: none on average, up to 0.07 beside the quorum's (docs/results/rounds.md)
GRACE_COSTS_FRAGMENTED = 0.05  # beside two fragments (docs/results/fragments.md)
# Wires, and for how long ranks must wait: a judgement, of the time to a target none has cost more than seeds differ by
# (docs/results/wires.md). A round of a quarter of the bytes ends most waits of up to three slices.
WIRE_COSTS: dict[WireFormat, float] = {"top64": 1.0, "int8": 0.02}
SAVED_BY_FRAGMENTS = 0.25  # of work, by twice as many: the copies of a round's sum, but not those of a finished task
FRAGMENTS_COSTS = 0.08  # 0.05 of the time to a target by four in place of two; 0.08 with grace
MOST_ACCUMULATION = 4  # K = 8 at a rate that suits a batch ended at chance
DOUBLING_COSTS = 0.2  # of a slice, by K = 2; 4 must save twice that
KEPT = 0.5  # of what a rise promised, or it is taken back
MOST_PATIENCE = 32.0  # of looks back: what devices compute, over which ranks would wait so many times as long
PATIENCE_WITH_OTHERS = 4.0  # once ranks have changed
RETRY_WINDOWS = 32  # before it is tried again; four times as many after each refusal
LOWER_AT = 0.25  # of what raised it: where it would not be raised again at once
CALM_WINDOWS = 8  # in a row before rounds become more; four times as many after each raise, so that it does not swing
SETTLING_TASKS = 4  # of each rank, after the start or a change: rounds have yet to come to their number
FIRST_TASKS = 1  # of these, in which planes may have connections to open
# The least wait of any rank over computing, which no straggler has made: behind a link so slow a whole window of rounds
# in step would be most of a short job, and the wire of fewest bytes comes with delay.
OVERWHELMING = 2.0
OVERWHELMED_ROUNDS = 2  # at least, half of them so, and WINDOW_SECONDS of waits: one may be a moment's trouble
WINDOW_ROUNDS = 4
WINDOW_TASKS = 10  # of each rank
WINDOW_SECONDS = 1.0  # of each rank's device: less shows the moment more than the job
SYNCHRONOUS_WINDOW = 0.5  # of such a window: all have as many tasks, and what they wait for is told by each
LASTING_WINDOWS = (
    3  # in a row, in which ranks must wait once they have not: one moment's trouble is no reason for delay
)


@dataclass(frozen=True, kw_only=True)
class RoundsChange:
    """D, K, q, grace, fragments and wire from `round` on, and why: synchronisation's own work and waits, over what
    devices compute."""

    round: int
    delay_bound: int
    accumulation: int
    quorum: float
    grace: int
    fragments: int
    wire: WireFormat
    work: float
    waits: float
    reason: str

    @property
    def sentence(self) -> str:
        return f"from round {self.round} on: {self.reason}"

    @property
    def told(self) -> dict[str, Any]:
        """As records and summaries have it."""
        return {**asdict(self), "delay_bound": None if self.delay_bound == NO_BOUND else self.delay_bound}

    def applied_to(self, settings: Settings) -> Settings:
        return replace(settings, **{key: getattr(self, key) for key in RULED})


class Rise(NamedTuple):
    """Of one key of the settings, from a value to a greater one, or to a wire of fewer bytes: the parts of work and of
    waits that it saves, and how much of a slice it must save. `not_with_grace`: rounds that have it wait for more than
    that."""

    key: str
    before: Any
    value: Any
    work_saved: float
    waits_saved: float
    costs: float
    not_with_grace: bool = False

    @property
    def delays(self) -> bool:
        """Is it the one from synchronous training to delayed?"""
        return self.key == "delay_bound"

    def is_made(self, settings: Settings) -> bool:
        made = getattr(settings, self.key)
        return bool(made == self.value if self.key == "wire" else made >= self.value)

    def is_next(self, settings: Settings) -> bool:
        if self.not_with_grace and settings.grace_within_bound:
            return False
        if settings.synchronous and not self.delays:
            return False
        if self.key == "wire":  # what one leaves for later only exact sums give to another
            return settings.wire == self.before
        return bool(self.before <= getattr(settings, self.key) < self.value)

    def made(self, settings: Settings) -> Settings:
        return replace(settings, **{self.key: self.value})

    def taken_back(self, settings: Settings) -> Settings:
        return replace(settings, **{self.key: self.before})

    def saving(self, work: float, waits: float) -> float:
        return self.work_saved * work + self.waits_saved * waits


def delay_costs(adaptive: bool) -> float:
    return ADAPTIVE_DELAY_COSTS if adaptive else DELAY_COSTS


def rises_of(sync: SyncConfig, adaptive: bool = False) -> tuple[Rise, ...]:
    """What a rule may do, in the order in which it tries it. `adaptive`: not all optimizers are known to lose little
    by delay."""
    first, rises = settings_of(sync), []
    if sync.delay_bound == "auto":
        rises.append(Rise("delay_bound", 0, RULED_DELAY_BOUND, SAVED_BY_DELAY, 1.0, delay_costs(adaptive)))
        first = replace(first, delay_bound=RULED_DELAY_BOUND)
    if sync.quorum == "auto" and not first.grace:
        saves = (SAVED_BY_QUORUM, 0.0, QUORUM_COSTS)
        rises.append(Rise("quorum", first.quorum, GREATER_QUORUM, *saves, not_with_grace=True))
    # With a greater quorum than that rounds are as few.
    if sync.grace == "auto" and first.quorum <= GREATER_QUORUM and most_grace(first.delay_bound) >= RULED_GRACE:
        costs = GRACE_COSTS if first.fragments == 1 else GRACE_COSTS_FRAGMENTED
        rises.append(Rise("grace", 0, RULED_GRACE, SAVED_BY_GRACE, 0.0, costs))
    if sync.wire == "auto":
        rises += [Rise("wire", first.wire, wire, 0.0, 1.0, costs) for wire, costs in WIRE_COSTS.items()]
    if sync.fragments == "auto":
        saves = (SAVED_BY_FRAGMENTS, 1.0, FRAGMENTS_COSTS)
        rises.append(Rise("fragments", first.fragments, sync.most_fragments, *saves))
    accumulation = first.accumulation
    while sync.accumulation == "auto" and accumulation < MOST_ACCUMULATION:
        rises.append(Rise("accumulation", accumulation, 2 * accumulation, 0.5, 1.0, DOUBLING_COSTS * accumulation))
        accumulation *= 2
    return tuple(rises)


def _fewest_bytes(rises: Iterable[Rise]) -> Rise | None:
    return max((rise for rise in rises if rise.key == "wire"), key=lambda rise: rise.costs, default=None)


def called(settings: Settings) -> str:
    if settings.synchronous:
        return "D = 0"
    bound = "no bound" if settings.delay_bound == NO_BOUND else f"D = {settings.delay_bound}"
    return f"{bound}, K = {settings.accumulation}, q = {settings.quorum:g}{settings.besides}"


@dataclass
class Window:
    """Of one rank: sums over its tasks."""

    seconds: float = 0.0
    work_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)  # of each task, in seconds

    def add(self, seconds: float, work_seconds: float, wait_seconds: float) -> None:
        self.seconds += seconds
        self.work_seconds += work_seconds
        self.waits.append(wait_seconds)

    @property
    def tasks(self) -> int:
        return len(self.waits)

    def is_full(self, synchronous: bool) -> bool:
        part = SYNCHRONOUS_WINDOW if synchronous else 1.0
        return self.tasks >= part * WINDOW_TASKS and self.seconds >= part * WINDOW_SECONDS


def overwhelmed(windows: Sequence[Window]) -> bool:
    """In step, by the link: whoever came last to a round has waited, too. A rank's tasks are taken to be of one round
    each, in their order."""
    least = sorted(map(min, zip(*(window.waits for window in windows), strict=False)))
    if len(least) < OVERWHELMED_ROUNDS or sum(least) < WINDOW_SECONDS:
        return False
    slices = [window.seconds / window.tasks for window in windows]
    return min(slices) > 0 and least[(len(least) - 1) // 2] >= OVERWHELMING * max(slices)


@dataclass
class Trials:
    """Of a rise: how often it was made and not refused, and when it is tried again after it has saved too little."""

    made: int = 0
    retry_in: int = 0  # windows
    retry_after: int = RETRY_WINDOWS

    def refuse(self) -> None:
        self.made -= 1
        self.retry_in, self.retry_after = self.retry_after, 4 * self.retry_after


@dataclass(frozen=True)
class Promise:
    """Of a rise: the next window's overhead is at most this. `along`: a wire that came with delay."""

    rise: Rise
    overhead: float
    along: Rise | None = None


class RoundsRule:
    """Call `observe` with full tasks of the settings in force, and `decide` as often as you like."""

    def __init__(self, rises: Sequence[Rise], version: int = 0, waits: float = 0.0) -> None:
        """`waits`: those over computing for which the job has begun with delay, if it has."""
        self._trials = {rise: Trials() for rise in rises}
        self._window_ends = version + WINDOW_ROUNDS
        self._windows: defaultdict[int, Window] = defaultdict(Window)
        self._settling: defaultdict[int, int] = defaultdict(lambda: SETTLING_TASKS)  # tasks of each rank
        self._early: defaultdict[int, Window] = defaultdict(Window)  # of all tasks but the first
        self._promised: Promise | None = None
        self._calm = 0  # windows in a row that would bear more rounds
        self._delayed = 0  # windows in a row in delayed mode, where that is by rule
        self._waits = waits  # for which that was chosen
        self._synchronous = 0  # and in synchronous mode
        self._called_for = 0  # windows in a row that have called for delay
        self._wire: Rise | None = None  # made before a look back, after which the link is no faster

    def observe(self, rank: int, seconds: float, work_seconds: float, wait_seconds: float) -> None:
        """A task took so much of its device's time, and synchronisation beside it."""
        if self._settling[rank] <= SETTLING_TASKS - FIRST_TASKS:
            self._early[rank].add(seconds, work_seconds, wait_seconds)
        if self._settling[rank]:
            self._settling[rank] -= 1
        else:
            self._windows[rank].add(seconds, work_seconds, wait_seconds)

    def give_up_delay(self, settings: Settings, version: int, reason: str) -> RoundsChange:
        """For good."""
        self._trials = {rise: trials for rise, trials in self._trials.items() if not rise.delays}
        self._promised, self._delayed = None, 0
        self._settle(version)
        new = self._in_step(settings)
        ruled = {key: getattr(new, key) for key in RULED}
        return RoundsChange(round=version, work=0.0, waits=0.0, reason=f"{reason}: {called(new)}", **ruled)

    def restart(self, version: int) -> None:
        """Ranks have changed: what was seen before is of no use, nor what was promised. Others may wait less, or more:
        whether they need delay is looked at soon."""
        self._promised = self._wire = None
        self._delayed, self._waits = 0, min(self._waits, PATIENCE_WITH_OTHERS)
        self._trials.update((rise, Trials()) for rise in self._trials if rise.delays)
        self._settle(version)

    def forget_promise(self) -> None:
        """Shares have changed: what follows does not tell the last rise's effect alone, but for delay, with which they
        are cut otherwise. What rounds take of a slice has hardly changed: shares that are often moved would keep a
        window that began anew from ever being full."""
        if self._promised is not None and not self._promised.rise.delays:
            self._promised = None

    def _settle(self, version: int) -> None:
        self._settling.clear()
        self._synchronous = self._called_for = 0
        self._begin_window(version)

    def _begin_window(self, version: int) -> None:
        self._windows.clear()
        self._early.clear()
        self._window_ends = version + WINDOW_ROUNDS

    def decide(self, settings: Settings, version: int, shares: Mapping[int, int]) -> RoundsChange | None:
        """Other settings, once a window is over, if there is reason for them. `shares` of the ranks at work."""
        if not shares:
            return None
        begins = settings.synchronous and not self._synchronous
        clear = begins and overwhelmed([self._early[rank] for rank in shares])
        windows = self._early if clear else self._windows
        ended = version >= self._window_ends and all(windows[rank].is_full(settings.synchronous) for rank in shares)
        if not clear and not ended:
            return None
        # Means over ranks, by their parts of a batch.
        parts = {rank: share / sum(shares.values()) / windows[rank].seconds for rank, share in shares.items()}
        work = sum(part * windows[rank].work_seconds for rank, part in parts.items())
        waits = sum(part * sum(windows[rank].waits) for rank, part in parts.items())
        longest = sum(part * max(windows[rank].waits) for rank, part in parts.items())
        self._begin_window(version)
        new, besides = self._choose(settings, work, waits, waits - longest, clear)
        if new == settings:
            return None
        self._settle(version)
        reason = f"rounds take {work:.0%} of a slice, and waits {waits:.0%}{besides}: {called(new)}"
        ruled = {key: getattr(new, key) for key in RULED}
        return RoundsChange(round=version, work=work, waits=waits, reason=reason, **ruled)

    def _choose(
        self, settings: Settings, work: float, waits: float, steady: float, clear: bool
    ) -> tuple[Settings, str]:
        """Settings, and what else is to be said of them. `steady`: waits without each rank's longest; `clear`: the link
        is what ranks wait for."""
        promised, self._promised = self._promised, None
        if promised is not None and work + waits > promised.overhead:
            rise = promised.along or promised.rise
            if promised.along:  # delay is judged without it
                self._promised = replace(promised, along=None)
            self._trials[rise].refuse()
            return rise.taken_back(settings), ", so fewer or smaller ones save too little"
        for trials in self._trials.values():
            trials.retry_in -= 1
        if self._looks_back(settings):
            # K slices of one contribution would be as many times the batch.
            self._wire = next((rise for rise in self._wires() if rise.is_made(settings)), None)
            return self._in_step(settings), ", to see what they take without delay"
        for rise, trials in self._trials.items():
            saving, steadily = rise.saving(work, waits), rise.saving(work, steady)
            if rise.is_next(settings) and self._lasts(rise, saving, steadily) and trials.retry_in <= 0:
                along = self._wire_with_delay(waits, clear) if rise.delays else None
                self._waits = waits if rise.delays else self._waits
                self._promised = Promise(rise, work + waits - KEPT * saving, along)
                self._calm = 0
                trials.made += 1
                made = rise.made(settings)
                return along.made(made) if along else made, ""
        self._synchronous += settings.synchronous
        return settings if settings.synchronous else self._calmed(settings, work + waits), ""

    def _wires(self) -> Iterator[Rise]:
        return (rise for rise in self._trials if rise.key == "wire")

    def _wire_with_delay(self, waits: float, clear: bool) -> Rise | None:
        """The wire of before a look back; else, behind a very slow link, that of fewest bytes."""
        rise = self._wire or (_fewest_bytes(self._trials) if clear else None)
        return rise if rise and waits > rise.costs and self._trials[rise].retry_in <= 0 else None

    def _in_step(self, settings: Settings) -> Settings:
        """Without delay, and what goes with it: gradients as exact as ever."""
        settings = next((rise.taken_back(settings) for rise in self._wires() if rise.is_made(settings)), settings)
        return replace(settings, delay_bound=0, accumulation=1)

    def _lasts(self, rise: Rise, saving: float, steadily: float) -> bool:
        """Is it worth its costs, and not for a moment only? Ranks that have waited from the start, in more than one
        task, will go on to; later they must have waited for long."""
        if saving <= rise.costs:
            self._called_for = 0
            return False
        self._called_for += rise.delays
        at_once = not rise.delays or (not self._synchronous and steadily > rise.costs)
        return at_once or self._called_for >= LASTING_WINDOWS

    def _looks_back(self, settings: Settings) -> bool:
        """Is it time to be synchronous for a window? With delay nobody sees what ranks would wait for. The longer that
        was, the more a look back costs."""
        delay = next((rise for rise in self._trials if rise.delays), None)
        if delay is None or settings.synchronous:
            self._delayed = 0
            return False
        self._delayed += 1
        patience = min(max(1.0, self._waits), MOST_PATIENCE)
        return self._delayed >= CALM_WINDOWS * 4 ** self._trials[delay].made * patience

    def _calmed(self, settings: Settings, overhead: float) -> Settings:
        """With the last rise taken back, where it has long been of little use."""
        # Where there are no waits nothing tells what a wire saves.
        made = (rise for rise in reversed(self._trials) if rise.is_made(settings) and not rise.delays)
        last = next((rise for rise in made if rise.work_saved), None)
        if last is None or overhead >= LOWER_AT * last.costs / last.work_saved / 2:  # about half is left of that
            self._calm = 0
            return settings
        self._calm += 1
        if self._calm < CALM_WINDOWS * 4 ** self._trials[last].made:
            return settings
        self._calm = 0
        return last.taken_back(settings)


def rule_for(
    sync: SyncConfig, version: int = 0, adaptive: bool = False, begun: RoundsChange | None = None
) -> RoundsRule | None:
    """None where the recipe leaves it nothing to set. See `rises_of`; `begun` is what `begun_behind` has found."""
    rises = rises_of(sync, adaptive)
    return RoundsRule(rises, version, 0.0 if begun is None else begun.waits) if rises else None


def begun_behind(sync: SyncConfig, settings: Settings, slices: float, version: int = 0) -> RoundsChange | None:
    """Before the first round, or where a job is gone on with: delay, and the wire of fewest bytes, where a sum of all
    gradients is seen to take as long as so many `slices` that ranks would wait for longer than they compute, and the
    delay bound is by rule."""
    rises = rises_of(sync)
    delay = next((rise for rise in rises if rise.delays), None)
    if delay is None or not OVERWHELMING <= slices < math.inf:
        return None
    new, wire = delay.made(settings), _fewest_bytes(rises)
    new = new if wire is None else wire.made(new)
    ruled = {key: getattr(new, key) for key in RULED}
    reason = f"a sum of all weights takes as long as {slices:.3g} slices: {called(new)}"
    return RoundsChange(round=version, work=0.0, waits=slices, reason=reason, **ruled)


def found_before(sync: SyncConfig, settings: Settings) -> Settings:
    """What a job goes on with whose rule had come to these."""
    found = settings_of(sync)
    for rise in rises_of(sync):
        if rise.is_made(settings) and (rise.delays or not found.synchronous):
            found = rise.made(found)
    return found
