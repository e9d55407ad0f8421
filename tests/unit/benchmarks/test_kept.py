"""What studies keep between two runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.kept import results_of


@dataclass(frozen=True)
class Cell:
    name: str
    seed: int


def found(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell), "figure": 10 * cell.seed}


def again(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell), "figure": -1}


def test_what_was_found_is_not_found_again_and_all_is_in_order(tmp_path: Path) -> None:
    first, second, third = (Cell("a", seed) for seed in (1, 2, 3))
    assert [each["figure"] for each in results_of(tmp_path, "study", [third, first], found, 1)] == [30, 10]
    both = results_of(tmp_path, "study", [first, second, third], again, 1)
    assert [(each["seed"], each["figure"]) for each in both] == [(1, 10), (2, -1), (3, 30)]
    assert json.loads((tmp_path / "study.json").read_text())["jobs"] == both
