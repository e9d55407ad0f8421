"""A simulated job under a controller, window by window, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from hetsync.control.actions import Actions, Limits
from hetsync.control.baselines import Fixed
from hetsync.control.controller import Controller
from hetsync.control.envelope import Envelope
from hetsync.control.learning.jobs import Job, with_settings
from hetsync.errors import UserError
from hetsync.sync.messages import Settings
from hetsync.sync.observation import Observation

LOSS_SAMPLES = 4  # taken in each window
# A job that has not applied its samples within so many times its time limit is given up.
PATIENCE = 5


@dataclass(frozen=True)
class LossSample:
    """At a moment of virtual time: samples applied, and the loss of the weights that all ranks share."""

    seconds: float
    samples: int
    loss: float


class Episode:
    """A job under way, as its controller meets it: window by window. It never sees `loss_samples`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.simulation = job.start()
        self.diverged = False
        self.loss_samples: list[LossSample] = []
        self._noise = np.random.default_rng(job.config.run.seed)

    @property
    def over(self) -> bool:
        """All samples are applied, or the loss is not finite, which ends real jobs too."""
        return self.diverged or self.simulation.ended

    @property
    def late(self) -> bool:
        return self.simulation.now >= self.job.time_limit * (1 - 1e-9)

    @property
    def loss(self) -> float:
        """Mean of a window's samples: what validation would tell."""
        last = [sample.loss for sample in self.loss_samples[-LOSS_SAMPLES:]]
        return math.fsum(last) / len(last)

    def advance(self) -> None:
        """A window."""
        for _ in range(LOSS_SAMPLES):
            if not self.over:
                self._advance(self.job.window_seconds / LOSS_SAMPLES)

    def _advance(self, seconds: float) -> None:
        simulation = self.simulation
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                simulation.advance(seconds=seconds)
                loss = simulation.learner.evaluate()["loss"]
        except UserError:
            loss = math.inf
        self.diverged = not math.isfinite(loss)
        self.loss_samples.append(
            LossSample(simulation.now, simulation.machine.ledger.applied, loss if loss < math.inf else math.inf)
        )

    def observe(self) -> Observation:
        """What has happened since the last call, as far as this job's controller is told."""
        job = self.job
        with np.errstate(over="ignore"):
            seen = self.simulation.observe()
        factors = np.exp(job.loss_noise * self._noise.standard_normal(len(seen.losses)))
        losses = tuple(float(loss) for loss in np.array(seen.losses) * factors)
        return replace(seen, losses=losses, noise_scale=seen.noise_scale if job.knows_noise else None)

    def tune(self, settings: Settings) -> None:
        if settings != self.simulation.machine.settings and not self.over:
            self.simulation.tune(settings)


@dataclass(frozen=True)
class EpisodeResult:
    """A job's episode.

    Args:
        seconds: Virtual time of each sample of the loss.
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
        smooth = np.convolve(self.losses, np.full(LOSS_SAMPLES, 1 / LOSS_SAMPLES), "valid")
        below = np.flatnonzero(smooth <= target)
        if not below.size:
            return math.inf
        index = int(below[0])
        after = self.seconds[index + LOSS_SAMPLES - 1]
        if index == 0:
            return after
        before, high, low = self.seconds[index + LOSS_SAMPLES - 2], float(smooth[index - 1]), float(smooth[index])
        return before + (after - before) * (high - target) / (high - low)

    def _backwards(self) -> Sequence[tuple[float, float]]:
        return list(zip(self.seconds, self.losses, strict=True))[::-1]


def run_episode(episode: Episode, controller: Controller, limits: Limits) -> EpisodeResult:
    """The job to its end, with a decision a window, within the limits."""
    job, guarded = episode.job, Envelope(controller, limits)
    settings: list[Settings] = []
    reasons: list[str] = []
    while not episode.over and episode.simulation.now < PATIENCE * job.time_limit:
        settings.append(episode.simulation.machine.settings)
        episode.advance()
        if not episode.over:
            decision = guarded.decide(episode.observe())
            reasons.append(decision.reason)
            episode.tune(decision.settings)
    seconds, samples, losses = zip(*map(astuple, episode.loss_samples), strict=True)
    return EpisodeResult(seconds, losses, samples, tuple(settings), tuple(reasons), job.time_limit)


def best_static(
    jobs: Sequence[Job], limits: Limits, cost: Callable[[EpisodeResult], float]
) -> tuple[Settings, dict[Settings, list[EpisodeResult]]]:
    """The oracle: the settings whose mean cost over the jobs is lowest when nobody changes them; and all results."""
    first = jobs[0].config.sync
    every = Actions(limits).all(Settings(0, first.first_quorum, 1))
    results = {s: [run_episode(Episode(with_settings(job, s)), Fixed(), limits) for job in jobs] for s in every}
    best = min(every, key=lambda settings: float(np.mean([cost(result) for result in results[settings]])))
    return best, results
