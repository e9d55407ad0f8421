"""What a run has predicted, in the form that the page draws. Its columns, by their names, say what that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetsync.errors import UserError, brief, one_sentence
from hetsync.extras import require
from hetsync.files import PREDICTIONS
from hetsync.report.summary import read_test
from hetsync.report.table import Table

Array = NDArray[np.float64]
Places = NDArray[np.int64]  # of rows, or of what they are among

ERRORS_BY = {
    "minutes_ahead": "minutes ahead",
    "steps_ahead": "steps ahead",
    "hour": "hour of the day",
    "kilometres": "kilometres",
}
MOST_GROUPS, DISTANCES = 200, 10  # points of a line
MOST_POINTS, MOST_CLASSES, MOST_ROWS = 5000, 50, 20
PNG = "iVBORw0KGgo"  # as base64 begins with it


@dataclass(frozen=True)
class Curve:
    """Means of rows, by what they have in a column; each of shape [groups]."""

    name: str
    title: str
    x_label: str
    x: Array
    values: Mapping[str, Array]


@dataclass(frozen=True)
class Map:
    """Mean absolute errors; each of shape [places]."""

    longitude: Array
    latitude: Array
    error: Array


@dataclass(frozen=True)
class Confusion:
    """`rows`: how many of each class were taken for each other, [classes, classes]."""

    classes: list[str]
    rows: Places


@dataclass(frozen=True)
class Picture:
    png: str  # base64
    caption: str


@dataclass
class Predictions:
    """What is shown; empty where a run has predicted nothing."""

    notes: list[str] = field(default_factory=list)
    scores: Table | None = None
    curves: list[Curve] = field(default_factory=list)
    pairs: tuple[Array, Array] | None = None  # actual and predicted
    map: Map | None = None
    confusion: Confusion | None = None
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def read_predictions(folder: Path) -> Predictions:
    """Of a run folder. What cannot be read is told by a note."""
    shown = Predictions()
    told: dict[str, Any] = {}
    try:
        told = read_test(folder)
        _show_test(told, shown)
    except UserError as error:
        shown.notes.append(str(error))
    try:
        _show_predictions(folder / PREDICTIONS, told, shown)
    except UserError as error:
        shown.notes.append(str(error))
    return shown


def _show_test(told: Mapping[str, Any], shown: Predictions) -> None:
    if not told:
        return
    metrics = sorted(told["metrics"].items(), key=lambda row: row[0] != "model")
    names = list(dict.fromkeys(name for _, values in metrics for name in values))
    rows = [[who, *(_digits(values[name]) if name in values else "" for name in names)] for who, values in metrics]
    note = f"{told['samples']:,} samples · weights: {told['weights']} · trained on {told['samples_applied']:,} samples"
    shown.scores = Table("test", f"On the {told['part']} part", ("", *names), rows, names, note)


def _digits(value: float, digits: int = 4) -> str:
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def _show_predictions(path: Path, told: Mapping[str, Any], shown: Predictions) -> None:
    if not path.is_file():
        return
    require("predict", f"showing {path.name}")
    from pyarrow import ArrowException

    try:
        file = File(path)
        if told and told["rows"] != file.rows:
            shown.notes.append(f"{path.name} is older than the metrics: hetsync predict writes both")
        kinds = [show for columns, show in KINDS.items() if file.has(*columns)]
        with np.errstate(over="ignore", invalid="ignore"):
            for show in kinds:
                show(file, shown)
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read: {one_sentence(str(error)).rstrip('.')}") from error
    if not kinds:
        wanted = ", ".join(" with ".join(columns) for columns in KINDS)
        shown.notes.append(f"{path.name} has none of the columns that are shown: {wanted}")


class File:
    """A file of predictions, of which a column at a time is in memory. Raises errors of pyarrow."""

    def __init__(self, path: Path) -> None:
        from pyarrow import dataset, fs

        self._rows = dataset.dataset(str(path), format="parquet", filesystem=fs.LocalFileSystem())
        self.rows: int = self._rows.count_rows()
        self.names: list[str] = self._rows.schema.names

    def has(self, *names: str) -> bool:
        return set(names) <= {*self.names}

    def numbers(self, name: str) -> Array:
        """nan where there is none."""
        found: Array = self._column(name).cast("float64", safe=False).to_numpy()
        return found

    def labels(self, name: str) -> tuple[Places, list[str]]:
        """The place of each row's among those that there are, or -1."""
        coded = self._column(name).cast("large_string").dictionary_encode().combine_chunks()
        return coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), coded.dictionary.to_pylist()

    def _column(self, name: str) -> Any:
        return self._rows.to_table(columns=[name]).column(0)

    def take(self, places: Places) -> list[dict[str, Any]]:
        """Whole rows."""
        found: list[dict[str, Any]] = self._rows.take(places).to_pylist() if len(places) else []
        return found


