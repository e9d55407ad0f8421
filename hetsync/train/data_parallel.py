"""Jobs by a data-parallel plan, whose replicas are ranks with a share each: they train as jobs without a plan do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hetsync.balance.profile import RankProfile
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.emulation.cluster import Cluster
from hetsync.errors import UserError
from hetsync.plan.assignment import Assignment, GivenPlan, assign, check_model, real_cluster
from hetsync.plan.recipe import check_shares
from hetsync.train.job import Job


def by_plan(config: Config) -> Config:
    """A job's settings: the shares are the plan's, and stay. UserError for what no plan knows."""
    check_shares(config)
    if config.fault.replace:
        raise UserError(
            "fault.replace is true, which jobs by a plan (plan.file) do not know: give false, and resume with more"
            " ranks"
        )
    return replace(config, sync=replace(config.sync, rebalance=False))


def follow(plan: GivenPlan, config: Config, job: Job, data: Data, model: torch.nn.Module) -> None:
    """`config`: the recipe's own. UserError where the plan is of another model or batch."""
    check_model(plan, config, model, job.size)

    def assigned(profiles: Sequence[RankProfile], cluster: Cluster | None) -> Assignment:
        found = real_cluster(profiles) if cluster is None else cluster
        return assign(plan, config, data, model, found, profiles, job.plane)

    job.follow(assigned)
