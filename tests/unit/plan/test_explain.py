"""Timelines of plans as text."""

from __future__ import annotations

import pytest
from block_graphs import cost, graph

from hetsync.balance.profile import StepTime
from hetsync.config.schema import SyncConfig
from hetsync.emulation.cluster import Cluster, DeviceGroup
from hetsync.plan.evaluate import Evaluator, Training
from hetsync.plan.explain import COLUMNS, IDLE, told_timeline
from hetsync.plan.placement import Placement, Replica, Stage


def rows(bound: int) -> list[str]:
    """Of two whole replicas, the first of which has ended after half of the second's slice."""
    devices = Cluster("two", "made up", (DeviceGroup("fast"), DeviceGroup("slow")))
    times = [StepTime(0.0, 1.0), StepTime(0.0, 2.0)]
    training = Training(8, SyncConfig(delay_bound=bound))
    evaluator = Evaluator(graph("a"), [cost()], devices, times, training)
    placement = Placement(tuple(Replica((Stage((rank,), (0,)),), 4, 1) for rank in range(2)))
    _, *lines = told_timeline(evaluator, placement)
    return [line.removeprefix(f"rank {rank}   ")[13:] for rank, line in enumerate(lines)]


@pytest.mark.parametrize(("bound", "after", "waits"), [(0, IDLE, "50%"), (4, " ", "0%")])
def test_replicas_wait_for_each_other_in_step_only(bound: int, after: str, waits: str) -> None:
    fast, slow = rows(bound)
    assert fast == "0" * (COLUMNS // 6) + "a" * (COLUMNS // 3) + after * (COLUMNS // 2) + f" waits {waits}"
    assert slow == "0" * (COLUMNS // 3) + "a" * (2 * COLUMNS // 3) + " waits 0%"
