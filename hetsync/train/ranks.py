"""Who the ranks of a job are: how fast each is, its share of a batch, and what times its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hetsync.balance.device import Device
from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.emulation.device import make_device
from hetsync.errors import UserError
from hetsync.profiling.measure import Subject, measure_ranks
from hetsync.train.checkpoint import Progress
from hetsync.train.preparation import Preparation
from hetsync.train.replacing import summons_of
from hetsync.train.resumption import kept_shares
from hetsync.train.speeds import assumed_profiles
from hetsync.train.workplace import Workplace

if TYPE_CHECKING:  # it loads what only plans need
    from hetsync.plan.assignment import Assignment


def are_measured(at: Workplace, prepared: Preparation) -> bool:
    """Is it known how fast they are before they train?"""
    return at.cluster is not None or prepared.loss is not None


def find_profiles(at: Workplace, config: Config, prepared: Preparation, finished: bool) -> list[RankProfile]:
    """Collective, but for a rank that joins: measured, or the same for all until it is known."""
    plane, device = at.plane, next(prepared.parts.model.parameters()).device
    if plane.newcomer is not None and (at.cluster is not None or prepared.loss is None):
        known = list(summons_of(plane.newcomer).profiles)
        known[plane.rank] = replace(known[plane.rank], host=at.place.host)
        return known
    if prepared.loss is None or finished:
        cluster = None if finished else at.cluster
        return assumed_profiles(plane, cluster, config.emulation.samples_per_second, device, at.place.host)
    source, cluster = prepared.training_data.source, at.cluster
    material = Data(source.dataset, source.dataset, prepared.loss, collate=source.collate, costs=source.costs)
    if cluster is not None and prepared.assigns is not None:
        cluster = cluster.without_limits()  # whether it fits, the plan is asked
    parts = prepared.parts
    found = measure_ranks(Subject(plane, config, parts.model, material, at.place, parts.optimizers), cluster)
    if plane.newcomer is None:
        return found
    known = list(summons_of(plane.newcomer).profiles)
    known[plane.rank] = found[0]  # a newcomer has measured itself alone
    return known


def first_shares(
    config: Config, profiles: Sequence[RankProfile], assignment: Assignment | None, progress: Progress | None
) -> tuple[int, ...]:
    """Samples of each rank in a slice: the plan's; those of the run so far; or those that follow from speeds."""
    if assignment is None:
        kept = kept_shares(config, progress, len(profiles))
        return kept or choose_shares(config.sync, config.data.batch_size, profiles)
    shares = tuple(assignment.share_of(rank) for rank in range(len(profiles)))
    for rank, (share, profile) in enumerate(zip(shares, profiles, strict=True)):
        if profile.cap is not None and share > profile.cap:
            raise UserError(
                f"plan {assignment.plan.path}: rank {rank} has a share of {share} samples, of which {profile.cap} fit"
                " into its memory: give it a smaller one"
            )
    return shares


def device_of(at: Workplace, profile: RankProfile, assignment: Assignment | None, device: torch.device) -> Device:
    """What times this rank's slices. By a plan an emulated update takes a time of its own, whatever the share is."""
    rank, seed = at.plane.rank, at.config.run.seed
    if assignment is None:
        return make_device(at.cluster, rank, profile.time, seed, device)
    passes, update = assignment.evaluator.times[rank], assignment.update_seconds(rank)
    return make_device(at.cluster, rank, passes, seed, device, update)
