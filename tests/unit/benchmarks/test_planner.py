"""The planner's benchmark: its quick form runs, and its tables say what the searches found."""

from __future__ import annotations

import json

import torch

from benchmarks import planner
from hetsync.plan.search.registry import SEARCHES


def test_the_quick_form_compares_all_searches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    planner.main(["--quick", "--output", str(tmp_path / "out")])
    torch.set_num_threads(threads)
    searches = json.loads((tmp_path / "out" / "planner.json").read_text())["searches"]
    assert {one["arm"] for one in searches} == {*SEARCHES, "best"}
    assert {one["weights"] for one in searches} == {"time", "thirds"}
    assert all(one["evaluations"] <= 100 and one["objective"] >= one["bound"] * (1 - 1e-9) for one in searches)
    for weights in planner.WEIGHTS:
        cell = [one for one in searches if one["weights"] == weights and one["seed"] == 0]
        least = min(one["objective"] for one in cell if one["arm"] in planner.DRAW_NOTHING)
        assert next(one["objective"] for one in cell if one["arm"] == "best") <= least * (1 + 1e-9)
    table = (tmp_path / "out" / "planner.md").read_text()
    assert all(f"| {name} |" in table for name in SEARCHES)


def test_a_search_is_near_once_it_is_within_a_twentieth():
    record = {"course": [(1, 2.0), (40, 1.06), (50, 1.05)]}
    assert planner.evaluations_near(record, 1.0) == 50
    assert planner.evaluations_near(record, 0.9) is None


def test_a_best_that_is_beaten_is_told():
    cell = {"model": "m", "cluster": "c", "weights": "time"}
    records = [{**cell, "arm": arm, "objective": objective} for arm, objective in (("best", 2.0), ("random", 1.0))]
    assert planner.verdict(records) == [
        "In 1 of 1 cells the median of best is above the least of any search and seed.",
        "",
        "- m, c, time: best 2, random 1",
    ]


def test_models_of_text_are_planned_without_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    problem = planner.problem_of("nmt", planner.CLUSTERS["two-hosts"], 0.01)
    torch.set_num_threads(threads)
    assert len(problem.evaluator.graph.blocks) > 4
    assert "missing" not in planner.searched(problem, "list", "thirds", 0, 20)
