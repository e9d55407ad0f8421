"""Benchmarks of jobs by a plan under quotas, under jitter, and of their cost: the arithmetic. Imports no MPI."""

from __future__ import annotations

import time
from typing import Any

import pytest
from block_graphs import cost, graph

from benchmarks import planned_cost, planned_jitter, planned_quotas
from benchmarks.common.parts_meter import PartsMeter
from benchmarks.common.placements import Subject, chain
from benchmarks.common.quotas import MOST_PERCENT

ALIKE = Subject(graph("abcd"), [cost(1, 2), cost(1, 2), cost(1, 2), cost(1, 2)], [])


def test_blocks_take_as_much_longer_as_the_quota_is_less_of_a_core() -> None:
    case = planned_quotas.Case("x", "one stage", (50,), [chain(0)], 1)
    _, seconds = planned_quotas.prediction(case, ALIKE)
    assert seconds == pytest.approx(planned_quotas.BATCH_SIZE * 4 * 3 / 0.5)


def test_a_pipeline_is_predicted_and_replicas_have_shares_by_quota() -> None:
    case = planned_quotas.Case("x", "two stages", (50, 50), [chain(0, 1)], 4)
    _, seconds = planned_quotas.prediction(case, ALIKE)
    one_stage = planned_quotas.BATCH_SIZE * 2 * 3 / 0.5
    assert seconds == pytest.approx(one_stage * (1 + 1 / 4))  # it fills and empties by one micro-batch
    case = planned_quotas.Case("x", "two replicas", (60, 20), [chain(0), chain(1)], 4)
    placement, _ = planned_quotas.prediction(case, ALIKE)
    assert [replica.share for replica in placement.replicas] == [48, 16]


def test_quotas_leave_the_machine_something_and_each_rank_has_one() -> None:
    assert len({case.model for case in planned_quotas.CASES}) >= 3
    for case in (*planned_quotas.CASES, *planned_quotas.QUICK):
        assert sum(case.percents) <= MOST_PERCENT
        ranks = sorted(rank for held in case.replicas for each, _ in held for rank in each)
        assert ranks == [*range(len(case.percents))]


def test_plans_that_are_too_far_away_are_counted() -> None:
    runs = [("a", 0.1), ("a", 0.5), ("a", 0.12), ("b", -0.2)]
    records: list[dict[str, Any]] = [
        {"model": "x", "name": name, "percents": [80, 40], "predicted": 1.0, "measured": 1 + error, "error": error}
        | {"own_error": error}
        for name, error in runs
    ]
    assert planned_quotas.verdict(records).startswith(
        "1 of 2 plans are more than 15% away (goal: none); the median is 16"
    )
    assert "| x | a | 80 40 | 1.000 s | 1.120 [1.100, 1.500] | +12.0% [+10.0%, +50.0%] |" in planned_quotas.table(
        records
    )


def test_jitter_is_held_against_its_goal() -> None:
    summary = {
        "plan": {"predicted_samples_per_second": 40.0, "measured_step_seconds": planned_jitter.BATCH_SIZE / 36.0},
        **dict.fromkeys(("staleness", "overrun_fraction", "real_compute_cores", "per_rank")),
    }
    record = planned_jitter.figures(summary)
    assert record["of_predicted"] == pytest.approx(0.9)
    assert planned_jitter.markdown([record]).endswith("0.900, the goal is 0.95: missed")
    assert planned_jitter.cluster().size == 4


def test_costs_are_parts_of_a_core_on_the_worst_rank() -> None:
    spent = {"executor": 0.1, "log": 0.1, "handing over": 0.05, "polling": 0.5, "seconds": 10.0}
    record = {"parts": planned_cost.parts_of(spent)}
    assert planned_cost.of_goal(record) == pytest.approx(0.025)
    idle = {"parts": planned_cost.parts_of({"seconds": 10.0})}
    assert planned_cost.verdict([idle, record]).endswith("(goal: 3%, met); all of HetSync 7.50%.")
    worse = {"parts": {"log": 0.04}}
    assert planned_cost.verdict([worse, idle]).endswith("(goal: 3%, missed); all of HetSync 4.00%.")


class Work:
    def outer(self) -> None:
        busy(0.02)
        self.inner()

    def inner(self) -> None:
        busy(0.04)


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_part_within_another_counts_for_its_own_purpose_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("outer", "inner"):
        monkeypatch.setattr(Work, name, getattr(Work, name))  # which puts them back
    meter = PartsMeter({"outer": [(Work, "outer")], "inner": [(Work, "inner")]})
    began = time.thread_time()
    Work().outer()
    spent = time.thread_time() - began
    assert meter.seconds["outer"] >= 0.02
    assert meter.seconds["inner"] >= 0.04
    assert meter.seconds.total() <= spent  # nothing counts twice
    assert meter.of_main == meter.seconds
