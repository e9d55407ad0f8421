"""What a controller may do: one rung down, none, or one rung up on a ladder of K, and the same on one of D."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetsync.errors import UserError
from hetsync.sync.messages import Settings

if TYPE_CHECKING:
    from hetsync.config import ControlConfig

DECREASE, KEEP, INCREASE = range(3)


@dataclass(frozen=True)
class Limits:
    """What a controller must keep to.

    Args:
        least_accumulation: Smallest K.
        greatest_accumulation: Greatest K.
        least_delay_bound: Smallest D; 0 allows synchronous training.
        greatest_delay_bound: Greatest D.
        interval_seconds: Least time between two changes of the settings.
    """

    least_accumulation: int = 1
    greatest_accumulation: int = 8
    least_delay_bound: int = 0
    greatest_delay_bound: int = 16
    interval_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, floor in (("accumulation", 1), ("delay_bound", 0)):
            least, greatest = getattr(self, f"least_{name}"), getattr(self, f"greatest_{name}")
            if not floor <= least <= greatest:
                raise UserError(
                    f"control.least_{name} is {least} and control.greatest_{name} {greatest}:"
                    f" give whole numbers from {floor} on, the greatest not below the least"
                )

    @staticmethod
    def of(config: ControlConfig) -> Limits:
        return Limits(
            config.least_accumulation,
            config.greatest_accumulation,
            config.least_delay_bound,
            config.greatest_delay_bound,
            config.interval_seconds,
        )


class Actions:
    """The two ladders within some limits: the powers of two between the bounds, and the bounds; 0 where it is one."""

    def __init__(self, limits: Limits) -> None:
        self.accumulations = rungs(limits.least_accumulation, limits.greatest_accumulation)
        self.delay_bounds = rungs(limits.least_delay_bound, limits.greatest_delay_bound)

    def apply(self, settings: Settings, action: Sequence[int]) -> Settings:
        """`action` is DECREASE, KEEP or INCREASE for K and for D. Beyond a ladder's end nothing changes."""
        return replace(
            settings,
            accumulation=moved(self.accumulations, settings.accumulation, action[0]),
            delay_bound=moved(self.delay_bounds, settings.delay_bound, action[1]),
        )

    def towards(self, settings: Settings, goal: Settings) -> Settings:
        """One rung nearer to other settings, K and D each."""
        return self.apply(settings, direction(settings, goal))

    def clipped(self, settings: Settings) -> Settings:
        """The same within the bounds."""
        ks, ds = self.accumulations, self.delay_bounds
        return replace(
            settings,
            accumulation=min(max(settings.accumulation, ks[0]), ks[-1]),
            delay_bound=min(max(settings.delay_bound, ds[0]), ds[-1]),
        )

    def all(self, settings: Settings) -> list[Settings]:
        """Every pair of rungs, with the rest as in `settings`."""
        return [replace(settings, accumulation=k, delay_bound=d) for k in self.accumulations for d in self.delay_bounds]


def direction(settings: Settings, goal: Settings) -> tuple[int, int]:
    """The action that leads from some settings towards others."""
    k = (goal.accumulation > settings.accumulation) - (goal.accumulation < settings.accumulation)
    d = (goal.delay_bound > settings.delay_bound) - (goal.delay_bound < settings.delay_bound)
    return KEEP + k, KEEP + d


def rungs(least: int, greatest: int) -> tuple[int, ...]:
    powers = (1 << n for n in range(greatest.bit_length()))
    return tuple(sorted({least, greatest, *(power for power in powers if least < power < greatest)}))


def moved(ladder: Sequence[int], value: int, step: int) -> int:
    """The next rung below or above a value, which need not be a rung itself; the value at the end of the ladder."""
    if step == DECREASE:
        below = bisect_left(ladder, value)
        return ladder[below - 1] if below else value
    if step == INCREASE:
        above = bisect_right(ladder, value)
        return ladder[above] if above < len(ladder) else value
    return value
