"""Trips in the field's JSON form, checked, and as a table that may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

POINT = ("lngs", "lats", "states", "time_gap", "dist_gap")  # columns of TripTable.points
TRIP = np.dtype(
    [
        ("start", "i8"),  # row of the trip's first point in TripTable.points
        ("length", "i4"),
        ("driver", "i4"),
        ("date", "i4"),
        ("week", "i4"),
        ("minute", "i4"),
        ("dist", "f4"),  # km
        ("time", "f4"),  # seconds
    ]
)
BLOCK = 4096  # trips in memory at once while a table is written or summed
RANGES = {"driverID": 2**31, "dateID": 2**31, "weekID": 7, "timeID": 1440}
LIMITS = {"lngs": (-180.0, 180.0), "lats": (-90.0, 90.0), "time_gap": (0.0, np.inf), "dist_gap": (0.0, np.inf)}


def validate(record: Any) -> str | None:
    """What is wrong with a trip record, or None. Never raises, whatever the record is."""
    if not isinstance(record, Mapping):
        return "is no JSON object"
    missing = [key for key in (*RANGES, "dist", "time", *POINT) if key not in record]
    if missing:
        return f"lacks {', '.join(missing)}"
    return _wrong_scalars(record) or _wrong_points(record)


def _wrong_scalars(record: Mapping[str, Any]) -> str | None:
    for key, limit in RANGES.items():
        value = _number(record[key])
        if not (value.is_integer() and 0 <= value < limit):
            return f"{key} is not a whole number from 0 to {limit - 1}"
    if not 0 < _number(record["time"]) < np.inf:
        return "time is not a positive number of seconds"
    if not 0 <= _number(record["dist"]) < np.inf:
        return "dist is not a number of km"
    return None


def _number(value: Any) -> float:
    """As float; NaN for what is no number."""
    try:
        return float(value) if np.asarray(value).dtype.kind in "iuf" else np.nan
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _wrong_points(record: Mapping[str, Any]) -> str | None:
    columns: dict[str, np.ndarray] = {}
    for key in POINT:
        try:
            column = np.asarray(record[key])
        except ValueError:  # lists of unequal lengths inside
            return f"{key} is no list of numbers"
        if column.ndim != 1 or column.dtype.kind not in "iuf" or not np.isfinite(column).all():
            return f"{key} is no list of finite numbers"
        columns[key] = column
    if len({len(column) for column in columns.values()}) > 1:
        return "lists of unequal lengths"
    if len(columns["lngs"]) < 2:
        return "fewer than 2 points"
    if not np.isin(columns["states"], (0, 1)).all():
        return "states are not all 0 or 1"
    for key, (least, most) in LIMITS.items():
        if columns[key].min() < least or columns[key].max() > most:
            return f"{key} lies outside {least:g} to {most:g}"
    for key in ("time_gap", "dist_gap"):
        if (np.diff(columns[key]) < 0).any():
            return f"{key} decreases"
    return None


class TripTable:
    """Trips as one row each, and the points of all trips in one array.

    Args:
        trips: Rows of type TRIP.
        points: (points, 5) of float32, columns POINT; `time_gap` and `dist_gap` are cumulative seconds and km.
        folder: Where `points` is on disk, if so; other processes then open it there instead of being sent it.
    """

    def __init__(self, trips: np.ndarray, points: np.ndarray, folder: Path | None = None) -> None:
        self.trips = trips
        self.points = points
        self._folder = folder

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> TripTable:
        """Valid records as a table in memory: 20 bytes a point."""
        blocks = list(_blocks(records))
        if not blocks:
            return cls(np.empty(0, TRIP), np.empty((0, len(POINT)), np.float32))
        trips, points = zip(*blocks, strict=True)
        return cls(np.concatenate(trips), np.concatenate(points))

    @staticmethod
    def write(records: Iterable[Mapping[str, Any]], folder: Path) -> None:
        """Stream valid records into a folder, from where `open` maps them into memory."""
        _write(_blocks(records), folder)

    def save(self, folder: Path) -> None:
        """Write this table into a folder."""
        blocks = (self.select(slice(start, start + BLOCK)) for start in range(0, len(self), BLOCK))
        _write(_placed((block.trips, block.flat_points()) for block in blocks), folder)

    @classmethod
    def open(cls, folder: Path) -> TripTable:
        """A table that was saved or written; its points stay on disk until they are used."""
        return cls(np.load(folder / "trips.npy", allow_pickle=False), _map_points(folder), folder)

    def __len__(self) -> int:
        return len(self.trips)

    def select(self, indices: Sequence[int] | np.ndarray | slice) -> TripTable:
        """Some trips, in this order; the points are shared, not copied."""
        return TripTable(self.trips[indices], self.points, self._folder)

    def path(self, index: int) -> np.ndarray:
        """(length, 5) points of one trip."""
        trip = self.trips[index]
        points: np.ndarray = self.points[trip["start"] : trip["start"] + trip["length"]]
        return points

    def flat_points(self) -> np.ndarray:
        """Points of these trips, one trip after the other, in memory."""
        paths = [self.path(index) for index in range(len(self))]
        return np.concatenate(paths) if paths else self.points[:0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "points": None if self._folder else self.points}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._folder:
            self.points = _map_points(self._folder)


def _map_points(folder: Path) -> np.ndarray:
    return np.asarray(np.load(folder / "points.npy", mmap_mode="r", allow_pickle=False))


Block = tuple[np.ndarray, np.ndarray]


def _blocks(records: Iterable[Mapping[str, Any]]) -> Iterator[Block]:
    iterator = iter(records)
    return _placed(iter(lambda: _block(list(islice(iterator, BLOCK))), None))


def _block(records: list[Mapping[str, Any]]) -> Block | None:
    if not records:
        return None
    rows = [(0, len(r["lngs"]), *(int(r[key]) for key in RANGES), r["dist"], r["time"]) for r in records]
    points = [np.stack([np.asarray(record[key], np.float32) for key in POINT], 1) for record in records]
    return np.array(rows, TRIP), np.concatenate(points)


def _placed(blocks: Iterable[Block]) -> Iterator[Block]:
    """Blocks whose trips know where their points begin in the whole table."""
    placed = 0
    for trips, points in blocks:
        trips["start"] = placed + np.cumsum(trips["length"]) - trips["length"]
        placed += len(points)
        yield trips, points


def _write(blocks: Iterable[Block], folder: Path) -> None:
    with (
        _GrowingArray(folder / "trips.npy", TRIP) as trips,
        _GrowingArray(folder / "points.npy", np.dtype("f4"), len(POINT)) as points,
    ):
        for block in blocks:
            trips.append(block[0])
            points.append(block[1])


class _GrowingArray:
    """A .npy file whose number of rows is known at the end only; its header has room for that."""

    def __init__(self, path: Path, dtype: np.dtype, *columns: int) -> None:
        self._file: BinaryIO = path.open("wb")
        self._dtype = dtype
        self._columns = columns
        self._rows = 0
        self._write_header()

    def __enter__(self) -> _GrowingArray:
        return self

    def append(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._rows += len(rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._rows, *self._columns)}
        np.lib.format.write_array_header_1_0(self._file, header)
