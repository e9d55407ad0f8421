"""How fast ranks are taken to be where nothing is measured: all alike, or as an emulated cluster has it."""

from __future__ import annotations

import torch

from hetsync.balance.profile import RankProfile, StepTime
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.device import emulated_times
from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.profiling.measure import device_name


def assumed_profiles(
    plane: Plane, cluster: Cluster | None, samples_per_second: float | None, device: torch.device, host: str
) -> list[RankProfile]:
    """Collective. `samples_per_second`: of the whole cluster, where one is emulated. UserError where that lacks."""
    if cluster is None:
        mine = RankProfile(device_name(device), host, StepTime(0.0, 1.0), uncertainty=None)
        return plane.gather_objects(mine)
    if samples_per_second is None:
        raise UserError(
            f"the emulated cluster {cluster.name} needs samples_per_second, its speed as a whole (in a recipe:"
            " emulation.samples_per_second), or job.measure the loss"
        )
    times = emulated_times(cluster, plane.size, "", samples_per_second, samples_per_second)
    names = [f"{cluster.device_of(rank).name} (emulated)" for rank in range(plane.size)]
    return [RankProfile(name, host, time, True) for name, time in zip(names, times, strict=True)]
