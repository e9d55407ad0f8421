"""A replica in stages ends where one process does that accumulates the same micro-batches.

mpirun -np N python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RANKS
from planes import BACKENDS
from replicas import assert_equal_to_one_process, blocks_of, unequal
from workloads import WORKLOADS, Workload

from hetsync.plane.base import Plane
from hetsync.replica.staged import Stages

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
