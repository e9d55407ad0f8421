"""Files are whole or not there, what cannot be one is refused, and JSON is such that any reader takes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hetsync.files import DiskError, json_text, write_atomically


@pytest.mark.parametrize("path", [".", "", "/", "folder"])
def test_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DiskError, match="it is a folder; give the name of a file"):
        write_atomically(Path(path), "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_atomically(tmp_path / "new" / "file", text)
    assert (tmp_path / "new" / "file").read_text() == "second"


def test_finite_values_are_written_as_they_are() -> None:
    assert json_text({"a": [1, 2.5, None, "text", True]}) == '{"a": [1, 2.5, null, "text", true]}'


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float64("inf")])
def test_infinities_are_texts_that_are_numbers_again(value: float) -> None:
    found = json.loads(json_text({"a": (value, {"b": value}), "c": 1.5}), parse_constant=pytest.fail)
    assert found["c"] == 1.5
    assert [float(found["a"][0]), float(found["a"][1]["b"])] == [value, value]


def test_nan_is_a_text() -> None:
    assert json_text([math.nan]) == '["nan"]'
