"""Readings of sensor networks as the field distributes them: METR-LA and PEMS-BAY (h5), PEMS04 (npz), tables (csv)."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from hetsync.config.checks import at_least
from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.findings import Findings
from hetsync.data.sets.sensor_data import network_data
from hetsync.data.sets.sensor_graph import PLACE, ROAD, adjacency, heads_of, number_in, places_of
from hetsync.data.sets.sensor_network import DAY_MINUTES, LAYOUT, Network
from hetsync.errors import UserError, brief
from hetsync.extras import require

VERSION = "1"  # of the readers: raise it when a file gives other readings
READINGS = (".h5", ".hdf5", ".npz", ".csv")
NO_READING = ("", "nan")
START, MINUTES = "2018-01-01", 5  # of PEMS04


def sensors(
    path: str = "data/sensors",
    readings: str | None = None,
    graph: str | None = None,
    feature: int = 0,
    missing: float | None = 0.0,
    start: str = START,
    minutes: int = MINUTES,
    steps: int = 12,
    horizon: int = 12,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.2,
) -> Data:
    """Windows of a network's readings, split in the order of time.

    Args:
        path: Folder of the files.
        readings: File of the readings: .h5 as pandas writes it (METR-LA, PEMS-BAY), .npz with `data` of (times,
            sensors, features) (PEMS04), or .csv of a column of times and one for each sensor. null takes the only one.
        graph: A .csv of from, to and distance (or cost), a road a line; null takes the only one, if there is one.
            Weights are exp(-(distance / deviation)²), without those below 0.1. Or a .npy of weights (S, S).
        feature: Which of several is predicted: of PEMS04 0 is flow, 1 occupancy, 2 speed.
        missing: The value that stands for a reading that is missing, beside nan; null for none.
        start: Time of the first reading, where the file has no times (npz).
        minutes: From one reading to the next, where the file has no times.
        steps: Readings that a prediction is made from (T).
        horizon: Readings that are predicted (H).
        validation_fraction: Part of the windows to evaluate on while training: those before the test part.
        test_fraction: Part of the windows to test on: the last.

    Raises:
        UserError: A file is missing or is none of these, or an option is wrong.
    """
    files = Files.find(Path(path), readings, graph)
    untimed = Untimed(start, minutes, feature)
    version = f"{LAYOUT} {VERSION} {untimed} {missing}"
    folder = cached_folder("sensors", files.all, version, lambda made: _write(files, untimed, missing, made))
    return network_data(Network.open(folder), steps, horizon, validation_fraction, test_fraction)


def check(path: Path, findings: Findings) -> None:
    """Count sensors, readings and roads; report what cannot be read, and sensors without a reading or a road."""
    try:
        files = Files.find(path, None, None)
        table = read(files.readings, Untimed())
        gone = np.isnan(table.values) | (table.values == 0)
        findings.count("sensors", len(table.names))
        findings.count("times", len(table.values))
        findings.count("readings", int((~gone).sum()))
        findings.count("readings that are 0 or nan", int(gone.sum()))
        for name, share in zip(table.names, gone.mean(0), strict=True):
            if share == 1:
                findings.problem(f"{files.readings}, sensor {name}", "has no reading", "sensors without a reading")
        if files.graph is not None:
            roads_SS = (adjacency(files.graph, table.names) > 0) & ~np.eye(len(table.names), dtype=bool)
            findings.count("roads", int(roads_SS.sum()))
            joined_S = np.any(roads_SS | roads_SS.T, axis=0)
            for name, joined in zip(table.names, joined_S.tolist(), strict=True):
                if not joined:
                    findings.problem(f"{files.graph}, sensor {name}", "has no road", "sensors without a road")
    except UserError as error:
        findings.problem(str(path), str(error))


@dataclass(frozen=True)
class Files:
    readings: Path
    graph: Path | None
    places: Path | None

    @property
    def all(self) -> list[Path]:
        return [path for path in (self.readings, self.graph, self.places) if path is not None]

    @classmethod
    def find(cls, folder: Path, readings: str | None, graph: str | None) -> Files:
        """UserError where it is not clear which they are."""
        if not folder.is_dir():
            raise UserError(f"data.options.path is {folder}, which is no folder: give that of the readings")
        tables = {path: set(heads_of(path)) for path in sorted(folder.glob("*.csv"))}
        roads = [path for path, heads in tables.items() if heads >= ROAD]
        places = [path for path, heads in tables.items() if heads >= PLACE]
        series = [path for path in sorted(folder.iterdir()) if path.suffix in READINGS and path not in roads + places]
        return cls(
            _only("readings", readings, folder, series),
            _only("graph", graph, folder, roads) if graph is not None or roads else None,
            places[0] if len(places) == 1 else None,
        )


def _only(option: str, given: str | None, folder: Path, found: Sequence[Path]) -> Path:
    if given is not None:
        if not (folder / given).is_file():
            raise UserError(f"data.options.{option} is {given}, which is not in {folder}: name a file there")
        return folder / given
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"data.options.path is {folder}, where files of {option} are {there}: name one by data.options.{option}"
        )
    return found[0]


# Readings.


@dataclass(frozen=True)
class Untimed:
    """What options say of files that do not."""

    start: str = START
    minutes: int = MINUTES
    feature: int = 0


@dataclass(frozen=True)
class Table:
    """Readings of S sensors at X times: `values` is (X, S)."""

    values: np.ndarray
    names: Sequence[str]
    start: np.datetime64
    minutes: int


def read(path: Path, untimed: Untimed) -> Table:
    """UserError for a file that is none of those that `sensors` knows."""
    readers = {".h5": _read_h5, ".hdf5": _read_h5, ".npz": _read_npz, ".csv": _read_csv}
    if path.suffix not in readers:
        raise UserError(f"{path}: readings are in files of {', '.join(readers)}")
    try:
        table = readers[path.suffix](path, untimed)
        if twice := [name for name, count in Counter(table.names).items() if count > 1]:
            raise UserError(f"{path} has two sensors called {brief(twice[0])}: call one otherwise")
        return table
    except UserError:
        raise
    except (OSError, ValueError, KeyError, IndexError, EOFError) as error:
        raise UserError(f"{path} cannot be read as readings: {brief(str(error))}") from error


def _read_h5(path: Path, _: Untimed) -> Table:
    """As pandas' `to_hdf` writes a frame of numbers, in its fixed format."""
    require("sensors", f"{path.name}, which is HDF5,")
    import h5py

    with h5py.File(path, "r") as file:
        frames = [group for group in file.values() if isinstance(group, h5py.Group) and "block0_values" in group]
        if len(frames) != 1:
            raise ValueError(f"it holds {len(frames)} frames of pandas in its fixed format, where one is wanted")
        (frame,) = frames
        blocks = range(sum(f"block{number}_values" in frame for number in range(len(frame))))  # one a kind of numbers
        names = [_text(name) for block in blocks for name in frame[f"block{block}_items"][()]]
        values = np.concatenate([frame[f"block{block}_values"][()] for block in blocks], 1)
        columns = [_text(name) for name in frame["axis0"][()]]  # blocks hold them by kind
        kind, zone = (_text(frame["axis1"].attrs.get(key, b"")) for key in ("kind", "tz"))
        if not kind.startswith("datetime64"):
            raise ValueError(f"its index is of {kind or 'no kind'}, where times are wanted")
        unit = kind[len("datetime64") :].strip("[]") or "ns"
        times = frame["axis1"][()].astype(f"datetime64[{unit}]").astype("datetime64[s]")
    if sorted(names) != sorted(columns) or len(set(names)) < len(names):
        raise ValueError("its columns are not all numbers, or two have one name")
    return _timed(values[:, [names.index(name) for name in columns]], columns, _on_the_wall(times, zone))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _on_the_wall(times: np.ndarray, zone: str) -> np.ndarray:
    """What clocks there show at these times of UTC: rush hours go by them."""
    if not zone:
        return times
    local = ZoneInfo(zone)
    moments = times.astype("datetime64[s]").astype(np.int64)
    return np.array([datetime.fromtimestamp(moment, local).replace(tzinfo=None) for moment in moments], "datetime64[s]")


