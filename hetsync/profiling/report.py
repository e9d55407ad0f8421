"""`hetsync profile`: the ranks of this job as a cluster profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any

import torch

from hetsync import data, models
from hetsync.balance.profile import RankProfile, StepTime
from hetsync.balance.shares import choose_shares
from hetsync.config.schema import Config
from hetsync.emulation.cluster import Cluster, DeviceGroup
from hetsync.plane.base import Plane
from hetsync.profiling.interconnect import measure_interconnect
from hetsync.profiling.measure import Subject, autocast, find_place, limit_threads, measure_ranks, take_device
from hetsync.profiling.topology import measure_links

ALIKE = 0.05  # by which the rates of equal devices are measured to differ, at most
RATE_SAMPLES = 16  # of the slices that have these rates


@dataclass(frozen=True)
class ProfiledCluster:
    """`cluster` is of groups of like ranks; `ranks` are those that were measured, by the recipe's `model`, which trains
    on `epoch_samples` in an epoch."""

    cluster: Cluster
    ranks: Sequence[RankProfile]
    model: torch.nn.Module
    epoch_samples: int

    @property
    def times(self) -> list[StepTime]:
        """By rank, with equal devices alike."""
        return times_of_kinds([self.cluster.device_of(rank) for rank in range(len(self.ranks))], self.ranks)


def times_of_kinds(groups: Sequence[DeviceGroup], profiles: Sequence[RankProfile]) -> list[StepTime]:
    """By rank: devices of one kind, by name, host and memory of their `groups`, have the mean of their times, where
    these differ by no more than measuring does: searches that place a model on ranks then know them for equal.

    A profile's groups have the mean of theirs however far these are apart, since a group is all that it can say.
    """
    found = [profile.time for profile in profiles]
    kinds = [(group.name, group.host, group.memory_bytes) for group in groups]
    for kind in dict.fromkeys(kinds):
        members = [rank for rank, own in enumerate(kinds) if own == kind]
        times = [found[rank] for rank in members]
        rates = [time.rate(RATE_SAMPLES) for time in times]
        if max(rates) <= min(rates) * (1 + ALIKE):
            fixed, each = fmean(time.fixed_seconds for time in times), fmean(time.seconds_per_sample for time in times)
            for rank in members:
                found[rank] = StepTime(fixed, each)
    return found


def profile_cluster(plane: Plane, config: Config) -> ProfiledCluster:
    """Collective: measure every rank on the recipe's model, and their interconnect."""
    place = find_place(plane)
    limit_threads(place, emulated=False)
    device = take_device(config.run.device, place)
    plane.settle(device)
    material = data.build(config.data.name, config.data.options)
    data.check_batch_size(material, config.data.batch_size)
    model = models.build_for(material, config.model.name, config.model.options)
    model.to(device)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with autocast(config.run.precision, device):
            return material.loss(model, batch)

    profiles = measure_ranks(Subject(plane, config, model, replace(material, loss=loss), place), None)
    shares = choose_shares(config.sync, config.data.batch_size, profiles)
    rates = [profile.time.rate(max(1, share)) for profile, share in zip(profiles, shares, strict=True)]
    memory = plane.gather_objects(device_memory_gib(model))
    groups = group_devices(config.model.name, profiles, rates, memory)
    hosts = sorted({profile.host for profile in profiles})
    source = (
        f"measured by hetsync profile: {plane.size} ranks on {', '.join(hosts)}, model {config.model.name},"
        f" batch {config.data.batch_size} in slices of {', '.join(map(str, shares))}"
    )
    links = measure_links(plane, [profile.host for profile in profiles])
    cluster = Cluster(config.run.name, source, groups, measure_interconnect(plane, device=device), links=links)
    return ProfiledCluster(cluster, profiles, model, len(material.train))  # type: ignore[arg-type]


def device_memory_gib(model: torch.nn.Module) -> float | None:
    """Memory of the rank's own accelerator; None on CPUs, whose memory all ranks of a host share."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    return round(torch.cuda.get_device_properties(device).total_memory / 2**30, 2)


def group_devices(
    model_name: str,
    profiles: Sequence[RankProfile],
    rates: Sequence[float],
    memory_gib: Sequence[float | None],
) -> tuple[DeviceGroup, ...]:
    """Neighbouring ranks with like devices as one group, of their mean time; the slowest has speed 1 in its slices,
    where ranks reach these `rates`. Of several hosts each has groups of its own."""
    ranks = zip(profiles, rates, memory_gib, strict=True)
    several = len({profile.host for profile in profiles}) > 1
    groups, group_rates = [], []
    for (name, memory, host), listed in groupby(ranks, key=lambda rank: (rank[0].device, rank[2], rank[0].host)):
        members = [(profile, rate) for profile, rate, _ in listed]
        group_rates.append(fmean(rate for _, rate in members))
        fixed, each = _mean_time(members)
        rate_of = {model_name: round(1 / each, 2)}
        at = host if several else None
        groups.append(DeviceGroup(name, len(members), 1.0, memory, rate_of, round(fixed, 6), at))
    slowest = min(group_rates)
    return tuple(
        replace(group, speed=round(rate / slowest, 3)) for group, rate in zip(groups, group_rates, strict=True)
    )


def _mean_time(members: Sequence[tuple[RankProfile, float]]) -> tuple[float, float]:
    """Fixed seconds, and those of a sample; all goes to samples, at the mean rate, where the fixed part of a slice is
    no larger than what its time is uncertain by, or samples seem to cost nothing."""
    for profile, rate in members:
        uncertain = 1.0 if profile.uncertainty is None else profile.uncertainty
        if not uncertain < 1 - rate * profile.time.seconds_per_sample < 0.999:
            return 0.0, 1 / fmean(rate for _, rate in members)
    times = [profile.time for profile, _ in members]
    return fmean(time.fixed_seconds for time in times), fmean(time.seconds_per_sample for time in times)
