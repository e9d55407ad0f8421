"""What a run has predicted, as its columns say what it is; and the part of the page that shows it."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import start, tasks, write_lines

from hetsync import extras
from hetsync.report.predictions import Curve, Predictions, read_predictions

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
PICTURE = "iVBORw0KGgo="


def shown(folder: Path, columns: dict[str, Any]) -> Predictions:
    parquet.write_table(pa.table(columns), folder / "predictions.parquet")
    return read_predictions(folder)


def curves(found: Predictions) -> dict[str, Curve]:
    return {curve.name: curve for curve in found.curves}


def rows_of(found: Predictions, name: str) -> list[dict[str, str]]:
    (table,) = (each for each in found.tables if each.name == name)
    return [dict(zip(table.heads, row, strict=True)) for row in table.rows]


def regression(rows: int = 500) -> dict[str, Any]:
    """Of three places; some rows have no actual value, and some no hour."""
    generator = np.random.default_rng(0)
    actual = generator.normal(50.0, 9.0, rows)
    predicted = actual + generator.normal(0.0, 2.0, rows)
    actual[::7] = np.nan
    place = np.arange(rows) % 3
    return {
        "sample": np.arange(rows),
        "actual": actual,
        "predicted": predicted,
        "minutes_ahead": 5 * generator.integers(1, 13, rows),
        "hour": [None if row % 11 == 0 else row % 24 for row in range(rows)],
        "kilometres": generator.gamma(2.0, 4.0, rows),
        "longitude": np.array([4.1, 4.2, 4.1])[place],
        "latitude": np.array([50.5, 50.5, 50.7])[place],
    }


def by_hand(columns: dict[str, Any], *keys: str) -> dict[tuple[Any, ...], tuple[float, float]]:
    """MAE and RMSE."""
    errors = defaultdict(list)
    for row in range(len(columns["actual"])):
        error = columns["predicted"][row] - columns["actual"][row]
        key = tuple(columns[each][row] for each in keys)
        if not math.isnan(error) and None not in key:
            errors[key].append(abs(error))
    return {
        key: (sum(all_of_it) / len(all_of_it), math.sqrt(sum(error**2 for error in all_of_it) / len(all_of_it)))
        for key, all_of_it in sorted(errors.items())
    }


@pytest.mark.parametrize("key", ["minutes_ahead", "hour"])
def test_errors_by_a_column_are_those_of_a_loop(tmp_path: Path, key: str) -> None:
    columns = regression()
    curve = curves(shown(tmp_path, columns))[key]
    expected = by_hand(columns, key)
    assert curve.x.tolist() == [each for (each,) in expected]
    assert curve.values["MAE"] == pytest.approx([mean for mean, _ in expected.values()], rel=1e-12)
    assert curve.values["RMSE"] == pytest.approx([square for _, square in expected.values()], rel=1e-12)


def test_distances_are_in_ten_bins_of_as_many_rows(tmp_path: Path) -> None:
    columns = regression()
    curve = curves(shown(tmp_path, columns))["kilometres"]
    known = ~np.isnan(columns["actual"])
    order = np.argsort(columns["kilometres"][known])
    size = np.abs(columns["predicted"] - columns["actual"])[known]
    bins = np.array_split(order, 10)
    assert curve.x == pytest.approx([columns["kilometres"][known][each].mean() for each in bins], rel=0.05)
    assert curve.values["MAE"] == pytest.approx([size[each].mean() for each in bins], rel=0.05)
    assert curve.values["MAE"].mean() == pytest.approx(size.mean(), rel=0.01)


def test_equal_distances_are_in_one_bin(tmp_path: Path) -> None:
    columns = {"actual": np.zeros(100), "predicted": np.repeat([1.0, 3.0], 50), "kilometres": np.repeat([2.0, 5.0], 50)}
    curve = curves(shown(tmp_path, columns))["kilometres"]
    assert (curve.x.tolist(), curve.values["MAE"].tolist()) == ([2.0, 5.0], [1.0, 3.0])


def test_rows_may_tell_their_error_alone(tmp_path: Path) -> None:
    found = shown(tmp_path, {"sample": [0, 0, 1, 1], "steps_ahead": [1, 2, 1, 2], "error": [1.0, 4.0, 3.0, None]})
    curve = curves(found)["steps_ahead"]
    assert curve.values["MAE"].tolist() == [2.0, 4.0]
    assert curve.values["RMSE"] == pytest.approx([math.sqrt(5), 4.0])
    assert found.notes[0] == "3 rows; 1 more without an error do not count"
    assert [row[-1] for row in found.tables[0].rows] == ["4", "3", "1"]


def test_a_place_has_the_errors_of_its_rows(tmp_path: Path) -> None:
    columns = regression()
    found = shown(tmp_path, columns).map
    assert found is not None
    expected = by_hand(columns, "longitude", "latitude")
    assert [*zip(found.longitude, found.latitude, strict=True)] == [*expected]
    assert found.error == pytest.approx([mean for mean, _ in expected.values()], rel=1e-12)


def test_the_greatest_errors_are_listed_with_all_columns(tmp_path: Path) -> None:
    columns = regression() | {"road": [f"road {row}" for row in range(500)]}
    rows = rows_of(shown(tmp_path, columns), "errors")
    size = np.nan_to_num(np.abs(columns["predicted"] - columns["actual"]))
    worst = np.argsort(-size)[:20]
    assert [row["sample"] for row in rows] == [str(row) for row in worst]
    assert [row["road"] for row in rows] == [f"road {row}" for row in worst]
    assert [float(row["error"]) for row in rows] == pytest.approx(size[worst], rel=1e-5)
    assert [*rows[0]] == [*columns, "error"]


def test_rows_without_an_actual_value_do_not_count(tmp_path: Path) -> None:
    columns = {"actual": [1.0, math.nan, None, 5.0], "predicted": [2.0, 9.0, 9.0, 2.0], "hour": [3, 4, 4, 3]}
    found = shown(tmp_path, columns)
    assert found.notes == ["2 rows; 2 more without an actual or a predicted value do not count", "MAE 2, RMSE 2.236"]
    assert curves(found)["hour"].x.tolist() == [3.0]
    assert found.pairs is not None
    assert [each.tolist() for each in found.pairs] == [[1.0, 5.0], [2.0, 2.0]]
    nothing = shown(tmp_path, {"actual": [math.nan], "predicted": [1.0]})
    assert (nothing.notes, nothing.tables, nothing.pairs) == (
        ["0 rows; 1 more without an actual or a predicted value do not count"],
        [],
        None,
    )


def test_points_are_chosen_evenly(tmp_path: Path) -> None:
    pairs = shown(tmp_path, {"actual": np.arange(20_001), "predicted": np.zeros(20_001)}).pairs
    assert pairs is not None
    assert len(pairs[0]) == 5000
    assert (pairs[0][0], pairs[0][-1]) == (0, 20_000)
    assert set(np.diff(pairs[0])) <= {4.0, 5.0}


# Classes.


def test_what_was_taken_for_what_is_counted(tmp_path: Path) -> None:
    columns = {"label": [10, 9, 9, 9, 9, None, 10], "predicted_label": [10, 10, 9, 10, 10, 9, None]}
    found = shown(tmp_path, columns)
    assert found.notes == ["5 rows; 2 more without a label or a prediction do not count", "accuracy 0.4"]
    assert found.confusion is not None
    assert found.confusion.classes == ["9", "10"]
    assert found.confusion.rows.tolist() == [[1, 3], [0, 1]]


def test_of_many_classes_the_most_frequent_confusions_are_listed(tmp_path: Path) -> None:
    names = [f"class {number:02d}" for number in range(60)]
    found = shown(tmp_path, {"label": names + names[:1] * 7, "predicted_label": names + names[3:4] * 5 + names[4:6]})
    assert found.confusion is None
    told = [tuple(row.values()) for row in rows_of(found, "confusions")]
    assert told == [(names[0], names[3], "5"), (names[0], names[4], "1"), (names[0], names[5], "1")]


def test_wrong_and_sure_comes_first_with_its_picture(tmp_path: Path) -> None:
    columns = {
        "sample": [0, 1, 2, 3],
        "label": ["cat", "dog", "dog", "cat"],
        "predicted_label": ["dog", "dog", "cat", "dog"],
        "probability": [0.6, 0.99, 0.9, math.nan],
        "image": [PICTURE, None, PICTURE, "no picture"],
    }
    found = shown(tmp_path, columns)
    rows = rows_of(found, "wrong")
    assert [row["sample"] for row in rows] == ["2", "0", "3"]
    assert "image" not in rows[0]
    assert [(each.png, each.caption) for each in found.pictures] == [
        (PICTURE, "dog, predicted cat"),
        (PICTURE, "cat, predicted dog"),
    ]


# Text.


def test_perplexity_is_that_of_the_mean_loss(tmp_path: Path) -> None:
    found = shown(tmp_path, {"position": [0, 1, 0, 1, 2], "loss": [1.0, 2.0, 3.0, math.nan, 2000.0]})
    (curve,) = found.curves
    assert curve.x.tolist() == [0.0, 1.0, 2.0]
    assert curve.values["perplexity"].tolist() == pytest.approx([math.exp(2.0), math.exp(2.0), math.inf])


def test_many_positions_are_in_bins(tmp_path: Path) -> None:
    (curve,) = shown(tmp_path, {"position": np.arange(1000), "loss": np.log(np.arange(1000) // 5 + 1.0)}).curves
    assert curve.x == pytest.approx(np.arange(200) * 5 + 2.0, abs=1.0)
    assert np.all(np.diff(curve.values["perplexity"]) > 0)


# What is there, and what is wrong with it.


def test_nothing_predicted_is_nothing_shown(tmp_path: Path) -> None:
    assert read_predictions(tmp_path) == Predictions()


def test_no_rows_are_no_failure(tmp_path: Path) -> None:
    nothing = pa.array([], pa.float64())
    found = shown(
        tmp_path, dict.fromkeys(["actual", "predicted", "position", "loss", "label", "predicted_label"], nothing)
    )
    assert found.notes == ["0 rows", "0 rows", "no row has a position and a loss"]


def damaged() -> bytes:
    """Whole but for what the columns hold."""
    file = pa.BufferOutputStream()
    parquet.write_table(pa.table({"position": np.random.default_rng(0).random(9000), "loss": np.zeros(9000)}), file)
    content = bytearray(file.getvalue())
    content[4:20_000] = b"\xff" * 19_996
    return bytes(content)


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing of the kind", damaged()])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "predictions.parquet").write_bytes(content)
    found = read_predictions(tmp_path)
    assert re.fullmatch("predictions.parquet cannot be read: .+", found.notes[-1])


def test_columns_of_another_kind_are_one_sentence(tmp_path: Path) -> None:
    (told,) = shown(tmp_path, {"actual": ["much"], "predicted": [1.0]}).notes
    assert told.startswith("predictions.parquet cannot be read: ")
    (told,) = shown(tmp_path, {"sample": [1]}).notes
    assert told.startswith("predictions.parquet has none of the columns that are shown: actual with predicted, ")


def test_without_pyarrow_the_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "predictions.parquet").touch()
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (told,) = read_predictions(tmp_path).notes
    assert re.fullmatch("showing predictions.parquet needs pyarrow: .* -m pip install pyarrow", told)


# The test part.


def write_test(folder: Path, **fields: Any) -> None:
    told = {"part": "test", "samples": 1234, "weights": "best", "samples_applied": 5678, "rows": None, "metrics": {}}
    (folder / "test.json").write_text(json.dumps(told | fields))


def test_predictions_of_another_look_than_the_metrics_are_told(tmp_path: Path) -> None:
    told = {"part": "test", "samples": 4, "weights": "best", "samples_applied": 5, "metrics": {"model": {"mae": 1.0}}}
    old = "predictions.parquet is older than the metrics: hetsync predict writes both"
    for rows, notes in ((4, []), (None, [old]), (3, [old])):
        (tmp_path / "test.json").write_text(json.dumps({**told, "rows": rows}))
        found = shown(tmp_path, {"actual": [1.0] * 4, "predicted": [2.0] * 4})
        assert [note for note in found.notes if "older" in note] == notes


def test_the_model_stands_before_what_it_is_compared_with(tmp_path: Path) -> None:
    others = {"last value": {"mae": 12345.678, "mape": "nan"}}
    write_test(tmp_path, metrics=others | {"model": {"rmse": 2.0, "mae": 0.00123456}})
    scores = read_predictions(tmp_path).scores
    assert scores is not None
    assert (scores.title, scores.heads) == ("On the test part", ("", "rmse", "mae", "mape"))
    assert scores.rows == [["model", "2", "0.001235", ""], ["last value", "", "12,350", "nan"]]
    assert scores.note == "1,234 samples · weights: best · trained on 5,678 samples"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"samples": None}, "samples is null: it must be a whole number"),
        ({"metrics": [1]}, r"metrics is \[1\]: it must be a mapping"),
        ({"metrics": {"model": {"mae": "x"}}}, "metrics.model.mae is x: it must be a number"),
    ],
)
def test_a_wrong_value_of_the_test_part_is_named(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    write_test(tmp_path, **fields)
    (told,) = read_predictions(tmp_path).notes
    assert re.search(f"cannot read .*test.json: {sentence}", told)


# The page.


def page_of(folder: Path) -> str:
    pytest.importorskip("bokeh", reason="bokeh is not installed")
    from hetsync.report.page import page_of

    write_lines(folder, 0, [*start(), *tasks(10)])
    return page_of([folder])


def test_the_page_shows_all_of_it_and_needs_nothing_else(tmp_path: Path) -> None:
    write_test(tmp_path, metrics={"model": {"mae": 1.0}})
    labels = {"label": ["<cat>", "dog"] * 250, "predicted_label": ["dog"] * 500, "image": [PICTURE] * 500}
    text = {"position": np.arange(500), "loss": np.full(500, 1e6)}
    shown(tmp_path, {**regression(), **labels, **text})
    page = page_of(tmp_path)
    (part,) = re.findall(r'<section data-part="predictions">.*</article>', page, re.DOTALL)
    assert re.findall('data-table="(.*?)"', part) == ["test", "errors", "wrong"]
    assert part.count(f"data:image/png;base64,{PICTURE}") == 20
    assert "&lt;cat&gt;, predicted dog" in part
    for title in ("Predicted against actual", "Mean absolute error at 3 places", "What was taken for what"):
        assert title in page
    for by in ("minutes ahead", "hour of the day", "kilometres"):
        assert f"Error by {by}" in page
    assert "Perplexity by position" in page
    assert "<script src" not in page
    assert "<link" not in page


def test_a_page_without_predictions_has_no_such_part(tmp_path: Path) -> None:
    assert 'data-part="predictions"' not in page_of(tmp_path)


def test_a_page_tells_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "predictions.parquet").write_bytes(b"<b>")
    assert "predictions.parquet cannot be read: " in page_of(tmp_path)


def test_a_million_rows_are_means_of_all(tmp_path: Path) -> None:
    rows = 1_000_000
    columns = {"actual": np.zeros(rows), "predicted": np.arange(rows) % 24 * 1.0, "hour": np.arange(rows) % 24}
    columns |= {"longitude": np.arange(rows) % 8000 * 0.01, "latitude": np.zeros(rows), "kilometres": np.arange(rows)}
    found = shown(tmp_path, columns)
    assert curves(found)["hour"].values["MAE"].tolist() == list(range(24))
    assert len(curves(found)["kilometres"].x) == 10
    assert found.map is not None
    assert len(found.map.error) == 5000
