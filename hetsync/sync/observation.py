"""What a controller sees of a job, live or simulated, between two moments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetsync.balance.profile import StepTime
from hetsync.sync.messages import Settings, TaskFinished


@dataclass(frozen=True)
class Observation:
    """A window, from the last observation to this one. Means are over the tasks of the window.

    Args:
        seconds: Length of the window; of virtual time where simulated.
        rounds: Rounds completed in it.
        samples: Samples applied in it.
        losses: Mean training loss of each task, in the order in which they were finished; empty with timing only.
        staleness: Mean staleness of what was applied.
        efficiency: Samples/s over the sum of what the ranks reach alone.
        communication_share: Part of the time for which a sum was under way.
        waiting_share: Part of the time that the ranks' main threads waited, on average.
        jitter: Coefficient of variation of a task's device time over its profiled time.
        noise_scale: Gradient noise scale in samples; None where the learner does not know it.
        progress: Part of the run's samples that are applied.
        learning_rate: What the schedule multiplies it by, by now.
        settings: In force now.
    """

    seconds: float
    rounds: int
    samples: int
    losses: tuple[float, ...]
    staleness: float
    efficiency: float
    communication_share: float
    waiting_share: float
    jitter: float
    noise_scale: float | None
    progress: float
    learning_rate: float
    settings: Settings


@dataclass
class Totals:
    """Running totals since the start; a window is the difference between two of them."""

    at: float = 0.0
    rounds: int = 0
    samples: int = 0
    communication_seconds: float = 0.0
    wait_seconds: float = 0.0
    tasks: int = 0
    ratios: float = 0.0  # of device time to profiled time, summed over tasks
    squared_ratios: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)

    def count(self, time: StepTime, finished: TaskFinished, slices: int) -> None:
        if not finished.samples:
            return
        ratio = finished.seconds / (slices * time.fixed_seconds + finished.samples * time.seconds_per_sample)
        self.tasks += 1
        self.ratios += ratio
        self.squared_ratios += ratio * ratio

    def since(self, before: Totals, solo_samples_per_second: float) -> dict[str, Any]:
        """An observation's figures of the time between."""
        seconds = self.at - before.at
        part = 1 / seconds if seconds else 0.0
        samples = self.samples - before.samples
        return {
            "seconds": seconds,
            "rounds": self.rounds - before.rounds,
            "samples": samples,
            "staleness": mean_staleness(self.staleness - before.staleness),
            "efficiency": samples * part / solo_samples_per_second,
            "communication_share": (self.communication_seconds - before.communication_seconds) * part,
            "waiting_share": (self.wait_seconds - before.wait_seconds) * part,
            "jitter": self._jitter_since(before),
        }

    def _jitter_since(self, before: Totals) -> float:
        tasks = self.tasks - before.tasks
        if not tasks:
            return 0.0
        mean = (self.ratios - before.ratios) / tasks
        variance = (self.squared_ratios - before.squared_ratios) / tasks - mean * mean
        return math.sqrt(max(0.0, variance)) / mean


def mean_staleness(counts: Mapping[int, int]) -> float:
    """Of tasks, counted by their staleness; 0 where there are none."""
    tasks = sum(counts.values())
    return sum(staleness * count for staleness, count in counts.items()) / tasks if tasks else 0.0
