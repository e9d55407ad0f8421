"""What a job runs of a plan: which part of it is whose, and what the evaluator says of it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hetsync.balance.profile import RankProfile
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.emulation.cluster import Cluster, DeviceGroup
from hetsync.plan.blocks import Cut
from hetsync.plan.division import Division
from hetsync.plan.evaluate import Costs, Evaluator
from hetsync.plan.placement import Placement, Replica, place
from hetsync.plan.plan_file import PlanFile, mistakes_in, read_plan
from hetsync.plan.recipe import plannable_model, weights_of
from hetsync.plan.schedule import micro_batch_sizes
from hetsync.plane.base import Messages, decided_by_first


@dataclass(frozen=True)
class GivenPlan:
    """A plan file as a job was given it. `text`: what it held."""

    path: Path
    file: PlanFile
    sha256: str
    text: str


@dataclass(frozen=True)
class Assignment:
    """A plan as a job runs it.

    `costs` are those that the evaluator predicts; `weight_in_loss` as in `PlannableModel`.
    """

    plan: GivenPlan
    cut: Cut
    placement: Placement
    evaluator: Evaluator
    costs: Costs
    weight_in_loss: str | None = None

    @property
    def communication_fraction(self) -> float:
        """Part of a step that would be saved if links cost nothing."""
        one = self.evaluator
        free = dataclasses.replace(one.cluster, link=None, links=())
        costs = Evaluator(one.graph, one.block_costs, free, one.step_times, one.training).evaluate(self.placement)
        return 1 - costs.step_seconds / self.costs.step_seconds

    def profiles_of(self, profiles: Sequence[RankProfile]) -> list[RankProfile]:
        """The ranks as the job has them: an emulated one takes for a whole step what its passes and update do."""
        if not any(profile.emulated for profile in profiles):
            return list(profiles)
        return [dataclasses.replace(each, time=self.evaluator.whole_step(n)) for n, each in enumerate(profiles)]

    def place_of(self, rank: int) -> tuple[int, int]:
        """Indices of a rank's replica, and of its stage in that."""
        return next(
            (index, number)
            for index, replica in enumerate(self.placement.replicas)
            for number, stage in enumerate(replica.stages)
            if rank in stage.ranks
        )

    def replica_of(self, rank: int) -> Replica:
        return self.placement.replicas[self.place_of(rank)[0]]

    def speaks(self, rank: int) -> bool:
        """Is it the first of the ranks that share its stage, which speaks for these?"""
        replica, stage = self.place_of(rank)
        return self.placement.replicas[replica].stages[stage].ranks[0] == rank

    def ranks_of_stage(self, rank: int) -> int:
        """How many ranks hold the stage that this one holds."""
        replica, stage = self.place_of(rank)
        return len(self.placement.replicas[replica].stages[stage].ranks)

    def division_of(self, rank: int) -> Division:
        """Of micro-batches among the ranks of a rank's replica."""
        replica = self.replica_of(rank)
        division = Division([stage.ranks for stage in replica.stages], self.evaluator.times)
        return division.of_slices(_sizes_of(replica))

    def share_of(self, rank: int) -> int:
        """Samples of a slice that go through a rank."""
        return self.division_of(rank).share(self.place_of(rank)[1], rank, _sizes_of(self.replica_of(rank)))

    def parts_of_passes(self, rank: int) -> tuple[float, float]:
        """Of the whole model's passes, those that are the forward and the backward passes of the rank's stage."""
        index, stage = self.place_of(rank)
        return self.evaluator.parts_of_passes(self.placement.replicas[index])[stage]

    def update_seconds(self, rank: int) -> float:
        """That the optimizer's update of the rank's stage takes."""
        index, stage = self.place_of(rank)
        return self.evaluator.update_of(self.placement.replicas[index], stage, rank)


def _sizes_of(replica: Replica) -> tuple[int, ...]:
    """Of the micro-batches of a full slice."""
    return micro_batch_sizes(replica.share or 0, replica.micro_batches)


def given_plan(path: Path, messages: Messages) -> GivenPlan:
    """Collective: the plan that rank 0 reads. UserError where it cannot be, or is of other ranks than the job's."""

    def read() -> GivenPlan:
        plan = read_plan(path)
        with mistakes_in(path):
            plan.check_ranks(messages.size)
        content = path.read_bytes()
        return GivenPlan(path, plan, hashlib.sha256(content).hexdigest(), content.decode())

    return decided_by_first(messages, read)


def check_model(plan: GivenPlan, config: Config, model: torch.nn.Module, ranks: int) -> None:
    """UserError where the plan is of another model or batch."""
    with mistakes_in(plan.path):
        plan.file.check_job(ranks, config.data.batch_size, config.model.name, weights_of(model))


def assign(
    plan: GivenPlan,
    config: Config,
    built: Data,
    model: torch.nn.Module,
    cluster: Cluster,
    profiles: Sequence[RankProfile],
    messages: Messages,
) -> Assignment:
    """Collective: the plan for this model and these ranks. UserError where they do not fit."""
    plannable = plannable_model(config, built, model, messages.size, messages)
    with mistakes_in(plan.path):
        placement = place(plan.file, plannable.cut.graph)
        times = [profile.time for profile in profiles]
        evaluator = Evaluator(plannable.cut.graph, plannable.costs, cluster, times, plannable.training)
        evaluator.check_hosts(placement)
        placement = evaluator.with_shares(placement)
        costs = evaluator.evaluate(placement)
        evaluator.check_memory(costs)
    return Assignment(plan, plannable.cut, placement, evaluator, costs, plannable.weight_in_loss)


def real_cluster(profiles: Sequence[RankProfile]) -> Cluster:
    """Ranks as they were measured, with links that cost nothing: these are not measured at a job's start."""
    devices = tuple(DeviceGroup(f"rank {rank}", host=profile.host) for rank, profile in enumerate(profiles))
    return Cluster("of this job", "measured at its start", devices)
