"""The learning rate over samples: built-in courses, or a function of the user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetsync.config.checks import at_least
from hetsync.config.imports import import_object
from hetsync.errors import UserError, brief, did_you_mean

# How far the learning rate has fallen, by the part of the run that is done.
FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 0.0,
    "linear": lambda done: done,
    "cosine": lambda done: (1 - math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over samples (not steps).

    Args:
        name: constant, linear or cosine; the latter two fall to `final_factor` at the end of the run. Or the import
            path of your own (my_pkg.my_module:factor): a function of the samples so far and in all, to the factor.
        warmup_samples: Samples over which the learning rate rises from zero.
        final_factor: Factor on the learning rate at the end.
    """

    name: str = "constant"
    warmup_samples: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        at_least("schedule.warmup_samples", self.warmup_samples, 0)
        at_least("schedule.final_factor", self.final_factor, 0)
        if ":" in self.name:
            for key in ("warmup_samples", "final_factor"):
                if getattr(self, key):
                    raise UserError(
                        f"schedule.{key} is {getattr(self, key)}, but schedule.name is {self.name}, which gives the"
                        " whole factor: leave it out"
                    )
        elif self.name not in FALLS:
            raise UserError(
                f"schedule.name is {brief(self.name)}{did_you_mean(self.name, FALLS)}: use constant, linear or cosine,"
                " or package.module:function for your own"
            )

    def factor(self, samples: int, total: int) -> float:
        """Factor on the learning rate after `samples` of `total`."""
        if ":" in self.name:
            return self._own_factor(samples, total)
        if samples < self.warmup_samples:
            return (samples + 1) / self.warmup_samples
        done = (samples - self.warmup_samples) / max(1, total - self.warmup_samples)
        return 1 - FALLS[self.name](done) * (1 - self.final_factor)

    def check(self, total: int) -> None:
        """UserError where a function of the user's own cannot be imported, called, or used."""
        for samples in (0, total // 2, total):
            self.factor(samples, total)

    def _own_factor(self, samples: int, total: int) -> float:
        factor = self._function(samples, total)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise UserError(
                f"schedule.name is {self.name}, which gave {brief(factor)} after {samples} of {total} samples: return a"
                " number, 0 or more"
            )
        return float(factor)

    @cached_property
    def _function(self) -> Callable[[int, int], Any]:
        function = import_object("schedule.name", self.name)
        try:
            inspect.signature(function).bind(0, 1)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"schedule.name is {self.name}, which does not take two numbers, samples and total ({error}): give a"
                " function that does"
            ) from error
        found: Callable[[int, int], Any] = function
        return found
