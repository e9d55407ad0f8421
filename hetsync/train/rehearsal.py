"""Plans tried for some steps each, before one is chosen."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from hetsync.config.schema import Config, RunConfig
from hetsync.plan.assignment import GivenPlan
from hetsync.plan.recipe import check_cut_settings
from hetsync.plane.base import Plane
from hetsync.train.data_parallel import by_plan
from hetsync.train.job import Job
from hetsync.train.planned import PlannedJob
from hetsync.train.trainer import Trainer
from hetsync.train.workplace import Workplace

KEPT = ("seed", "plane", "device", "precision", "timeout_seconds", "profile_seconds")  # of `run`, in a rehearsal


def rehearse(plan: GivenPlan, at: Workplace, steps: int) -> float:
    """Collective: seconds of a step, of so many after one that warms up: `data.batch_size` over the samples a second
    that replicas reach together. Nothing is written."""
    samples = (steps + 2) * at.config.data.batch_size  # one more, so that each rank leaves its loop at its own time
    plain = RunConfig(samples=samples, **{name: getattr(at.config.run, name) for name in KEPT})
    config = replace(at.config, run=plain)
    if plan.file.data_parallel:
        return _whole(plan, config, at.plane, steps)
    check_cut_settings(config)
    with closing(PlannedJob(replace(at, config=config), plan, "nothing")) as job:
        return job.rehearse()


def _whole(plan: GivenPlan, config: Config, plane: Plane, steps: int) -> float:
    with Job(by_plan(config), plane, keep=False, show="nothing") as job:
        trainer = Trainer(config, job, plan, evaluates=False)
        moments = []
        for batch in trainer.batches:
            trainer.step(batch)
            moments.append(time.monotonic())
            if len(moments) > steps:
                break
        slices = job.gather((moments[-1] - moments[0]) / steps)
        rate = sum(share / seconds for share, seconds in zip(job.session.shares, slices, strict=True))
    return config.data.batch_size / rate
