"""How speeds change while training: each rank's profile, corrected by how its tasks turn out. Pure, as `profile`."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hetsync.balance.profile import StepTime

# An observation's weight in a rank's smoothed speed: about the last twenty tasks count.
SMOOTHING = 0.1
# Speeds of fewer tasks than this are anecdotes.
LEAST_OBSERVATIONS = 10
# So many tasks in a row, all further off than usual and to the same side, are a new speed and no jitter.
SHIFT_TASKS = 3
SHIFT_DEVIATIONS = 3.0
SHIFT_LEAST = 0.1  # of the speed


@dataclass
class _Ratio:
    """Seconds taken over seconds profiled, of one rank's tasks.

    A newcomer's first are not enough to tell how fast it is at best.
    """

    smoothed: float = 1.0
    newcomer: bool = False
    seen: int = 0
    _deviation: float = 0.0  # mean absolute one
    _since_shift: int = 0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LEAST_OBSERVATIONS))

    @property
    def at_best(self) -> float:
        """Of the last tasks."""
        if self.newcomer and self.seen < LEAST_OBSERVATIONS:
            return 0.0
        return min([self.smoothed, *self._last])

    def observe(self, ratio: float) -> bool:
        """Take one in; True where the speed has changed for good, as it seems."""
        self.seen += 1
        self._last.append(ratio)
        if self._shifted():
            self.smoothed, self._since_shift = statistics.mean(self._newest), SHIFT_TASKS
            return True
        self._since_shift += 1
        weight = max(SMOOTHING, 1 / self._since_shift)
        self._deviation += weight * (abs(ratio - self.smoothed) - self._deviation)
        self.smoothed += weight * (ratio - self.smoothed)
        return False

    def _shifted(self) -> bool:
        if self._since_shift < LEAST_OBSERVATIONS:
            return False
        usual = max(SHIFT_DEVIATIONS * self._deviation, SHIFT_LEAST * self.smoothed)
        return min(self._newest) > self.smoothed + usual or max(self._newest) < self.smoothed - usual

    @property
    def _newest(self) -> list[float]:
        return list(self._last)[-SHIFT_TASKS:]


@dataclass
class Speeds:
    """Each rank's profiled step time, scaled by how its tasks turn out; with the bounds of its share.

    All by rank: which ranks are there changes.
    """

    profiled: dict[int, StepTime]
    caps: Mapping[int, int | None] = field(default_factory=dict)
    pins: Mapping[int, int] = field(default_factory=dict)
    _ratios: dict[int, _Ratio] = field(default_factory=lambda: defaultdict(_Ratio))
    _settled: set[int] = field(default_factory=set)  # ranks, some of which may have left

    def observe(self, rank: int, samples: int, slices: int, seconds: float) -> bool:
        """A task of `samples` in `slices` took `seconds` of device time; True where the rank's speed has jumped."""
        if not samples or seconds <= 0:
            return False
        profiled = self.profiled[rank]
        expected = slices * profiled.fixed_seconds + samples * profiled.seconds_per_sample
        ratio = self._ratios[rank]
        jumped = ratio.observe(seconds / expected)
        if ratio.seen == LEAST_OBSERVATIONS:
            self._settled.add(rank)
        return jumped

    def forget(self, rank: int) -> None:
        """The rank works no more: nobody waits for it to be seen."""
        self._settled.add(rank)

    def join(self, rank: int, profiled: StepTime, cap: int | None) -> None:
        """Another process works in the rank's place."""
        self.profiled[rank] = profiled
        self.caps = {**self.caps, rank: cap}
        self.presume(rank, newcomer=True)

    def presume(self, rank: int, newcomer: bool = False) -> None:
        """Until the rank is seen at work, what its profile is off by is taken to be what it is with the others: where
        nothing was measured, that is all."""
        seen = [ratio.smoothed for other, ratio in self._ratios.items() if other != rank and ratio.seen]
        self._ratios[rank] = _Ratio(statistics.median(seen) if seen else 1.0, newcomer)
        self._settled.discard(rank)

    def seen(self, rank: int) -> bool:
        """Has it been at work?"""
        return self._ratios[rank].seen > 0

    def times(self, ranks: Sequence[int]) -> list[StepTime]:
        return [self._scaled(self.profiled[rank], self._ratios[rank].smoothed) for rank in ranks]

    def at_best(self, ranks: Sequence[int]) -> list[StepTime]:
        """By each rank's quickest of its last tasks; a newcomer may be of any speed until it is seen often enough."""
        return [self._scaled(self.profiled[rank], self._ratios[rank].at_best) for rank in ranks]

    def limits(self, ranks: Sequence[int]) -> tuple[list[int | None], dict[int, int]]:
        """Caps and pins of these ranks, by their places. A cap that was found while training limits a pin, too."""
        caps = [self.caps.get(rank) for rank in ranks]
        pins = {place: self.pins[rank] for place, rank in enumerate(ranks) if rank in self.pins}
        return caps, {place: pin if (cap := caps[place]) is None else min(pin, cap) for place, pin in pins.items()}

    def slowest(self) -> tuple[int, float] | None:
        """The rank that computes slowest against its profile, and its speed as a part of that; from any thread."""
        told = [(1 / ratio.smoothed, rank) for rank, ratio in self._ratios.copy().items() if ratio.seen]
        speed, rank = min(told, default=(0.0, None))
        return None if rank is None else (rank, speed)

    @staticmethod
    def _scaled(time: StepTime, ratio: float) -> StepTime:
        return StepTime(time.fixed_seconds * ratio, time.seconds_per_sample * ratio)

    def settled(self, ranks: Collection[int]) -> bool:
        """Asked at every event: with thousands of ranks, most of the time their number is all there is to look at."""
        return len(self._settled) >= len(ranks) and self._settled.issuperset(ranks)
