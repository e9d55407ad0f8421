"""The planner's benchmark: its quick form runs and goes on, and its tables say what the searches found."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import planner, planner_tables
from benchmarks.common import planning
from benchmarks.common.kept import require_same

CELL = {"form": "one replica", "model": "m", "cluster": "c", "weights": "time", "seed": 0, "blocks": 3}


def searched(arm, objective, near=1, **more):
    return {**CELL, "arm": arm, "objective": objective, "course": [(1, 9.0), (near, objective)], **more}


@pytest.mark.thorough
def test_the_quick_form_compares_all_searches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads, words = torch.get_num_threads(), ["--quick", "--output", str(tmp_path / "out")]
    few = ["data", "exact", "hierarchical", "trinity", "random", "best"]
    planner.main([*words, "--arms", *few])
    kept = (tmp_path / "out" / "searches.jsonl").read_text().splitlines()
    planner.main([*words, "--arms", *few, "list"])
    torch.set_num_threads(threads)
    searches = json.loads((tmp_path / "out" / "planner.json").read_text())["searches"]
    assert (tmp_path / "out" / "searches.jsonl").read_text().splitlines()[: len(kept)] == kept
    assert {one["arm"] for one in searches[len(kept) :]} == {"list"}  # the others were there
    assert {one["arm"] for one in searches} == {*few, "list"}
    assert {(one["form"], one["weights"]) for one in searches} == {
        (form, weights) for form in planner.FORMS for weights in planner.WEIGHTS
    }
    assert all(one["evaluations"] <= 100 for one in searches)
    for form in planner.FORMS:
        cell = [one for one in searches if (one["form"], one["weights"], one["seed"]) == (form, "time", 0)]
        least = min(one["objective"] for one in cell if one["arm"] in planner.DRAW_NOTHING)
        assert next(one["objective"] for one in cell if one["arm"] == "best") <= least * (1 + 1e-9)
    assert "| digits, two-hosts |" in (tmp_path / "out" / "planner.md").read_text()


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("costs")))
        threads = torch.get_num_threads()
        found = planning.problems(["digits"], ["two-hosts"], 0.05, one_replica=True)
        torch.set_num_threads(threads)
    return found["digits", "two-hosts"]


@pytest.mark.parametrize("arm", sorted(planner.WEIGH_NOTHING - {"data"}))  # which has replicas of its own
def test_what_weighs_nothing_proposes_the_same_for_all_weights(problem, arm):
    proposed = []
    for weights in planner.WEIGHTS.values():
        driver = planner.Recorder(problem, weights, planner.Budget(60), seed=1)
        driver.run(arm)
        proposed.append(driver.heard)
    assert len(proposed[0]) > 2
    assert proposed[0] == proposed[1]


def test_other_settings_are_refused_in_the_same_folder(tmp_path):
    words = ["--quick", "--models", "digits", "--arms", "list", "--output", str(tmp_path)]
    require_same(tmp_path, {"evaluations": 100, "full": False})
    require_same(tmp_path, {"evaluations": 100, "full": False})
    with pytest.raises(SystemExit, match="holds what was found with another evaluations, full: name another folder"):
        require_same(tmp_path, {"evaluations": 300, "full": True})
    with pytest.raises(SystemExit, match="holds what was found with another"):
        planner.main(words)


def test_a_search_is_near_once_it_is_within_a_twentieth():
    record = {"course": [(1, 2.0), (40, 1.06), (50, 1.05)]}
    assert planner_tables.evaluations_near(record, 1.0) == 50
    assert planner_tables.evaluations_near(record, 0.9) == math.inf


def test_failures_are_censored():
    assert planner_tables.middle([4, math.inf, 2]) == 4
    assert planner_tables.middle([4, math.inf]) == math.inf


def test_a_claim_is_judged_by_its_target():
    records = [searched("trinity", 1.0, near=100), searched("hierarchical", 2.0, near=300)]
    told = planner_tables.verdicts(records)
    (row,) = [line for line in told if "| trinity | hierarchical | objective | 0.5 |" in line]
    assert row.endswith("better: met |")
    assert any("| trinity | hierarchical | evaluations | 0 |" in line for line in told)  # the other was never near
    assert not any("pretrained" in line for line in told)


def test_costs_are_told_apart():
    """An objective of a third each hides that one cost is higher."""
    records = [
        searched("trinity", 0.95, seconds_per_sample=0.9, bytes_per_sample=140.0, memory_fraction=0.5),
        searched("hierarchical", 1.0, seconds_per_sample=1.0, bytes_per_sample=100.0, memory_fraction=0.5),
    ]
    told = planner_tables.verdicts(records)
    for cost, ratio in (("time", "0.9"), ("bytes", "1.4"), ("memory", "1")):
        assert any(f"| trinity | hierarchical | {cost} | {ratio} |" in line for line in told)


def test_cells_without_any_bytes_have_no_ratio_of_them():
    records = [searched("trinity", 1.0, bytes_per_sample=0.0), searched("hierarchical", 1.0, bytes_per_sample=0.0)]
    assert not any("| bytes |" in line for line in planner_tables.verdicts(records))


def test_what_ran_once_for_all_weights_counts_once():
    once = [searched("tapp", 1.0, seconds=60.0, weights=weights) for weights in ("time", "thirds")]
    twice = [searched("trinity", 1.0, seconds=seconds, weights="time") for seconds in (20.0, 40.0)]
    *_, tapp, trinity, together = planner_tables.spent(once + twice)
    assert tapp == "| one replica | tapp | 1 | 60.00 | 60 |"
    assert trinity == "| one replica | trinity | 2 | 30.00 | 60 |"
    assert "120: 1 minutes of two cores" in together


def test_the_least_is_bold():
    records = [searched("trinity", 0.50001), searched("local", 0.5), searched("random", 1.0)]
    assert planner_tables.overview(records, lambda one, _: one["objective"], ".3f")[-1] == (
        "| m, c | **0.500** | **0.500** | 1.000 |"
    )


def test_a_best_that_is_beaten_is_told():
    assert planner_tables.beaten([searched("best", 2.0), searched("random", 1.0)]) == [
        "By medians, best is worse than another search in 1 of 1 cells.",
        "",
        "- one replica, time, m, c: best 2, random 1",
    ]


def test_models_of_text_are_planned_without_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    found = planning.problems(["nmt"], ["two-hosts"], 0.01, one_replica=True)["nmt", "two-hosts"]
    torch.set_num_threads(threads)
    assert len(found.evaluator.graph.blocks) > 4
    assert all("missing" not in one for one in planner.searched(found, "list", 0, 20))
