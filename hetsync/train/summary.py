"""The figures of a run, as they stand in `summary.json`: one schema, which real and simulated runs fill.

What has a default here may be left out by one of the two: only real hosts have CPU time, overruns and bytes, only a
simulated run has a landscape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hetsync.balance.profile import RankProfile
from hetsync.sync.messages import NO_BOUND, Settings
from hetsync.sync.observation import mean_staleness
from hetsync.sync.recovery import Damage, Death
from hetsync.sync.rounds_rule import RoundsChange
from hetsync.train.efficiency import report_card
from hetsync.train.run_folder import Status


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """What is known before the first slice already. A job that dies leaves it."""

    status: Status
    ranks: int
    ranks_at_start: int
    plane: str | None  # None: simulated
    emulated: bool
    emulate: str | None
    samples_applied: int
    samples_expected: int | None
    shares: Sequence[int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """What a rank has besides in a job by a plan. Its passes are `step_fraction` of each sample's step."""

    replica: int
    stage: int
    step_fraction: float
    idle_fraction: float  # of training; in no pass
    activation_bytes_sent: int
    memory_bytes: int | None  # None: not counted
    predicted_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """A job's plan: what was predicted, and what came of it. `replicas`: the ranks of their stages."""

    path: str
    sha256: str
    replicas: Sequence[Sequence[Sequence[int]]]
    predicted_step_seconds: float
    measured_step_seconds: float | None  # None: there was no step
    predicted_samples_per_second: float
    bytes_per_sample: float
    communication_fraction: float  # of the predicted step, that which faster links would save


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank's own. Seconds are those of its main thread; of a simulated rank, virtual ones."""

    rank: int
    profile: RankProfile
    share: int
    samples: int
    solo_samples_per_second: float | None  # None: not measured
    train_seconds: float
    compute_seconds: float
    wait_seconds: float
    slices: int
    data_seconds: float = 0.0
    runtime_cpu_seconds: float = 0.0
    bytes_sent: int = 0
    real_seconds: float = 0.0  # the host's, within slices
    overruns: int = 0
    planned: PlannedRank | None = None
    joined_at_round: int | None = None  # in the place of another

    def row(self) -> dict[str, Any]:
        """The rank's part of a summary."""
        profile, seconds = self.profile, max(1e-9, self.train_seconds)
        return {
            "rank": self.rank,
            "host": profile.host,
            "device": profile.device,
            "emulated": profile.emulated,
            "share": self.share,
            "samples": self.samples,
            "solo_samples_per_second": self.solo_samples_per_second,
            "solo_uncertainty": profile.uncertainty,
            "load_seconds_per_sample": profile.load_seconds_per_sample,
            "device_samples_per_second": self._whole_samples / max(1e-9, self.compute_seconds),
            "train_seconds": self.train_seconds,
            "compute_fraction": self.compute_seconds / seconds,
            "wait_fraction": self.wait_seconds / seconds,
            "data_fraction": self.data_seconds / seconds,
            "runtime_cpu_fraction": self.runtime_cpu_seconds / seconds,
            "bytes_sent": self.bytes_sent,
            "slices": self.slices,
            "real_seconds": self.real_seconds,
            "overruns": self.overruns,
            **(asdict(self.planned) if self.planned is not None else {}),
            **({} if self.joined_at_round is None else {"joined_at_round": self.joined_at_round}),
        }

    def row_over(self, seconds: float) -> dict[str, Any]:
        """The same, with its speeds in the mean over a job of so many seconds."""
        return self.row() if self.joined_at_round is None else _over(self.row(), self.train_seconds, seconds)

    @property
    def _whole_samples(self) -> float:
        """Those whose whole steps would be as much work."""
        return self.samples * (self.planned.step_fraction if self.planned is not None else 1.0)


@dataclass(frozen=True, kw_only=True)
class LostRank:
    """A rank that has died, by what rank 0 knows: of its part in the job, and of how the others went on."""

    death: Death
    profile: RankProfile
    samples: int  # applied
    solo_samples_per_second: float | None
    train_seconds: float  # of the job, before
    compute_seconds: float

    def row(self) -> dict[str, Any]:
        """Its part of a summary."""
        return {
            "rank": self.death.rank,
            "host": self.profile.host,
            "device": self.profile.device,
            "emulated": self.profile.emulated,
            "share": 0,
            "samples": self.samples,
            "solo_samples_per_second": self.solo_samples_per_second,
            "solo_uncertainty": self.profile.uncertainty,
            "device_samples_per_second": self.samples / self.compute_seconds if self.compute_seconds else None,
            "train_seconds": self.train_seconds,
            "left_at_round": self.death.round,
        }

    def row_over(self, seconds: float) -> dict[str, Any]:
        """The same, with its speeds in the mean over a job of so many seconds."""
        return _over(self.row(), self.train_seconds, seconds)

    def failure(self) -> dict[str, Any]:
        """Its entry among a summary's failures."""
        told = asdict(self.death)
        kind = told.pop("cause")
        return {**told, "host": self.profile.host, "kind": kind, "action": "went on"}


def _over(row: dict[str, Any], seconds: float, all_seconds: float) -> dict[str, Any]:
    part = min(1.0, seconds / max(1e-9, all_seconds))
    speeds = ("solo_samples_per_second", "device_samples_per_second")
    return {**row, **{key: None if row[key] is None else part * row[key] for key in speeds}}