def means_by(keys: Array, begins: Array, *values: Array) -> tuple[Array, ...]:
    """Means of keys, and of each of the values, in groups that begin at these keys; without those that are empty."""
    place = np.searchsorted(begins, keys, side="right") - 1
    counts = np.bincount(place)
    there = counts > 0
    return tuple(np.bincount(place, each)[there] / counts[there] for each in (keys, *values))


def groups_of(keys: Array) -> Array:
    """Where groups begin: one for each key or, where they are many, as wide as each other."""
    distinct = np.unique(keys)
    if len(distinct) <= MOST_GROUPS:
        return distinct
    return np.linspace(distinct[0], distinct[-1], MOST_GROUPS, endpoint=False)


def evenly(rows: int) -> Places:
    """Places of at most MOST_POINTS of them."""
    return np.linspace(0, rows - 1, min(rows, MOST_POINTS)).round().astype(np.int64)


# A regression.


def _regression(file: File, shown: Predictions) -> None:
    actual, predicted = file.numbers("actual"), file.numbers("predicted")
    error = predicted - actual
    known = np.flatnonzero(np.isfinite(error))
    shown.notes.append(_counted(known, len(error), "an actual or a predicted value"))
    if not len(known):
        return
    some = known[evenly(len(known))]
    shown.pairs = (actual[some], predicted[some])
    del actual, predicted
    _errors(file, shown, known, np.abs(error[known]))


def _told_errors(file: File, shown: Predictions) -> None:
    """Of rows that tell their error, and not what was predicted, as of whole pictures."""
    if file.has("actual", "predicted"):
        return
    size = np.abs(file.numbers("error"))
    known = np.flatnonzero(np.isfinite(size))
    shown.notes.append(_counted(known, len(size), "an error"))
    if len(known):
        _errors(file, shown, known, size[known])


def _errors(file: File, shown: Predictions, known: Places, size: Array) -> None:
    """`size`: of the known rows' errors."""
    shown.notes.append(f"MAE {_digits(size.mean())}, RMSE {_digits(np.sqrt(np.square(size).mean()))}")
    shown.curves += [_errors_by(key, file.numbers(key)[known], size) for key in ERRORS_BY if file.has(key)]
    if file.has("longitude", "latitude"):
        shown.map = _map(file.numbers("longitude")[known], file.numbers("latitude")[known], size)
    _list_errors(file, shown, known, size)


def _counted(known: Places, rows: int, what: str) -> str:
    left_out = f"; {rows - len(known):,} more without {what} do not count" if len(known) < rows else ""
    return f"{len(known):,} rows{left_out}"


def _errors_by(key: str, keys: Array, size: Array) -> Curve:
    there = np.isfinite(keys)
    keys, size = keys[there], size[there]
    if key == "kilometres" and len(keys):
        begins = np.quantile(keys, np.arange(DISTANCES) / DISTANCES)
    else:
        begins = groups_of(keys)
    x, mean, square = means_by(keys, begins, size, size**2)
    return Curve(key, f"Error by {ERRORS_BY[key]}", ERRORS_BY[key], x, {"MAE": mean, "RMSE": np.sqrt(square)})


def _map(longitude: Array, latitude: Array, size: Array) -> Map:
    there = np.isfinite(longitude) & np.isfinite(latitude)
    places, place = np.unique(longitude[there] + 1j * latitude[there], return_inverse=True)
    some = evenly(len(places))
    means = np.bincount(place, size[there]) / np.bincount(place)
    return Map(places.real[some], places.imag[some], means[some])


