"""Replicas that are cut at different places and step together end where one process does."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import OPTIMIZERS, blocks_of, double_batches, on_threads, unequal
from workloads import WORKLOADS

from hetsync.plan.placement import Placement, Replica, Stage
from hetsync.plane.base import Channels
from hetsync.replica.segments import SegmentSums, segments_of
from hetsync.replica.staged import StagedReplica, Stages
from hetsync.replica.whole import WholeReplica

SHARES, COUNTS = (5, 4, 2), (2, 3, 1)  # samples and micro-batches of each replica
STEPS = 2


def cut_in(blocks: int, *ranks: int) -> Replica:
    of = unequal(blocks, len(ranks))
    held = [tuple(block for block in range(blocks) if of[block] == stage) for stage in range(len(ranks))]
    return Replica(tuple(Stage((rank,), own) for rank, own in zip(ranks, held, strict=True)))


@pytest.mark.parametrize(("name", "optimizer"), [("digits_cnn", "sgd"), ("deeptte", "adamw")])
def test_three_replicas_one_of_them_a_rank_alone(name: str, optimizer: str, tmp_path: Path) -> None:
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    blocks = len(found.graph.blocks)
    placement = Placement((cut_in(blocks, 5, 1), cut_in(blocks, 0, 3, 4), cut_in(blocks, 2)))
    slices = [double_batches(data, step * sum(SHARES), SHARES, COUNTS) for step in range(STEPS)]

    alone = deepcopy(model)
    stepper = OPTIMIZERS[optimizer](list(alone.parameters()))
    whole, losses = WholeReplica(alone, data.loss), []
    for parts in slices:
        stepper.zero_grad()
        losses.append(whole.run([each for part in parts for each in part]))
        whole.clip_grad_norm(0.5)
        stepper.step()
    wanted = dict(alone.named_parameters())
    held: dict[str, list[torch.Tensor]] = {}
    told: list[dict[int, float]] = [{} for _ in slices]

    def work(rank: int, channels: Channels) -> None:
        number = next(n for n, each in enumerate(placement.replicas) if any(rank in s.ranks for s in each.stages))
        planned, own = placement.replicas[number], deepcopy(model)
        replica: Any = WholeReplica(own, data.loss, rank=rank)
        if len(planned.stages) > 1:
            of = [planned.stage_of[block] for block in range(blocks)]
            stages = Stages(of, [stage.ranks for stage in planned.stages], [None] * len(planned.stages))
            replica = StagedReplica(own, found, data.loss, stages, rank, channels)
        sums = SegmentSums(segments_of(placement, found.graph), own, rank, channels)
        replica.release()
        mine = OPTIMIZERS[optimizer](replica.parameters)
        for parts, heard in zip(slices, told, strict=True):
            mine.zero_grad()
            sums.begin()
            heard[number] = replica.run(parts[number])
            sums.finish(SHARES[number] / sum(SHARES))
            replica.clip_grad_norm(0.5)
            mine.step()
        for key, tensor in replica.held.items():
            held.setdefault(key, []).append(tensor)

    on_threads(6, work)
    means = [sum(heard[n] * share for n, share in enumerate(SHARES)) / sum(SHARES) for heard in told]
    assert means == pytest.approx(losses, rel=1e-5)
    for key, tensors in held.items():
        assert len(tensors) == 3
        if key in wanted:
            torch.testing.assert_close(tensors[0], wanted[key], rtol=1e-5, atol=1e-6)
        if tensors[0].is_floating_point():
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)  # buffers, too
    assert wanted.keys() <= held.keys()
