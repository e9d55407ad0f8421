"""What of a summary is shown is of the kind that it must be, or is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from run_folders import round_of, start, tasks, write_lines, write_summary

from hetsync.errors import UserError
from hetsync.files import json_text
from hetsync.report.live import LiveRun
from hetsync.report.page import page_of
from hetsync.report.summary import read_summary


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"ranks": [2]}, r"ranks is \[2\]: it must be a whole number"),
        ({"samples_expected": "x"}, "samples_expected is x: it must be a whole number or null"),
        ({"samples_applied": 10**4000}, r"samples_applied is 1000.*characters.*: it must be a whole number"),
        ({"solo_fraction_interval": [1]}, r"solo_fraction_interval is \[1\]: it must be two numbers"),
        ({"staleness": {"max": 1}}, "staleness.mean is null: it must be a number"),
        ({"staleness": {"mean": 1, "max": 1, "histogram": 3}}, "staleness.histogram is 3: it must be a mapping"),
        ({"metrics": {"a": []}}, r"metrics.a is \[\]: it must be a number"),
        ({"per_rank": 0.5}, "per_rank is 0.5: it must be a list"),
        ({"per_rank": [{"host": "a"}]}, r"per_rank\[0\].rank is null: it must be a whole number"),
        ({"per_rank": [{"rank": 0, "solo_uncertainty": "[["}]}, r"per_rank\[0\].solo_uncertainty is \[\[: it must be"),
    ],
)
def test_a_wrong_value_is_named(told: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write_summary(tmp_path, **told)
    with pytest.raises(UserError, match=f"{sentence}.*; remove it to look at the rest"):
        read_summary(tmp_path)


def test_what_was_called_efficiency_before_is_read_as_what_it_was(tmp_path: Path) -> None:
    old = {"efficiency": 1.05, "efficiency_interval": [1.0, 1.1], "efficiency_while_training": 0.9}
    write_summary(tmp_path, status="finished", **old)
    found = read_summary(tmp_path)
    assert (found["efficiency"], found["solo_fraction"], found["solo_fraction_interval"]) == (0.9, 1.05, [1.0, 1.1])


def test_numbers_that_json_has_not_are_shown(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(10)])
    (tmp_path / "summary.json").write_text(json_text({"status": "finished", "metrics": {"loss": math.nan}}))
    assert math.isnan(read_summary(tmp_path)["metrics"]["loss"])
    page_of([tmp_path])


def test_a_recipe_of_something_else_is_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path, 0, [*start(), *tasks(10)])
    (tmp_path / "recipe.yaml").write_text("{sync: 3, model: x, data: {name: [1]}}")
    page_of([tmp_path])


def test_a_round_without_its_staleness_is_shown(tmp_path: Path) -> None:
    line = round_of(1.0)
    del line["staleness"]
    write_lines(tmp_path, 0, [*start(), *tasks(10), line, {**line, "at": 10**30}])
    run = LiveRun(tmp_path)
    assert run.rows()[0].staleness is None
    assert run.unreadable == 1, "no clock tells that"
