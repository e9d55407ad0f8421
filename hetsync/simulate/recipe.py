"""From a recipe and a cluster profile to what is simulated."""

from __future__ import annotations

import dataclasses

import torch

from hetsync import data
from hetsync.balance.profile import RankProfile
from hetsync.config.schema import Config
from hetsync.data import Data
from hetsync.data.ledger import total_samples
from hetsync.emulation.cluster import Cluster
from hetsync.emulation.device import SHORTEST_SLICE_SECONDS, emulated_times
from hetsync.models import build_for
from hetsync.profiling.device import engine_buffers, memory_cap, state_buffers
from hetsync.profiling.measure import loss_on
from hetsync.simulate.scenario import Scenario, Traffic
from hetsync.sync.milestones import CHECKPOINT, EPOCH, checkpoints_every, marks_every, no_marks, rests_for
from hetsync.sync.optimizers import build_optimizer, loses_by_delay


def build(config: Config) -> tuple[Data, torch.nn.Module]:
    """The recipe's data and its model with the first weights, as the trainer makes them."""
    torch.manual_seed(config.run.seed)
    built = data.build(config.data.name, config.data.options)
    return built, build_for(built, config.model.name, config.model.options)


def scenario_of(config: Config, cluster: Cluster, ranks: int | None, built: Data, model: torch.nn.Module) -> Scenario:
    """What a recipe says, on a cluster whose devices repeat where there are more ranks; it rests as a real job does,
    but for checkpoints by time."""
    run, ranks = config.run, ranks or cluster.size
    cluster = scaled(cluster, ranks)
    total = total_samples(run.samples, run.epochs, len(built.train))  # type: ignore[arg-type]
    evaluations = marks_every(run.evaluate_every, total)
    judged = evaluations if config.rests_to_evaluate else no_marks
    interval = (run.evaluate_every or total) if config.rests_to_evaluate else None
    saves = checkpoints_every(run.checkpoint_every, config.step_samples, interval, total)
    return Scenario(
        cluster,
        profiles(config, cluster, ranks, model, built),
        config.sync,
        config.data.batch_size,
        total,
        rests_for({CHECKPOINT: saves, EPOCH: judged}, total),
        seed=run.seed,
        traffic=Traffic.of(model, config.sync.bucket_bytes),
        evaluations=no_marks if config.rests_to_evaluate else evaluations,
        judged=judged,
        adaptive=loses_by_delay([build_optimizer(config.optimizer, model)]),
    )


def scaled(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with its devices repeated, in order, until there is one for every rank."""
    copies = -(-ranks // cluster.size)
    return dataclasses.replace(cluster, devices=cluster.devices * copies)


def profiles(
    config: Config, cluster: Cluster, ranks: int, model: torch.nn.Module | None = None, built: Data | None = None
) -> list[RankProfile]:
    """What `hetsync-train --emulate` would find, without measuring this machine.

    Where neither the profile nor `emulation.samples_per_second` tells the cluster's speed, a slice takes 0.1 s: the
    shortest that an emulation of it would have. Memory caps need the model and its data.
    """
    affordable = config.data.batch_size / SHORTEST_SLICE_SECONDS
    times = emulated_times(cluster, ranks, config.model.name, config.emulation.samples_per_second, affordable)
    caps: dict[int | None, int | None] = {None: None}
    out = []
    for rank, time in enumerate(times):
        group = cluster.device_of(rank)
        limit = group.memory_bytes
        if limit not in caps and model is not None and built is not None:
            forward = loss_on(model, built, torch.device("cpu"))
            state = state_buffers(build_optimizer(config.optimizer, model))
            copies = engine_buffers(config)
            caps[limit] = memory_cap(model, forward, torch.device("cpu"), ranks, state, limit, copies)
        out.append(RankProfile(f"{group.name} (simulated)", "", time, True, caps.get(limit)))
    return out
