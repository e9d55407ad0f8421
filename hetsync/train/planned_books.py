"""What a job by a plan tells of itself: progress, telemetry, trackers' figures, and its summary."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import solo_rates
from hetsync.errors import one_sentence
from hetsync.files import SUMMARY, write_atomically
from hetsync.plan.assignment import Assignment
from hetsync.replica.base import Replica
from hetsync.sync.messages import NO_BOUND, Settings, Task
from hetsync.sync.observation import mean_staleness
from hetsync.telemetry import Telemetry
from hetsync.train.accounts import TrainingClock
from hetsync.train.display import Shows, make_display
from hetsync.train.evaluation import record
from hetsync.train.plan_figures import compared, plan_figures, predicted
from hetsync.train.run_folder import Status, mark_failed
from hetsync.train.summary import (
    JobFigures,
    PlannedRank,
    RankFigures,
    RunFigures,
    first_summary,
    summarise,
)
from hetsync.train.terminal import Progress
from hetsync.train.trackers import Forgiven, trackers_of
from hetsync.train.tracking import LOG_SECONDS
from hetsync.train.workplace import Workplace

IN_STEP = Settings(delay_bound=0, quorum=1.0, accumulation=1)  # replicas wait for each other at each step


@dataclass
class Since:
    """Since figures were logged last."""

    applied: int
    seconds: float = 0.0  # of training, at that time
    loss_sum: float = 0.0  # over samples


class Books:
    """One rank's; rank 0 shows and writes.

    Attributes:
        applied, steps: Samples, and optimizer steps, of the run so far.
        shares: Samples of each replica in a slice.
        clock: Of training, by this process.
        metrics: Of the last evaluation.
        memory_bytes: What this rank has needed.
        staleness: Contributions by their staleness, of this process.
        round_bytes_sent, runtime_cpu_seconds: Of this rank's rounds in delayed mode, as far as they are known.
    """

    def __init__(
        self,
        at: Workplace,
        assignment: Assignment,
        replica: Replica,
        profiles: Sequence[RankProfile],
        total: int,
        shows: Shows,
        settings: Settings = IN_STEP,
    ) -> None:
        self._at, self._assignment, self._replica, self._profiles = at, assignment, replica, profiles
        self._rank, self._total = at.plane.rank, total
        progress = at.loaded.progress if at.loaded is not None else None
        self.applied = self._applied_before = progress.samples_applied if progress else 0
        self.steps = self._steps_before = progress.version if progress else 0
        self._seconds_before = progress.train_seconds if progress else 0.0
        self.shares = tuple(each.share or 0 for each in assignment.placement.replicas)
        self.clock = TrainingClock()
        self.metrics: dict[str, float] = {}
        self.memory_bytes = 0
        self.settings = settings
        self.staleness: Mapping[int, int] = {}
        self.round_bytes_sent, self.runtime_cpu_seconds = 0, 0.0
        self._solo = solo_rates(sum(self.shares), profiles)
        self._data_seconds, self._samples = 0.0, 0  # of this rank
        self._display = make_display(shows, total, self.applied)
        path = None if at.folder is None else at.folder / "telemetry" / f"rank-{self._rank:04d}.jsonl"
        self._telemetry = Telemetry(path)
        self._trackers: list[Forgiven] = []
        self._since = Since(self.applied)

    @property
    def own_share(self) -> int:
        return self._assignment.share_of(self._rank)

    @property
    def train_seconds(self) -> float:
        """Of the run so far."""
        return self._seconds_before + self.clock.seconds()

    def open(self) -> None:
        """Training is about to begin."""
        at, folder = self._at, self._at.folder
        profile = self._profiles[self._rank]
        self._telemetry.record(
            "profile",
            host=profile.host,
            device=profile.device,
            share=self.own_share,
            solo_samples_per_second=self._solo[self._rank],
            solo_uncertainty=profile.uncertainty,
            samples_applied=self.applied,
            delay_bound=None if self.settings.delay_bound == NO_BOUND else self.settings.delay_bound,
            accumulation=self.settings.accumulation,
        )
        if self._rank != 0:
            return
        self._trackers = trackers_of(at.config.run.track, folder, self.applied)
        if folder is not None:
            write_atomically(folder / SUMMARY, json.dumps(first_summary(self._job(Status.RUNNING)), indent=1))
            self.say(f"the run folder is {folder}")
        shares = [self._assignment.share_of(rank) for rank in range(at.plane.size)]
        self._display.ranks(self._profiles, shares, self._solo)
        self.say(predicted(self._assignment))

    def say(self, text: str) -> None:
        self._display.say(text)

    # While training runs.

    def slice_done(
        self, samples: int, own_samples: int, loss: float, rate: float, seconds: Mapping[str, float]
    ) -> None:
        """A step of all has been made on `samples`, `own_samples` of which went through this rank. `rate` is the
        learning rate; `seconds` this rank's: compute, data, wait."""
        self.applied += samples
        self.steps += 1
        self.staleness = {0: (self.steps - self._steps_before) * len(self.shares)}
        self._samples += own_samples
        self._data_seconds += seconds["data"]
        self._telemetry.record(
            "piece",
            piece=self.steps - 1,
            samples=own_samples,
            slices=1,
            version=self.steps,
            **{f"{name}_seconds": round(value, 6) for name, value in seconds.items()},
            loss=loss,
        )
        if self._rank != 0:
            return
        self._since.loss_sum += loss * samples
        if self._display.due():
            self._display.progress(self._moment(loss))
        if self.clock.seconds() - self._since.seconds >= LOG_SECONDS:
            self._log(rate)

    def task_done(self, task: Task, own_samples: int, version: int, loss: float, seconds: Mapping[str, float]) -> None:
        """Delayed mode: this rank's replica has computed a task, with this mean loss, on weights that have seen
        `version`; `own_samples`, `seconds` as above."""
        self._samples += own_samples
        self._data_seconds += seconds["data"]
        self._telemetry.record(
            "piece",
            piece=task.number,
            samples=own_samples,
            slices=len(task.slices),
            version=version,
            **{f"{name}_seconds": round(value, 6) for name, value in seconds.items()},
            loss=loss,
        )

    def progress(self, applied: int, loss: float | None, rate: float, staleness: Mapping[int, int]) -> None:
        """Delayed mode, on rank 0 between tasks: so much is applied, and `loss` is the mean since the last call."""
        if loss is not None:
            self._since.loss_sum += loss * (applied - self.applied)
        self.applied, self.staleness = applied, staleness
        if self._display.due():
            self._display.progress(self._moment(loss))
        if self.clock.seconds() - self._since.seconds >= LOG_SECONDS:
            self._log(rate)

    def come_to_rest(self, applied: int, rounds: int, staleness: Mapping[int, int]) -> None:
        """Delayed mode: training has halted with so many samples applied in all, by so many rounds."""
        self.applied, self.steps, self.staleness = applied, rounds, staleness

    @property
    def telemetry(self) -> Telemetry:
        return self._telemetry

    def _moment(self, loss: float | None) -> Progress:
        return Progress(
            samples_applied=self.applied,
            samples_expected=self._total,
            already=self._applied_before,
            seconds=self.clock.seconds(),
            loss=loss,
            staleness=mean_staleness(self.staleness),
            capable=None,  # stages are told of at the end only
            slowest=None,
        )

    def _log(self, rate: float | None = None) -> None:
        since, seconds = self._since, self.clock.seconds()
        if (samples := self.applied - since.applied) and seconds > since.seconds:
            speed = samples / (seconds - since.seconds)
            values = {
                "train/loss": since.loss_sum / samples,
                "speed/samples_per_second": speed,
                **({} if rate is None else {"train/learning_rate": rate}),
            }
            self._track(values)
        self._since = Since(self.applied, seconds)

    def _track(self, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(values, self.applied, self.train_seconds)

    def evaluated(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        if self._rank == 0:
            sentence = record(self._telemetry, self.applied, self.train_seconds, metrics)
            self._track({f"evaluation/{name}": value for name, value in metrics.items()})
            self._display.evaluated(sentence, self.applied, metrics)

    def rested(self, reason: str, began: float) -> None:
        """All ranks have been at rest since the moment `began`."""
        self._telemetry.record("rest", reason=reason, seconds=round(time.monotonic() - began, 6))

    # The end.

    def close(self, status: Status, weights_sha256: str) -> None:
        """Collective: the summary is written and shown."""
        per_rank = self._at.plane.gather_objects(self._rank_figures())
        self._telemetry.close()
        if self._rank != 0:
            return
        self._log()
        for tracker in self._trackers:
            tracker.close()
        summary = summarise(self._run_figures(status, per_rank, weights_sha256))
        if self._at.folder is not None:
            write_atomically(self._at.folder / SUMMARY, json.dumps(summary, indent=1))
        self._display.close(summary)
        if (step := summary["plan"]["measured_step_seconds"]) is not None:
            self.say(compared(self._assignment, step))
        if status is Status.STOPPED:
            self.say(f"stopped and saved; go on with: hetsync-train --resume {self._at.folder}")

    def failed(self, failure: BaseException) -> None:
        """The job is about to end by this."""
        error = one_sentence(f"{type(failure).__name__}: {failure}")
        self._telemetry.record("failure", error=error)
        self._telemetry.close()
        self._display.failed(error)
        if self._at.folder is not None:
            mark_failed(self._at.folder)
        self._display.close(None)

    def _job(self, status: Status) -> JobFigures:
        at = self._at
        return JobFigures(
            status=status,
            ranks=at.plane.size,
            ranks_at_start=at.plane.size,
            plane=at.plane.described,
            emulated=at.cluster is not None,
            emulate=at.config.emulation.profile,
            samples_applied=self.applied,
            samples_expected=self._total,
            shares=self.shares,
            seed=at.config.run.seed,
        )

    def _run_figures(self, status: Status, per_rank: Sequence[RankFigures], weights_sha256: str) -> RunFigures:
        return RunFigures(
            job=self._job(status),
            per_rank=per_rank,
            samples_before=self._applied_before,
            rounds=self.steps,
            staleness=self.staleness,
            settings=self.settings,
            metrics=self.metrics,
            anchor_sha256=weights_sha256,
            wall_seconds=time.monotonic() - self._at.began,
            plan=plan_figures(self._assignment, self._step_seconds(per_rank)),
        )

    def _step_seconds(self, per_rank: Sequence[RankFigures]) -> float | None:
        """Of a batch, which may have gone out in shorter slices."""
        steps = (self.applied - self._applied_before) / sum(self.shares)
        return max(figures.train_seconds for figures in per_rank) / steps if steps else None

    def _rank_figures(self) -> RankFigures:
        rank, passes, seconds = self._rank, self._replica.passes, self.clock.seconds()
        index, stage = self._assignment.place_of(rank)
        return RankFigures(
            rank=rank,
            profile=self._profiles[rank],
            share=self.own_share,
            samples=self._samples,
            solo_samples_per_second=self._solo[rank],
            train_seconds=seconds,
            compute_seconds=passes.seconds,
            wait_seconds=max(0.0, seconds - passes.seconds - self._data_seconds),
            data_seconds=self._data_seconds,
            bytes_sent=self._replica.activation_bytes_sent + self.round_bytes_sent,
            runtime_cpu_seconds=self.runtime_cpu_seconds,
            slices=passes.slices,
            real_seconds=passes.real_seconds,
            overruns=passes.overruns,
            planned=PlannedRank(
                replica=index,
                stage=stage,
                step_fraction=sum(self._assignment.parts_of_passes(rank)),
                idle_fraction=max(0.0, 1 - passes.seconds / seconds) if seconds else 0.0,
                activation_bytes_sent=self._replica.activation_bytes_sent,
                memory_bytes=self.memory_bytes,
                predicted_memory_bytes=self._assignment.costs.memory_bytes[rank],
            ),
        )