def _read_npz(path: Path, untimed: Untimed) -> Table:
    with np.load(path, allow_pickle=False) as file:
        values = file["data"]
    values = values[:, :, None] if values.ndim == 2 else values
    if values.ndim != 3:
        raise ValueError(f"its `data` has {values.ndim} dimensions, where (times, sensors, features) are wanted")
    if not 0 <= untimed.feature < values.shape[2]:
        raise UserError(f"data.options.feature is {untimed.feature}, but {path} has {values.shape[2]} features")
    at_least("data.options.minutes", untimed.minutes, 1, most=DAY_MINUTES)
    try:
        start = np.datetime64(untimed.start, "s")
    except ValueError:
        raise UserError(
            f"data.options.start is {untimed.start}: give a time such as 2018-01-01 or 2018-01-01T00:05"
        ) from None
    names = [str(sensor) for sensor in range(values.shape[1])]
    return Table(values[:, :, untimed.feature], names, start, untimed.minutes)


def _read_csv(path: Path, _: Untimed) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        names = [head.strip() for head in next(rows, [])[1:]]
        times, values = [], []
        for row in filter(any, rows):
            if len(row) != len(names) + 1:
                raise UserError(f"{path}:{rows.line_num} has {len(row)} cells, and its head {len(names) + 1}: mend it")
            times.append(_time(path, rows.line_num, row[0]))
            words = [word.strip().lower() for word in row[1:]]
            line = rows.line_num
            values.append(
                [np.nan if word in NO_READING else number_in(path, line, "a reading", word) for word in words]
            )
    return _timed(np.array(values).reshape(-1, len(names)), names, np.array(times, "datetime64[s]"))


