"""The benchmarks of jobs by a plan: the plans that they make, and what they say of the figures."""

from __future__ import annotations

from typing import Any

import pytest
from block_graphs import cost, graph

from benchmarks.common.placements import Subject, cuts_of
from benchmarks.common.planned_job import Finished
from benchmarks.common.report import command, spearman
from benchmarks.components import ARMS, COMPONENTS
from benchmarks.planned import BATCH_SIZE, CASES, cluster_of, random_placements, verdict
from hetsync.config.records import record
from hetsync.plan.placement import place
from hetsync.plan.plan_file import PlanFile

CHAIN = Subject(
    graph(["a", "b", "c", "d"], [(0, 1), (1, 2), (0, 3), (2, 3)]),
    [cost(1, 2, output=3), cost(1, 2), cost(2, 4), cost(4, 8)],
    [],
)


def test_cuts_follow_the_work_and_leave_every_stage_a_block() -> None:
    assert cuts_of(CHAIN, [0.5, 0.5]) == [0, 3]
    assert cuts_of(CHAIN, [0.01, 0.01, 0.98]) == [0, 1, 2]
    assert cuts_of(CHAIN, [0.98, 0.01, 0.01]) == [0, 2, 3]
    assert CHAIN.carried_bytes(2) == 2 * (3 + CHAIN.costs[1].output_bytes)


def test_random_plans_are_alike_each_time_and_hold_every_block_once() -> None:
    found, again = (list(random_placements(CHAIN, 4, 20)) for _ in range(2))
    assert found == again
    for placement in found:
        assert sorted(placement.ranks) == [0, 1, 2, 3]
        assert sorted(placement.replicas[0].stage_of) == [0, 1, 2, 3]
    assert len({str(placement) for placement in found}) > 15


def test_cases_have_slow_links_among_them_and_a_device_for_each_rank() -> None:
    assert len(CASES) >= 12
    assert len({case.model for case in CASES}) >= 4
    assert sum(bool(case.slow) for case in CASES) >= 6
    for case in CASES:
        ranks = sorted(rank for held in case.replicas for each, _ in held for rank in each)
        assert ranks == [*range(len(case.speeds))]
        cluster = cluster_of(case.speeds, case.slow, 1e6, 2.0)
        assert cluster.size == len(case.speeds)
        slowest = min(cluster.link_between(0, rank).bytes_per_second or 1e99 for rank in ranks)
        assert slowest == (1e6 if case.slow else 1e99)


def test_the_loss_of_a_step_is_that_of_all_ranks() -> None:
    """Whose lines have that of their own samples, where a replica is a rank."""
    own = [[{"loss": 1.0, "samples": 3}, {"loss": 2.0, "samples": 3}], [{"loss": 5.0, "samples": 1}] * 2]
    assert Finished({}, own).losses == [2.0, 2.75]


def test_spearman_knows_the_order_alone() -> None:
    assert spearman([1, 2, 3, 9], [10, 20, 21, 22]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


def test_a_command_can_be_given_to_a_shell_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--arms", "best, D = 0", "tapp"])
    assert command("pipelines") == "python -m benchmarks.pipelines --arms 'best, D = 0' tapp"


def test_equal_figures_have_one_rank() -> None:
    assert spearman([1, 1, 2, 2], [5, 5, 9, 9]) == pytest.approx(1)
    assert spearman([1, 1, 2, 2], [5, 9, 5, 9]) == pytest.approx(0)
    records: list[dict[str, Any]] = [{"error": 0.02}, {"error": -0.2}]
    drawn = [{"predicted": float(n), "measured": float(n)} for n in range(3)]
    assert verdict(records, drawn).startswith("1 of 2 are more than 10% away; the median is 11.0%")
    assert "Spearman over 3 random plans: 1.000" in verdict(records, drawn)


def test_arms_are_a_full_factorial_of_plans_that_can_be() -> None:
    blocks = [name for names in COMPONENTS.values() for name in names]
    model = graph(blocks, [])
    assert len({arm.name for arm in ARMS}) == 8
    for arm in ARMS:
        plan = record(PlanFile, arm.plan(2 * BATCH_SIZE))
        plan.check_ranks(arm.ranks)
        place(plan, model)
