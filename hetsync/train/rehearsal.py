"""A data-parallel plan tried for some steps, before one is chosen."""

from __future__ import annotations

import time
from dataclasses import replace

from hetsync.config.schema import Config, RunConfig
from hetsync.plan.assignment import GivenPlan
from hetsync.plane.base import Plane
from hetsync.train.data_parallel import by_shares
from hetsync.train.job import Job
from hetsync.train.trainer import Trainer

KEPT = ("seed", "plane", "device", "precision", "timeout_seconds", "profile_seconds")  # of `run`, in a rehearsal


def rehearse(plan: GivenPlan, config: Config, plane: Plane, steps: int) -> float:
    """Collective: seconds of a step, of so many after one that warms up. Nothing is written."""
    samples = (steps + 2) * config.data.batch_size  # one more, so that nothing is evaluated at the end
    plain = RunConfig(samples=samples, **{name: getattr(config.run, name) for name in KEPT})
    config = replace(config, run=plain)
    with Job(by_shares(config, plan), plane, keep=False, show="nothing") as job:
        trainer = Trainer(config, job, plan)
        moments = []
        for batch in trainer.batches:
            trainer.step(batch)
            moments.append(time.monotonic())
            if len(moments) > steps:
                break
        slices = job.gather((moments[-1] - moments[0]) / max(1, len(moments) - 1))
        rate = sum(share / seconds for share, seconds in zip(job.session.shares, slices, strict=True))
    return config.data.batch_size / rate