def _time(path: Path, line: int, word: str) -> datetime:
    """As the clocks show it that the file goes by, whatever they are behind UTC."""
    try:
        return datetime.fromisoformat(word.strip().removesuffix("Z")).replace(tzinfo=None)
    except ValueError:
        raise UserError(f"{path}:{line} has {brief(word)} as its time: give one such as 2018-01-01T00:05") from None


def _timed(values: np.ndarray, names: Sequence[str], times: np.ndarray) -> Table:
    """At even times, with nan for those that the file leaves out."""
    at = times.astype("datetime64[s]").astype(np.int64)
    steps = np.diff(at)
    if len(values) < 2:
        raise ValueError("it has less than two times")
    if (steps <= 0).any():
        raise ValueError(f"its time {times[1:][steps <= 0][0]} comes after a later one, or twice: leave it out")
    lengths, counts = np.unique(steps, return_counts=True)
    step = int(lengths[counts.argmax()])
    if step % 60:
        raise ValueError(f"its times are {step} s apart, where whole minutes are wanted")
    rows, beside = np.divmod(at - at[0], step)
    if beside.any():
        raise ValueError(f"its time {times[beside != 0][0]} is not on the grid of {step // 60} minutes: leave it out")
    even = np.full((rows[-1] + 1, values.shape[1]), np.nan, np.float32)
    even[rows] = values
    return Table(even, names, times[0].astype("datetime64[s]"), step // 60)


def _write(files: Files, untimed: Untimed, missing: float | None, folder: Path) -> None:
    table = read(files.readings, untimed)
    values = table.values.astype(np.float32)
    if np.isinf(values).any():
        raise UserError(f"{files.readings} holds readings that are infinite: leave them empty, or make them nan")
    if missing is not None:
        values[values == missing] = np.nan
    graph = None if files.graph is None else adjacency(files.graph, table.names)
    places = None if files.places is None else places_of(files.places, table.names)
    Network.write(folder, values, table.start, table.minutes, table.names, graph, places)
