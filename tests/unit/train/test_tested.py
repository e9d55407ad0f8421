"""Rows of predictions: what data give, what is in a file, and what is no rows."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet

from hetsync.cli.metric_tables import show
from hetsync.data.rows import LARGEST_PICTURE, labelled
from hetsync.errors import UserError
from hetsync.files import DiskError
from hetsync.train.rows_file import RowsFile
from hetsync.train.tested import RunMetrics, checked_rows, trained_weights


@pytest.mark.parametrize("name", ["found.parquet", "found.csv"])
def test_a_file_has_all_rows_in_their_order(name: str, tmp_path: Path) -> None:
    rows = RowsFile(tmp_path / name)
    with rows.written():
        rows.write({"sample": np.arange(3), "image": np.array([None, None, None], object)})
        rows.write({"sample": np.arange(3, 5), "image": np.array(["abc", None], object)})
        assert not (tmp_path / name).exists()
    read = csv.read_csv if name.endswith("csv") else parquet.read_table
    found = read(tmp_path / name)
    assert found["sample"].to_pylist() == [0, 1, 2, 3, 4]
    assert rows.rows == 5
    assert [path.name for path in tmp_path.iterdir()] == [name]


def write_twice(rows: RowsFile) -> None:
    rows.write({"sample": np.arange(3)})
    rows.write({"other": np.arange(3)})


@pytest.mark.parametrize("name", ["found.parquet", "found.csv"])
def test_a_file_is_complete_or_as_it_was(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("before")
    rows = RowsFile(tmp_path / name)
    with pytest.raises(UserError, match="return the same ones each time"), rows.written():
        write_twice(rows)
    assert (tmp_path / name).read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_no_table_holds_is_one_sentence(tmp_path: Path) -> None:
    rows = RowsFile(tmp_path / "found.csv")
    what = r"data\.rows returned a as an array of (object|complex128), which no table holds"
    for column in (np.array([{}, 1], object), np.ones(2, complex)):
        with pytest.raises(UserError, match=what):
            rows.write({"a": column})


def test_a_failure_of_rows_is_not_the_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), RowsFile(tmp_path / "found.csv").written():
        (tmp_path / "nowhere").read_text()


def test_naive_predictors_stand_beside_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"model": {"mae": 1.23456, "rmse": 2.0}, "last value": {"mae": 3.0, "rmse": 4.56789}}
    show(Path("runs/one"), RunMetrics("test", 12, "best", 34, None, metrics))
    cells = [line.replace("┃", "│").split("│") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in row[1:-1]] for row in cells if len(row) == 5]
    assert rows == [["", "model", "last value"], ["mae", "1.235", "3"], ["rmse", "2", "4.568"]]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowsFile(tmp_path / "found.csv")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DiskError, match=r"cannot write .*found.csv: No space left on device"), rows.written():
        rows.write({"sample": np.arange(3)})
    assert not list(tmp_path.iterdir())


def test_rows_know_their_samples() -> None:
    found = checked_rows({"a": torch.arange(6), "b": np.ones(6), "c": [1] * 6}, range(4, 7))
    assert found["sample"].tolist() == [4, 4, 5, 5, 6, 6]
    assert found["a"].tolist() == list(range(6))
    half = checked_rows({"a": torch.ones(2, dtype=torch.bfloat16)}, range(2))
    assert half["a"].dtype == np.float32


@pytest.mark.parametrize(
    "columns",
    [
        [1, 2],
        {},
        {"sample": np.ones(4)},
        {"a": np.ones(4), "b": np.ones(2)},
        {"a": np.ones(3)},
        {"a": np.ones((4, 2))},
        {"a": 1.0},
    ],
)
def test_what_is_no_rows_is_one_sentence(columns: Any) -> None:
    with pytest.raises(UserError, match=r"^data\.rows returned"):
        checked_rows(columns, range(4))


class Scores(torch.nn.Module):
    def forward(self, pictures_NCYX: torch.Tensor) -> torch.Tensor:
        return pictures_NCYX.flatten(1)[:, :3] * 20


def test_wrong_answers_that_were_sure_have_pictures() -> None:
    pictures = torch.zeros(4, 3, 100, 200)
    for sample, found in enumerate((0, 1, 2)):
        pictures[sample, 0, 0, found] = 1.0
    rows = labelled(Scores(), (pictures, torch.tensor([0, 0, 2, 1])))  # the last knows nothing
    assert rows["predicted_label"].tolist()[:3] == [0, 1, 2]
    assert [image is not None for image in rows["image"]] == [False, True, False, False]
    image = Image.open(io.BytesIO(base64.b64decode(rows["image"][1])))
    assert image.size == (LARGEST_PICTURE, LARGEST_PICTURE // 2)
    assert np.asarray(image).max() > 0
    assert set(labelled(Scores(), (torch.zeros(2, 5), torch.zeros(2)))) == {"label", "predicted_label", "probability"}


def test_a_run_without_weights_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no complete checkpoint"):
        trained_weights(tmp_path, None, averaged=False)
