"""What a controller may do: one rung down, none, or one rung up on a ladder of K, and the same on one of D.

Whatever else controllers are to decide joins `TUNED` and `Limits`; README.md says what follows from that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from hetsync.errors import UserError
from hetsync.sync.messages import Settings

if TYPE_CHECKING:
    from hetsync.config.schema import ControlConfig

DECREASE, KEEP, INCREASE = CHOICES = range(3)
# Fields of Settings that controllers decide, in the order of an action's parts, with their symbols.
TUNED = {"accumulation": "K", "delay_bound": "D"}


@dataclass(frozen=True)
class Limits:
    """What a controller must keep to.

    Args:
        min_accumulation: Smallest K.
        max_accumulation: Greatest K.
        min_delay_bound: Smallest D; 0 allows synchronous training.
        max_delay_bound: Greatest D.
        interval_seconds: Least time between two changes of the settings.
    """

    min_accumulation: int = 1
    max_accumulation: int = 8
    min_delay_bound: int = 0
    max_delay_bound: int = 16
    interval_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, floor in (("accumulation", 1), ("delay_bound", 0)):
            least, greatest = self.bounds(name)
            if not floor <= least <= greatest:
                raise UserError(
                    f"control.min_{name} is {least} and control.max_{name} {greatest}:"
                    f" give whole numbers from {floor} on, max not below min"
                )

    @staticmethod
    def of(config: ControlConfig) -> Limits:
        return Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})

    def bounds(self, name: str) -> tuple[int, int]:
        """Of one of `TUNED`."""
        return getattr(self, f"min_{name}"), getattr(self, f"max_{name}")


class Actions:
    """A ladder for each of `TUNED` within some limits: the powers of two between the bounds, and the bounds; 0 where it
    is one."""

    def __init__(self, limits: Limits) -> None:
        self.ladders = {name: powers_of_two(*limits.bounds(name)) for name in TUNED}

    def apply(self, settings: Settings, action: Sequence[int]) -> Settings:
        """`action` is DECREASE, KEEP or INCREASE for each of `TUNED`. Beyond a ladder's end nothing changes."""
        steps = dict(zip(TUNED, action, strict=True))
        changes = {name: moved(rungs, getattr(settings, name), steps[name]) for name, rungs in self.ladders.items()}
        return _with(settings, changes)

    def towards(self, settings: Settings, goal: Settings) -> Settings:
        """One rung nearer to other settings, on every ladder."""
        return self.apply(settings, direction(settings, goal))

    def clipped(self, settings: Settings) -> Settings:
        """The same within the bounds."""
        ends = {name: (rungs[0], rungs[-1]) for name, rungs in self.ladders.items()}
        return _with(settings, {name: min(max(getattr(settings, name), lo), hi) for name, (lo, hi) in ends.items()})

    def all(self, settings: Settings) -> list[Settings]:
        """Every combination of rungs, with the rest as in `settings`."""
        return [_with(settings, dict(zip(TUNED, rungs, strict=True))) for rungs in product(*self.ladders.values())]


def _with(settings: Settings, tuned: Mapping[str, Any]) -> Settings:
    return replace(settings, **tuned)


def direction(settings: Settings, goal: Settings) -> tuple[int, ...]:
    """The action that leads from some settings towards others."""
    pairs = [(getattr(settings, name), getattr(goal, name)) for name in TUNED]
    return tuple(KEEP + (there > here) - (there < here) for here, there in pairs)


def described(settings: Settings) -> str:
    return ", ".join(f"{symbol} {getattr(settings, name)}" for name, symbol in TUNED.items())


def powers_of_two(least: int, greatest: int) -> tuple[int, ...]:
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
