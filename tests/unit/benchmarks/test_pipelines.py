"""Tables of the jobs by plans: targets, shares of BSP, planned against measured."""

from __future__ import annotations

import math

import pytest

from benchmarks import pipelines
from hetsync.plan.plan_file import Predicted, read_plan


def job(arm, rate, loss=1.0, predicted=6.4, **more):
    losses = [2.0] * 16 + [loss] * 4
    planned = {"predicted_step_seconds": predicted, "measured_step_seconds": 64 / rate}
    told = {"workload": "digits", "link": "slow", "arm": arm, "seed": 0, "samples_per_second": rate}
    told |= {"step_seconds": 64 / rate, "wait_fraction": 0.5, "wait_seconds_per_sample": 2e-3, "bytes_per_sample": 1e3}
    return {
        **told,
        "samples": 64,
        "memory_bytes": 2**20,
        "overrun_fraction": 0.0,
        **planned,
        "losses": losses,
        "train_seconds": 20.0,
        **more,
    }


def test_the_target_is_what_the_weakest_arm_ends_with():
    cell = [job("a", 10, loss=1.5), job("b", 10, loss=1.0)]
    assert pipelines.target_of(cell) == 1.5
    assert pipelines.seconds_to(cell[1], 1.5) == pytest.approx(18.0)  # two of four twentieths at 1, and two at 2
    assert pipelines.target_of([*cell, job("c", 10, loss=1.9, samples=32)]) == 1.5  # it was cut short


def test_twentieths_without_a_task_are_left_out():
    few = job("a", 10, losses=[math.nan, 3.0, math.nan, math.nan, math.nan, 1.0], train_seconds=6.0)
    assert pipelines.curve(few) == [{"seconds": 6.0, "loss": 1.0}]


def test_samples_are_those_for_which_there_is_time(tmp_path, monkeypatch):
    bench = pipelines.Bench(pipelines.parse(["--output", str(tmp_path), "--steps", "16", "--seconds", "25"]))
    (tmp_path / "digits-rate.json").write_text("64.0")  # a slice is a second
    monkeypatch.setattr(pipelines.Bench, "predicted", lambda bench, name, link, arm: Predicted(5.0, 12.8, 0.0))
    asked = {link: bench.samples("digits", link, pipelines.BSP) / 64 for link in pipelines.ROUND_SLICES}
    assert asked == {"fast": 12, "middle": 9, "slow": 4}  # of 2.15, 2.9 and 5.9 s a step
    assert bench.samples("digits", "fast", pipelines.BEST) / 64 == 5


def test_rows_are_compared_with_equal_shares():
    records = [job(pipelines.BSP, 10), job(pipelines.BEST, 25, predicted=2.0), {**job("x", 1), "missing": "refused"}]
    table = pipelines.markdown(records)
    assert "| best, D = 0 | 25.0 | 2.50 | 2.560 | 50.0% | 2.00 | 1.0 | 1.0 | 0.0% | 20.0 |" in table
    assert "| x | refused |" + " |" * 8 in table
    assert "| x | refused |" in pipelines.markdown(records[2:])


def test_targets_are_judged():
    waiting = {pipelines.BSP: 0.8, "pipeline, exact": 0.4, pipelines.BEST: 0.7}
    rates = {pipelines.BSP: 10, "pipeline, exact": 13, pipelines.BEST: 12}
    told = pipelines.verdicts([job(arm, rates[arm], wait_fraction=waiting[arm]) for arm in rates])
    assert "| digits, slow | best, D = 0 | rate | 0.923 | missed |" in told
    assert "| digits, slow | pipeline, exact | rate, of BSP | 1.300 | missed |" in told
    assert "| digits, slow | pipeline, exact | waiting, against BSP | -50.0% | met |" in told
    assert "| digits, slow | best, D = 0 | waiting, against BSP | -12.5% | missed |" in told


def test_the_plan_that_is_predicted_to_be_faster_is_judged():
    jobs = [job(pipelines.BSP, 10), job(pipelines.BEST, 20, predicted=3.0), job("best, D = 4", 9, predicted=2.0)]
    assert "| digits, slow | best, D = 4 | rate | 0.900 | missed |" in pipelines.verdicts(jobs)


def test_planned_and_measured_are_ranked():
    plans = [job(f"plan {index}", 10 * index, predicted=6.4 / index) for index in (1, 2, 3)]
    assert pipelines.planned_and_measured(plans)[-1].endswith("rank correlation 1.000 over 3 plans (target: 0.9, met).")


def test_equal_shares_are_a_plan_of_whole_models(tmp_path):
    bench = pipelines.Bench(pipelines.parse(["--output", str(tmp_path)]))
    plan = read_plan(bench.plan("digits", "slow", pipelines.BSP))
    assert plan.data_parallel
    assert [replica.share for replica in plan.replicas] == [16] * 4


def test_a_plan_whose_steps_take_too_long_is_not_run(tmp_path, monkeypatch):
    bench = pipelines.Bench(pipelines.parse(["--output", str(tmp_path)]))
    monkeypatch.setattr(pipelines.Bench, "predicted", lambda *asked: Predicted(31.0, 0.5, 0.0))
    monkeypatch.setattr(pipelines.Bench, "job", lambda *words: pytest.fail("it was run"))
    told = bench.measured("digits", "slow", pipelines.BEST, 0)
    assert told == {"missing": "not run: a step is predicted to take 31 s"}
