"""What becomes of a simulated job under a controller."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hetsync.control.actions import Actions, Limits
from hetsync.control.baselines import Fixed
from hetsync.control.controller import Controller
from hetsync.control.envelope import Envelope
from hetsync.control.jobs import LOOKS, Course, Job, with_settings
from hetsync.sync.messages import Settings

# A job that has not applied its samples within so many times its time limit is given up.
PATIENCE = 5


@dataclass(frozen=True)
class Trial:
    """A job's course.

    Args:
        seconds: Virtual time of each look at the loss.
        losses: Of the shared weights, at these; the last is infinite where the job diverged.
        samples: Applied, at these.
        settings: In force in each window.
        reasons: What was decided after each window.
        time_limit: The job's.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    samples: tuple[int, ...]
    settings: tuple[Settings, ...]
    reasons: tuple[str, ...]
    time_limit: float

    @property
    def samples_per_second(self) -> float:
        return self.samples[-1] / self.seconds[-1]

    @property
    def final_loss(self) -> float:
        """When all samples are applied; the loss of a job that was given up is what it had reached."""
        return self.losses[-1]

    @property
    def loss_in_time(self) -> float:
        """At the time limit, or at the end where that came earlier."""
        return next(loss for at, loss in self._backwards() if at <= self.time_limit or at == self.seconds[0])

    def seconds_to(self, target: float) -> float:
        """When the loss, averaged over a window, first lay at the target; infinite where it never did."""
        smooth = np.convolve(self.losses, np.full(LOOKS, 1 / LOOKS), "valid")
        below = np.flatnonzero(smooth <= target)
        if not below.size:
            return math.inf
        index = int(below[0])
        after = self.seconds[index + LOOKS - 1]
        if index == 0:
            return after
        before, high, low = self.seconds[index + LOOKS - 2], float(smooth[index - 1]), float(smooth[index])
        return before + (after - before) * (high - target) / (high - low)

    def _backwards(self) -> Sequence[tuple[float, float]]:
        return list(zip(self.seconds, self.losses, strict=True))[::-1]


def run_trial(job: Job, controller: Controller, limits: Limits) -> Trial:
    """The job to its end, with a decision a window, within the limits."""
    return run_course(Course(job), controller, limits)


def run_course(course: Course, controller: Controller, limits: Limits) -> Trial:
    """The same for a controller that has looked into the course."""
    job, guarded = course.job, Envelope(controller, limits)
    settings: list[Settings] = []
    reasons: list[str] = []
    while not course.over and course.simulation.now < PATIENCE * job.time_limit:
        settings.append(course.simulation.policy.settings)
        course.advance()
        if not course.over:
            decision = guarded.decide(course.observe())
            reasons.append(decision.reason)
            course.tune(decision.settings)
    seconds, samples, losses = zip(*map(astuple, course.looks), strict=True)
    return Trial(seconds, losses, samples, tuple(settings), tuple(reasons), job.time_limit)


def best_static(
    jobs: Sequence[Job], limits: Limits, cost: Callable[[Trial], float]
) -> tuple[Settings, dict[Settings, list[Trial]]]:
    """The oracle: the settings whose mean cost over the jobs is lowest when nobody changes them; and all trials."""
    first = jobs[0].config.sync
    every = Actions(limits).all(Settings(0, first.quorum, 1))
    trials = {s: [run_trial(with_settings(job, s), Fixed(), limits) for job in jobs] for s in every}
    best = min(every, key=lambda settings: float(np.mean([cost(trial) for trial in trials[settings]])))
    return best, trials
