"""A replica in stages ends where one process does that accumulates the same micro-batches.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import RANKS
from planes import BACKENDS
from replicas import assert_equal_to_one_process, blocks_of, one_piece, unchanging, unequal
from torch import nn
from torch.utils.data import TensorDataset
from workloads import WORKLOADS, Workload

from hetsync.data import Data
from hetsync.plan.blocks import cut
from hetsync.plan.calls import observed_call
from hetsync.plane.base import Plane
from hetsync.replica.scores import forward_outside_of_training
from hetsync.replica.staged import StagedReplica, Stages

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


FEW = [workload for workload in WORKLOADS if workload.name in ("nasnet_a_cifar", "deeptte", "ptb_lstm", "nmt")]


@pytest.mark.parametrize("workload", FEW, ids=lambda workload: workload.name)
def test_stages_equal_one_process(workload: Workload, plane: Plane, tmp_path: Path) -> None:
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    stages = Stages(unequal(len(found.graph.blocks), RANKS), [[rank] for rank in range(RANKS)[::-1]], [None] * RANKS)
    channels = plane.open_channels()
    optimizer, clip = ("sgd", None) if RANKS == 2 else ("adamw", 0.05)
    assert_equal_to_one_process(model, found, data, stages, plane.rank, channels, optimizer, clip)
    channels.close()


def test_stages_over_gloo(tmp_path: Path) -> None:
    plane = BACKENDS["store"]()
    workload = next(workload for workload in WORKLOADS if workload.name == "ptb_lstm")
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    channels = plane.open_channels()
    stages = Stages(unequal(len(found.graph.blocks), RANKS), [[rank] for rank in range(RANKS)], [None] * RANKS)
    assert_equal_to_one_process(model, found, data, stages, plane.rank, channels)
    channels.close()
    plane.close()


def denoised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss of layers that return what they are given: 0, if it is the same noise on all stages."""
    noisy = x + torch.rand_like(x)
    difference: torch.Tensor = (model(noisy) - noisy).square().mean()
    return difference


def test_losses_and_metrics_draw_the_same_on_all_stages(plane: Plane) -> None:
    """However many random numbers the ranks have drawn before; and what they draw next is as if there had been none."""
    samples, model = TensorDataset(torch.zeros(70, 4)), unchanging(RANKS)
    data = Data(samples, samples, denoised, lambda model, batch: {"difference": denoised(model, batch[0]).item()})
    found = cut(model, observed_call(model, denoised, torch.zeros(3, 4)))
    scoring = forward_outside_of_training(model, data, torch.device("cpu"))
    assert scoring is not None
    channels = plane.open_channels()
    stages = Stages(range(RANKS), [[rank] for rank in range(RANKS)], [None] * RANKS)
    replica = StagedReplica(model, found, denoised, stages, plane.rank, channels, scoring=scoring)
    torch.manual_seed(plane.rank)
    before = torch.get_rng_state()
    assert replica.run([one_piece(torch.zeros(3, 4)), one_piece(torch.zeros(2, 4))]) == 0
    assert replica.evaluate(data, 0, 70) == ({"difference": 0.0} if plane.rank == RANKS - 1 else {})
    assert torch.equal(torch.get_rng_state(), before)
    channels.close()
