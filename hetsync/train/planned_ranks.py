"""Who the ranks of a job by a plan are: how fast each is alone, what connects them, and the part that each runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hetsync.balance.device import marks_on
from hetsync.balance.profile import RankProfile
from hetsync.data import Data
from hetsync.emulation.channels import EmulatedChannels
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.jitter import jitter_sampler
from hetsync.errors import UserError
from hetsync.plan.assignment import Assignment, real_cluster
from hetsync.plane.base import Channels
from hetsync.profiling.measure import Subject, measure_ranks
from hetsync.replica.base import Replica
from hetsync.replica.passes import EmulatedPasses, Passes, QueueingPasses
from hetsync.replica.scores import forward_outside_of_training
from hetsync.replica.staged import StagedReplica, Stages
from hetsync.replica.whole import WholeReplica
from hetsync.train.workplace import Workplace


def measured(at: Workplace, model: torch.nn.Module, data: Data, optimizer: torch.optim.Optimizer) -> list[RankProfile]:
    """Collective: what each rank reaches with the whole model, had it the memory."""
    cluster = None if at.cluster is None else at.cluster.without_limits()
    return measure_ranks(Subject(at.plane, at.config, model, data, at.place, [optimizer]), cluster)


def cluster_of(at: Workplace, profiles: Sequence[RankProfile]) -> Cluster:
    """That is emulated, or else of the ranks as they are."""
    return real_cluster(profiles) if at.cluster is None else at.cluster


def open_channels(at: Workplace) -> Channels | None:
    """Collective: between the ranks, behind the links of an emulated cluster; None for a rank alone."""
    if at.plane.size == 1:
        return None
    channels, cluster = at.plane.open_channels(), at.cluster
    if cluster is None or (cluster.link is None and not cluster.links):
        return channels
    return EmulatedChannels(channels, partial(cluster.link_between, at.plane.rank))


def make_replica(
    at: Workplace,
    assignment: Assignment,
    model: torch.nn.Module,
    data: Data,
    channels: Channels | None,
) -> Replica:
    """This rank's part in its replica. UserError for a model that cannot be cut as the plan does, or for a loss that
    does more with it than calling it."""
    planned, rank = assignment.replica_of(at.plane.rank), at.plane.rank
    passes = _passes(at, assignment)
    if len(planned.stages) == 1:
        shared = channels if len(planned.stages[0].ranks) > 1 else None
        return WholeReplica(model, data.loss, passes, assignment.division_of(rank), rank, shared)
    assert channels is not None
    stage_of = [planned.stage_of[block] for block in range(len(assignment.cut.graph.blocks))]
    ranks = [stage.ranks for stage in planned.stages]
    in_flight = [stage.in_flight for stage in planned.stages]
    stages = Stages(stage_of, ranks, in_flight, assignment.evaluator.times, assignment.division_of(rank).least)
    _check_loss(assignment.weight_in_loss)
    scoring = forward_outside_of_training(model, data, at.device)
    return StagedReplica(model, assignment.cut, data.loss, stages, rank, channels, passes, scoring)


def _check_loss(weight: str | None) -> None:
    if weight is not None:
        raise UserError(
            f"the loss computes with {weight} itself, which may be on another rank: let the model's forward return what"
            " the loss needs"
        )


def _passes(at: Workplace, assignment: Assignment) -> Passes:
    if at.cluster is None:
        mark = marks_on(at.device)
        return Passes() if mark is None else QueueingPasses(mark)
    rank, seed = at.plane.rank, at.config.run.seed
    events = [event for event in at.cluster.events if event.rank == rank]
    jitter = jitter_sampler(at.cluster.jitter, seed, rank)
    time, parts = assignment.evaluator.times[rank], assignment.parts_of_passes(rank)
    return EmulatedPasses(time, parts, assignment.update_seconds(rank), jitter, events)
