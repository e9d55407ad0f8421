"""Where a rank works: its plane, its device, the run folder, and what is in that already."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetsync.config.schema import Config
from hetsync.data.random_state import Chance, seed_all
from hetsync.emulation.cluster import Cluster, load_cluster
from hetsync.errors import UserError
from hetsync.launchers import HOW_TO_TOLERATE
from hetsync.plane.base import Plane
from hetsync.profiling.measure import Place, find_places, limit_threads, take_device
from hetsync.train import checkpoint
from hetsync.train.replacing import check_replacing, places_of


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Attributes:
    config: Of its settings those of model, data and optimizer do not count.
    folder: The run folder, if any.
    loaded: Where the job goes on from, if anywhere.
    cluster: That is emulated, if any.
    places: Host and cores of every rank; of a rank that joins while the job runs its own alone counts.
    seeded: The seed is the config's; otherwise the script's (`Job`).
    began: The moment, by the monotonic clock.
    """

    config: Config
    plane: Plane
    folder: Path | None
    loaded: checkpoint.Loaded | None
    cluster: Cluster | None
    places: Sequence[Place]
    device: torch.device
    seeded: bool
    began: float = field(default_factory=time.monotonic)

    @property
    def place(self) -> Place:
        """Of this rank."""
        return self.places[self.plane.rank]


def take_place(
    config: Config, plane: Plane, folder: Path | None, loaded: checkpoint.Loaded | None, seeded: bool = True
) -> Workplace:
    """Collective. From now on this process has its cores, its device and its seeds: the recipe's, or, where it is not
    `seeded`, those of rank 0's script."""
    profile = config.emulation.profile
    cluster = load_cluster(profile) if profile is not None else None
    if cluster is not None:
        cluster.device_of(plane.ranks_at_start - 1)  # is there one for every rank?
    places = find_places(plane) if plane.newcomer is None else places_of(plane.newcomer, plane.rank)
    place = places[plane.rank]
    limit_threads(place, cluster is not None)
    device = take_device(config.run.device, place)
    plane.settle(device)
    config.fault.check_ranks(plane.ranks_at_start)
    if config.fault.tolerate is True and not plane.tolerant:
        raise UserError(
            f"fault.tolerate is true, but a rank's death ends jobs with {plane.described}: {HOW_TO_TOLERATE}, or use"
            " fault.tolerate auto"
        )
    if config.fault.slow == "exclude" and not plane.tolerant:
        raise UserError(
            f"fault.slow is exclude, but a rank's death ends jobs with {plane.described}, so that none can be excluded:"
            f" {HOW_TO_TOLERATE}, or use wait"
        )
    if config.fault.replace:
        if plane.rank == 0:
            check_replacing(plane, folder)
        plane.barrier()  # rank 0's sentence ends the others here
    if seeded:
        seed_all(config.run.seed)
    else:
        chance = Chance.found()
        (chance if plane.newcomer is not None else plane.broadcast_object(chance)).take()
    return Workplace(
        config=config,
        plane=plane,
        folder=folder,
        loaded=loaded,
        cluster=cluster,
        places=places,
        device=device,
        seeded=seeded,
    )
