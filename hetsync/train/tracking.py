"""What a job tells its trackers: figures of all ranks, every few seconds and at the end, from rank 0's main thread."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetsync.errors import UserError
from hetsync.sync.messages import NO_BOUND
from hetsync.sync.observation import mean_staleness
from hetsync.train.session import Session
from hetsync.train.trackers import Tracker

LOG_SECONDS = 5.0
GROUPS = ("train/", "speed/", "sync/", "share/", "memory/", "evaluation/")  # how the job's own names begin


@dataclass(frozen=True)
class Totals:
    """Since this process began to train."""

    applied: int
    seconds: float = 0.0
    loss: float = 0.0
    loss_samples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


class Tracking:
    """Figures are of the time since they were logged last. Of values of the user's own it logs the means over it."""

    def __init__(self, trackers: Sequence[Tracker], session: Session, device: torch.device, before: float) -> None:
        """`before`: seconds of training by the jobs that this one goes on from."""
        self._trackers = trackers
        self._session = session
        self._device = device
        self._before = before
        self._logged = Totals(session.terms.applied)
        self._logged_at = time.monotonic()
        self._values: dict[str, list[float]] = {}

    def between_batches(self) -> None:
        if time.monotonic() >= self._logged_at + LOG_SECONDS:
            self.log_figures()

    def log_figures(self) -> None:
        """All that is known by now."""
        now = self._totals()
        self._log({**self._since_logged(now), **self._state(), **self._means()}, now.applied, now.seconds)
        self._logged, self._logged_at = now, time.monotonic()

    def log_metrics(self, metrics: Mapping[str, float], applied: int, seconds: float) -> None:
        """Of an evaluation after so many seconds of this process."""
        self._log({f"evaluation/{name}": value for name, value in metrics.items()}, applied, seconds)

    def add(self, values: Mapping[str, float]) -> None:
        """The user's own. UserError for names that are taken."""
        for name, value in values.items():
            if name.startswith(GROUPS) or name in ("samples", "seconds"):
                raise UserError(f"job.log got {name}, a name that is kept for the job's own figures: give it another")
            self._values.setdefault(name, []).append(value)

    def log_values(self) -> None:
        """The user's own, at once."""
        now = self._totals()
        self._log(self._means(), now.applied, now.seconds)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _log(self, values: Mapping[str, float], applied: int, seconds: float) -> None:
        if values:
            for tracker in self._trackers:
                tracker.log(values, applied, self._before + seconds)

    def _means(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return {name: sum(found) / len(found) for name, found in values.items()}

    def _totals(self) -> Totals:
        """While the communication thread goes on counting: each of these is read in one step."""
        coordinator = self._session.coordinator
        assert coordinator is not None
        machine, (loss, samples) = coordinator.machine, coordinator.losses
        staleness = Counter(dict(machine.staleness))
        return Totals(machine.ledger.applied, self._session.seconds_training(), loss, samples, staleness)

    def _since_logged(self, now: Totals) -> dict[str, float]:
        before, figures = self._logged, {}
        if now.loss_samples > before.loss_samples:
            figures["train/loss"] = (now.loss - before.loss) / (now.loss_samples - before.loss_samples)
        if now.applied > before.applied and now.seconds > before.seconds:
            rate = (now.applied - before.applied) / (now.seconds - before.seconds)
            figures["speed/samples_per_second"] = rate
            figures["sync/staleness"] = mean_staleness(now.staleness - before.staleness)
        return figures

    def _state(self) -> dict[str, float]:
        coordinator = self._session.coordinator
        assert coordinator is not None
        settings, members = coordinator.machine.settings, dict(coordinator.machine.members)
        figures: dict[str, float] = {}
        applied, seconds = coordinator.machine.ledger.applied, self._session.seconds_training()
        if (capable := coordinator.device_rate()) and seconds:
            figures["speed/efficiency"] = (applied - self._session.terms.applied) / seconds / capable
        for number, steps in enumerate(self._session.tasks.steps):
            figures[f"train/learning_rate{f'_{number}' if number else ''}"] = steps.scheduled[0]
        figures["sync/accumulation"] = settings.accumulation
        if settings.delay_bound != NO_BOUND:
            figures["sync/delay_bound"] = settings.delay_bound
        figures |= {f"share/rank_{rank}": member.share for rank, member in members.items()}
        figures["memory/max_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._device.type == "cuda":
            figures["memory/cuda_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return {name: float(value) for name, value in figures.items()}