@dataclass(frozen=True, kw_only=True)
class Join:
    """A process has taken the place of a rank that had died, before `round`: so many seconds after it was asked for.
    `samples` of this rank's number were applied before."""

    rank: int
    host: str
    round: int
    seconds: float
    samples: int

    def entry(self) -> dict[str, Any]:
        """Its entry among a summary's joins."""
        told = asdict(self)
        del told["samples"]
        return told


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What was not finite on a rank, and is in no round: so many samples went out once more. With `went_back` all have
    gone back to a checkpoint for it."""

    rank: int
    host: str
    round: int
    samples: int
    went_back: bool = False

    def failure(self) -> dict[str, Any]:
        """Its entry among a summary's failures. It is looked at before a round could wait for it."""
        return {
            "rank": self.rank,
            "host": self.host,
            "kind": "not_finite",
            "round": self.round,
            "activity": "computing",
            "noticed_seconds": None,
            "recovered_seconds": None,
            "samples_returned": self.samples,
            "action": "went back" if self.went_back else "left out",
        }


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """All ranks have gone back to the checkpoint of `checkpoint_samples`, or to what they had kept in memory, as what a
    rank brought in `round` was not finite, as with it the last of those had died who kept the books, or as delay had
    lost training (`cause`), which is `told`. They went on with round `next_round`;
    so many `samples` that had been applied are trained on again."""

    cause: Literal["not_finite", "books_lost", "delay"]
    rank: int
    host: str
    round: int
    next_round: int
    samples: int
    checkpoint_samples: int
    told: str | None = None


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A message that did not arrive as its rank had sent it, after which all have gone on."""

    damage: Damage
    host: str

    def failure(self) -> dict[str, Any]:
        """Its entry among a summary's failures. It is noticed as it arrives, or with the one after it."""
        return {
            **asdict(self.damage),
            "host": self.host,
            "kind": "damaged",
            "activity": "sending",
            "noticed_seconds": None,
            "samples_returned": 0,
            "action": "went on",
        }


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run has come to."""

    job: JobFigures
    per_rank: Sequence[RankFigures]
    lost: Sequence[LostRank] = ()
    left_out: Sequence[LeftOut] = ()
    damaged: Sequence[Damaged] = ()
    rollbacks: Sequence[Rollback] = ()
    joins: Sequence[Join] = ()
    samples_before: int = 0  # applied by the jobs that this one goes on from
    rounds: int
    staleness: Mapping[int, int]  # tasks by their staleness
    settings: Settings
    metrics: Mapping[str, float]
    anchor_sha256: str | None
    wall_seconds: float
    control: Mapping[str, Any] | None = None  # what a controller beside the job did
    rounds_changes: Sequence[RoundsChange] = ()  # by rule
    landscape: Mapping[str, Any] | None = None  # of the simulated learner
    plan: PlanFigures | None = None
    ddp_bytes: float | None = None  # that each rank would sum in float32, once a batch; None: not known
    simulated: bool = False


def first_summary(job: JobFigures) -> dict[str, Any]:
    """What `summary.json` holds until the end."""
    return {**asdict(job), "shares": list(job.shares)}


def summarise(run: RunFigures) -> dict[str, Any]:
    """What `summary.json` holds; docs/reference.md explains every key."""
    ranks, settings = run.per_rank, run.settings
    rows = [figures.row() for figures in ranks]
    lost = sorted(run.lost, key=lambda lost: lost.death.rank)
    seconds = max(figures.train_seconds for figures in ranks)
    rate = (run.job.samples_applied - run.samples_before) / seconds if seconds else 0.0
    return {
        **first_summary(run.job),
        **_of_one_kind(run),
        "samples_per_second": rate,
        **report_card(rate, [*(rank.row_over(seconds) for rank in ranks), *(rank.row_over(seconds) for rank in lost)]),
        "bytes_of_ddp": sum(rank.bytes_sent for rank in ranks) / len(ranks) / run.ddp_bytes if run.ddp_bytes else None,
        "rounds": run.rounds,
        "staleness": {
            "mean": mean_staleness(run.staleness),
            "max": max(run.staleness, default=0),
            "histogram": {str(staleness): run.staleness[staleness] for staleness in sorted(run.staleness)},
        },
        "delay_bound": None if settings.delay_bound == NO_BOUND else settings.delay_bound,
        "quorum": settings.quorum,
        "accumulation": settings.accumulation,
        "fragments": settings.fragments,
        "grace": settings.grace,
        "wire": settings.wire,
        "rounds_changes": [change.told for change in run.rounds_changes],
        "metrics": dict(run.metrics),
        "anchor_sha256": run.anchor_sha256,
        "train_seconds": seconds,
        "wall_seconds": run.wall_seconds,
        "overrun_fraction": sum(rank.overruns for rank in ranks) / max(1, sum(rank.slices for rank in ranks)),
        "real_compute_cores": sum(rank.real_seconds for rank in ranks) / max(1e-9, seconds),
        "failures": sorted(
            [
                *(rank.failure() for rank in run.lost),
                *(left.failure() for left in run.left_out),
                *(message.failure() for message in run.damaged),
            ],
            key=lambda failure: failure["round"],
        ),
        "rollbacks": [asdict(rollback) for rollback in run.rollbacks],
        "joins": [join.entry() for join in run.joins],
        "per_rank": sorted([*rows, *(rank.row() for rank in lost)], key=lambda row: row["rank"]),
    }


def _of_one_kind(run: RunFigures) -> dict[str, Any]:
    """The keys that are there for some runs only."""
    keys = {
        "control": run.control,
        "landscape": run.landscape,
        "plan": asdict(run.plan) if run.plan is not None else None,
        "simulated": run.simulated or None,
    }
    return {key: value for key, value in keys.items() if value is not None}
