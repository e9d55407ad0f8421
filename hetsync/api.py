"""For a training loop of your own: eight lines make it delay-synchronised.

    import hetsync

    with hetsync.join(model, optimizer, train_set, batch_size=64, epochs=10) as session:
        for inputs, labels in session.slices():
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            session.step(loss)

Start it with `mpirun -np N python my_script.py`. Every rank gets slices of its own; together they use each sample once
an epoch. `session.step` takes the place of `optimizer.step` and `optimizer.zero_grad`.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Dataset

from hetsync.config import SyncConfig
from hetsync.data.loader import Source
from hetsync.emulate import RealDevice, emulated_device
from hetsync.errors import UserError, complain
from hetsync.plane import open_plane
from hetsync.plane.base import Plane
from hetsync.profiling.cluster import load_cluster
from hetsync.session import Plan, RankProfile, Session
from hetsync.slicing import StepTime
from hetsync.sync.milestones import marks_every, rests_at


class JoinedSession(Session):
    """A session that closes its plane, and that ends the whole job when its block fails on one rank."""

    def __enter__(self) -> JoinedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if failure is None:
            self.close()
            self.plane.close()
            return
        # The other ranks would wait for this one for ever.
        if self.plane.size > 1:
            traceback.print_exception(failure)
            complain(f"rank {self.plane.rank} failed, so the job ends")
            self.plane.abort(1)


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    *,
    batch_size: int = 64,
    epochs: float = 1,
    evaluate_every: int | None = None,
    seed: int = 0,
    emulate: str | None = None,
    samples_per_second: float | None = None,
    plane: Plane | None = None,
    **sync: Any,
) -> JoinedSession:
    """Collective: this rank's part in the job that an MPI launcher started, or in a job of one rank.

    Args:
        model: On the rank's own device; all ranks start from rank 0's weights.
        optimizer: Of the model's weights.
        dataset: A map-style data set, the same on every rank.
        batch_size: Samples of one slice of all ranks together.
        epochs: Passes over the data set.
        evaluate_every: Samples after which all ranks come to rest with the same weights; see `Session.slices`.
        seed: Of the sample order.
        emulate: A cluster profile to imitate, with `samples_per_second` of the whole emulated cluster.
        samples_per_second: See `emulate`.
        plane: Where another plane than the launcher's is wanted.
        sync: Settings of `hetsync.config.SyncConfig`, such as delay_bound=0.

    Ranks start with equal shares and are re-balanced from their measured speeds.
    """
    plane = plane or open_plane("auto")
    samples = len(dataset)  # type: ignore[arg-type]
    total = round(epochs * samples)
    device: RealDevice | Any = RealDevice(_synchronizer(model))
    time = StepTime(0.0, 1.0)
    if emulate is not None:
        cluster = load_cluster(emulate)
        if samples_per_second is None:
            raise UserError("join(emulate=...) needs samples_per_second, the speed of the whole emulated cluster")
        speeds = [cluster.device_of(rank).speed for rank in range(plane.size)]
        rate = samples_per_second * speeds[plane.rank] / sum(speeds)
        device, time = emulated_device(cluster, plane.rank, rate, seed), StepTime(0.0, 1 / rate)
    profiles = plane.gather_objects(RankProfile(model.__class__.__name__, "", time, emulate is not None))

    plan = Plan(batch_size, total, profiles, rests_at(marks_every(evaluate_every, total), "evaluation", total), seed)
    return JoinedSession(plane, model, optimizer, Source(dataset), SyncConfig(**sync), plan, device)


def _synchronizer(model: torch.nn.Module) -> Any:
    return torch.cuda.synchronize if next(model.parameters()).device.type == "cuda" else None
