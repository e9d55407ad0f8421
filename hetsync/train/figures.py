"""What the summary of a job is made of, asked of its parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hetsync.balance.device import Device
from hetsync.balance.profile import RankProfile
from hetsync.config.schema import Config
from hetsync.sync.coordinator import Coordinator
from hetsync.sync.digests import weights_sha256
from hetsync.sync.tail import trained_values
from hetsync.train.evaluation import Evaluations
from hetsync.train.plan_figures import plan_figures
from hetsync.train.rollback import Rollbacks
from hetsync.train.run_folder import Status
from hetsync.train.session import Session
from hetsync.train.summary import (
    Damaged,
    JobFigures,
    Join,
    LeftOut,
    LostRank,
    PlannedRank,
    RankFigures,
    RunFigures,
)
from hetsync.train.telling import Telling
from hetsync.train.workplace import Workplace

if TYPE_CHECKING:  # it loads what only plans need
    from hetsync.plan.assignment import Assignment


class Figures:
    def __init__(
        self,
        *,
        at: Workplace,
        config: Config,
        total: int | None,
        session: Session,
        device: Device,
        profiles: Sequence[RankProfile],
        evaluations: Evaluations,
        telling: Telling,
        rollbacks: Rollbacks,
        joins: Sequence[Join],
        joined: bool,
        assignment: Assignment | None,
    ) -> None:
        """`total` samples to train on, if that is known. `profiles` and `joins` may change while the job runs.
        `joined`: this rank did, while the job ran. `assignment`: of a data-parallel plan that it follows."""
        self._at = at
        self._config = config
        self._total = total
        self._session = session
        self._device = device
        self._profiles = profiles
        self._evaluations = evaluations
        self._telling = telling
        self._rollbacks = rollbacks
        self._joins = joins
        self._joined = joined
        self._assignment = assignment

    def job(self, status: Status = Status.RUNNING) -> JobFigures:
        ended_by_script = self._total is None and status is Status.FINISHED
        return JobFigures(
            status=status,
            ranks=self._at.plane.size,
            ranks_at_start=len(self._profiles),
            plane=self._at.plane.described,
            emulated=self._at.cluster is not None,
            emulate=self._config.emulation.profile,
            samples_applied=self._session.applied,
            samples_expected=self._session.applied if ended_by_script else self._total,
            shares=self._session.shares,
            seed=self._config.run.seed,
        )

    def run(self) -> RunFigures | None:
        """Collective, at rest; on rank 0."""
        session = self._session
        told = session.meet("the figures of the run", self._rank())
        per_rank = [figures for figures in told if figures.rank in self._at.plane.members]
        if session.coordinator is None:
            return None
        plan = self._assignment
        return RunFigures(
            job=self.job(Status.STOPPED if session.stopping else Status.FINISHED),
            per_rank=per_rank,
            lost=self._lost_ranks(session.coordinator),
            joins=self._joins,
            left_out=[
                LeftOut(
                    rank=left.rank,
                    host=self._profiles[left.rank].host,
                    round=left.round,
                    samples=left.samples,
                    went_back=self._config.fault.goes_back,
                )
                for left in session.left_out
            ],
            rollbacks=self._rollbacks.known,
            damaged=[Damaged(damage=damage, host=self._profiles[damage.rank].host) for damage in session.damages],
            samples_before=session.terms.applied,
            rounds=session.version,
            staleness=session.coordinator.machine.staleness,
            settings=replace(
                session.settings.in_force, fragments=min(session.settings.fragments, session.engine.fragments)
            ),
            metrics=self._evaluations.metrics,
            anchor_sha256=weights_sha256(session.engine.anchor),
            wall_seconds=time.monotonic() - self._at.began,
            control=session.control.summary() if session.control is not None else None,
            rounds_changes=session.rounds_changes,
            plan=None if plan is None else plan_figures(plan, self._step_seconds(per_rank)),
            ddp_bytes=self._ddp_bytes() if plan is None and len(self._profiles) > 1 else None,
        )

    def _ddp_bytes(self) -> float:
        session = self._session
        batches = (session.applied - session.terms.applied) / session.terms.batch_size
        return 4 * trained_values(session.model) * batches

    def _step_seconds(self, per_rank: Sequence[RankFigures]) -> float | None:
        """Of a batch, which may have gone out in shorter slices."""
        seconds = max(figures.train_seconds for figures in per_rank)
        steps = (self._session.applied - self._session.terms.applied) / self._config.data.batch_size
        return seconds / steps if steps else None

    def _lost_ranks(self, coordinator: Coordinator) -> list[LostRank]:
        lost: list[LostRank] = []
        for death, seconds in self._session.deaths:
            rank = death.rank
            before = sum(other.samples for other in lost if other.death.rank == rank)  # of whom it had replaced
            joins = [join for join in self._joins if join.rank == rank]
            later = [join.samples for join in joins if join.round >= death.round]
            applied = later[0] if later else coordinator.machine.samples_by_rank[rank]
            # Of all samples of its number only who has led from the start has heard.
            heard = self._at.plane.rank == 0 and not self._joined and not joins
            lost.append(
                LostRank(
                    death=death,
                    profile=self._profiles[rank],
                    samples=applied - before,
                    solo_samples_per_second=self._telling.solo_of(rank),
                    train_seconds=seconds,
                    compute_seconds=coordinator.device_seconds[rank] if heard else 0.0,
                )
            )
        return lost

    def _rank(self) -> RankFigures:
        session, rank, totals, engine = self._session, self._at.plane.rank, self._session.totals, self._session.engine
        return RankFigures(
            rank=rank,
            profile=self._profiles[rank],
            share=session.shares[rank],
            samples=totals.samples,
            solo_samples_per_second=self._telling.solo_of(rank),
            train_seconds=totals.train_seconds,
            compute_seconds=totals.compute_seconds,
            wait_seconds=engine.timer.wait_seconds,
            data_seconds=totals.data_seconds,
            runtime_cpu_seconds=engine.cpu_seconds(),
            bytes_sent=engine.bytes_sent,
            slices=self._device.slices,
            real_seconds=self._device.real_seconds,
            overruns=self._device.overruns,
            joined_at_round=session.terms.version if self._joined else None,
            planned=None if self._assignment is None else self._planned(self._assignment),
        )

    def _planned(self, assignment: Assignment) -> PlannedRank:
        rank, totals, weights = self._at.plane.rank, self._session.totals, next(self._session.model.parameters())
        index, stage = assignment.place_of(rank)
        busy = totals.compute_seconds / totals.train_seconds if totals.train_seconds else 1.0
        return PlannedRank(
            replica=index,
            stage=stage,
            step_fraction=1.0,
            idle_fraction=max(0.0, 1 - busy),
            activation_bytes_sent=0,
            memory_bytes=torch.cuda.max_memory_allocated(weights.device) if weights.is_cuda else None,
            predicted_memory_bytes=assignment.costs.memory_bytes[rank],
        )