def _list_errors(file: File, shown: Predictions, known: Places, size: Array) -> None:
    worst = np.argpartition(-size, MOST_ROWS)[:MOST_ROWS] if len(size) > MOST_ROWS else np.arange(len(size))
    worst = worst[np.argsort(-size[worst], kind="stable")]
    rows = [{**row, "error": float(each)} for row, each in zip(file.take(known[worst]), size[worst], strict=True)]
    shown.tables.append(_listed("errors", "The greatest errors", rows))


def _listed(name: str, title: str, rows: list[dict[str, Any]]) -> Table:
    heads = [head for head in (rows[0] if rows else ()) if head != "image"]
    numbers = [head for head in heads if all(isinstance(row[head], int | float | None) for row in rows)]
    return Table(name, title, heads, [[_told(row[head]) for head in heads] for row in rows], numbers)


def _told(value: Any) -> str:
    if isinstance(value, float):
        return _digits(value, 6)
    return "" if value is None else brief(str(value))


# A classification.


def _classification(file: File, shown: Predictions) -> None:
    classes, label, guess = _classes(file)
    known = np.flatnonzero((label >= 0) & (guess >= 0))
    shown.notes.append(_counted(known, len(label), "a label or a prediction"))
    if not len(known):
        return
    wrong = known[label[known] != guess[known]]
    shown.notes.append(f"accuracy {_digits(1 - len(wrong) / len(known))}")
    if len(classes) <= MOST_CLASSES:
        rows = np.bincount(label[known] * len(classes) + guess[known], minlength=len(classes) ** 2)
        shown.confusion = Confusion(classes, rows.reshape(len(classes), -1))
    else:
        shown.tables.append(_confusions(classes, label[wrong], guess[wrong]))
    _list_wrong(file, shown, wrong)


def _classes(file: File) -> tuple[list[str], Places, Places]:
    """With the label and the prediction of each row among them, or -1."""
    columns = file.labels("label"), file.labels("predicted_label")
    classes = sorted({name for _, names in columns for name in names}, key=_in_order)
    number = {name: place for place, name in enumerate(classes)}
    label, guess = (np.array([*(number[name] for name in names), -1])[coded] for coded, names in columns)
    return classes, label, guess


def _in_order(name: str) -> tuple[float, str]:
    """Whole numbers first, by size."""
    return (int(name), "") if name.removeprefix("-").isdecimal() else (np.inf, name)


def _confusions(classes: list[str], label: Places, guess: Places) -> Table:
    pairs, counts = np.unique(label * len(classes) + guess, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MOST_ROWS]
    found = zip(*np.divmod(pairs[most], len(classes)), counts[most], strict=True)
    rows = [[classes[a], classes[b], f"{count:,}"] for a, b, count in found]
    return Table("confusions", "The most frequent confusions", ("label", "predicted", "rows"), rows, ("rows",))


def _list_wrong(file: File, shown: Predictions, wrong: Places) -> None:
    """First those of which the model was most sure."""
    title = "Wrong"
    if file.has("probability"):
        title = "Wrong, and most sure of it"
        probability = np.nan_to_num(file.numbers("probability")[wrong], nan=-1.0)
        wrong = wrong[np.argsort(-probability, kind="stable")]
    rows = file.take(wrong[:MOST_ROWS])
    shown.tables.append(_listed("wrong", title, rows))
    shown.pictures = [
        Picture(row["image"], f"{_told(row['label'])}, predicted {_told(row['predicted_label'])}")
        for row in rows
        if str(row.get("image")).startswith(PNG)
    ]


# A text.


def _text(file: File, shown: Predictions) -> None:
    position, loss = file.numbers("position"), file.numbers("loss")
    there = np.isfinite(position) & np.isfinite(loss)
    position, loss = position[there], loss[there]
    if not len(loss):
        shown.notes.append("no row has a position and a loss")
        return
    x, mean = means_by(position, groups_of(position), loss)
    shown.notes.append(f"perplexity {_digits(np.exp(loss.mean()))}, of {len(loss):,} tokens")
    shown.curves.append(Curve("position", "Perplexity by position", "position", x, {"perplexity": np.exp(mean)}))


KINDS = {
    ("actual", "predicted"): _regression,
    ("error",): _told_errors,
    ("label", "predicted_label"): _classification,
    ("position", "loss"): _text,
}
