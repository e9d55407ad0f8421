"""Replicas in stages, on threads that stand for ranks: they end where one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from replicas import assert_equal_to_one_process, blocks_of, on_threads, unequal
from workloads import WORKLOADS, Workload

from hetsync.replica.staged import Stages

# Larger ones of the same cells show nothing new.
MODELS = [workload for workload in WORKLOADS if not workload.name.endswith(("_mobile", "_large"))]


@pytest.mark.parametrize("workload", MODELS, ids=lambda workload: workload.name)
def test_three_stages_equal_one_process(workload: Workload, tmp_path: Path) -> None:
    data = workload.data(tmp_path)
    model, found = blocks_of(workload, data)
    stages = Stages(unequal(len(found.graph.blocks), 3), [1, 2, 0], [None, 4, 1])

    on_threads(
        3,
        lambda rank, channels: assert_equal_to_one_process(model, found, data, stages, rank, channels, "adamw", 0.5),
    )
