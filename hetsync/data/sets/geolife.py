"""GeoLife GPS trajectories (Zheng et al. 2009, 2010) as trips: `.plt` trees, cleaned, cut into trips and resampled."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.findings import Findings
from hetsync.data.sets.geolife_trips import DAY_SECONDS, Cleaning, Label, cut, record
from hetsync.data.sets.trips import TripTable, split_by_date, trip_data
from hetsync.errors import UserError

VERSION = "1"  # of what is made of the files, and of the cached layout
HEADER_LINES = 6
SERIAL_1970 = 25_569  # days from 1899-12-30, from where the files count, to 1970-01-01
NO_ALTITUDE = -777.0
CLOCKS_AGREE_SECONDS = 1.5  # between a line's day number and its date and time: both are rounded


def geolife(
    path: str = "data/geolife",
    modes: Sequence[str] = (),
    split: str = "user",
    test_fraction: float = 0.25,
    local_weight: float = 0.3,
    gap_minutes: float = Cleaning.gap_minutes,
    stop_metres: float = Cleaning.stop_metres,
    stop_minutes: float = Cleaning.stop_minutes,
    max_kmh: float = Cleaning.max_kmh,
    min_kilometres: float = Cleaning.min_kilometres,
    spacing_kilometres: float = Cleaning.spacing_kilometres,
    min_points: int = Cleaning.min_points,
    max_points: int = Cleaning.max_points,
) -> Data:
    """Trips of all users below a folder; the driver is the user's number, times of the day are China's (UTC+8).

    A change of the labelled mode of transport ends a trip too. Altitudes are not used.

    Args:
        path: Folder with USER/Trajectory/*.plt at any depth, and USER/labels.txt of some users.
        modes: Keep only trips labelled so, e.g. [car, taxi, bus]; all, labelled or not, where empty.
        split: "user" tests on each user's own last days, as users recorded in different years: the last days of
            the whole set, which "set" tests on, are those of few users, some never seen in training. A user of
            one day is for training only.
        test_fraction: Share of the trips to test on: whole days, as near to it as they allow.
        local_weight: Weight of the windows' loss in models that have one (DeepTTE's α).

    The remaining arguments are those of `Cleaning`.

    Raises:
        UserError: A bad option, nothing there, or a line that cannot be read.
    """
    rules = Cleaning(
        gap_minutes, stop_metres, stop_minutes, max_kmh, min_kilometres, spacing_kilometres, min_points, max_points
    )
    if isinstance(modes, str):
        raise UserError(f"data.options.modes is {modes}: use a list, [{modes}]")
    if split not in ("user", "set"):
        raise UserError(f"data.options.split is {split}: use user or set")
    users = find_users(Path(path))
    if not users:
        raise UserError(f"data.options.path is {path}, below which no USER/Trajectory is: name the unpacked GeoLife")
    version = f"{VERSION} {sorted(modes)} {rules}"
    folder = cached_folder(
        "geolife", users, version, lambda made: TripTable.write(_all_trips(users, set(modes), rules), made)
    )
    table = TripTable.open(folder)
    if not len(table):
        which = f"labelled {', '.join(modes)}" if modes else "long enough"
        raise UserError(f"data.options.path is {path}, with no trip {which}: see hetsync data check geolife {path}")
    train, test = split_by_user(table, test_fraction) if split == "user" else split_by_date(table, test_fraction)
    return trip_data(train, test, local_weight)


def check(path: Path, findings: Findings) -> None:
    """Count users, files, points, labels and trips; report wrong lines as file:line."""
    users = find_users(path)
    if not users:
        findings.problem(str(path), "no USER/Trajectory below it")
    for user in users:
        findings.count("users")
        if not user.name.isdecimal():
            findings.problem(str(user), "the folder's name is not a user's number")
        labels = _check_labels(user / "labels.txt", findings)
        for file in _tracks(user):
            findings.count("files")
            points_P3 = _check_track(file, findings)
            for trip_P3, mode in cut(points_P3, labels, Cleaning()):
                findings.count("trips")
                findings.count(f"trips by {mode or 'unlabelled mode'}")
                findings.count("points in trips", len(trip_P3))


def find_users(path: Path) -> list[Path]:
    """Folders of users below a path, or the path itself if it is one."""
    return sorted(folder.parent for folder in path.rglob("Trajectory") if folder.is_dir())


def split_by_user(table: TripTable, test_fraction: float) -> tuple[TripTable, TripTable]:
    """(train, test): each user's own last days for testing; all of a user with one day for training."""
    trains, tests = [], []
    for user in np.unique(table.trips["driver"]):
        rows = np.flatnonzero(table.trips["driver"] == user)
        dates = table.trips["date"][rows]
        if dates.min() == dates.max():
            trains.append(rows)
            continue
        _, test = split_by_date(table.select(rows), test_fraction)
        is_test = dates >= test.trips["date"].min()
        trains.append(rows[~is_test])
        tests.append(rows[is_test])
    if not tests:
        raise UserError("each GeoLife user has trips of one day only: a split by date needs two days or more")
    return table.select(np.concatenate(trains)), table.select(np.concatenate(tests))


def _all_trips(users: Sequence[Path], modes: set[str], rules: Cleaning) -> Iterator[dict[str, Any]]:
    for user in users:
        if not user.name.isdecimal():
            raise UserError(f"{user} is no user's number: rename the folder to one, such as 000")
        labels = _read_labels(user / "labels.txt")
        for file in _tracks(user):
            for trip_P3, mode in cut(_read_track(file), labels, rules):
                if not modes or mode in modes:
                    yield record(int(user.name), trip_P3)


def _tracks(user: Path) -> list[Path]:
    return sorted((user / "Trajectory").glob("*.plt"))


def _read_track(file: Path) -> np.ndarray:
    """Points of a .plt file. The day number is their time; the checker compares it with date and time."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            columns = np.loadtxt(file, delimiter=",", skiprows=HEADER_LINES, usecols=(0, 1, 4), comments=None, ndmin=2)
    except ValueError as error:
        raise UserError(
            f"{file}:{_first_unreadable(file)}: is no latitude, longitude and day number; "
            f"see all bad lines with hetsync data check geolife {file.parents[1]}"
        ) from error
    return _timed(columns.reshape(-1, 3))


def _first_unreadable(file: Path) -> int:
    """Number of the first line that is no point, 0 if all are."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        fields = line.split(",")
        try:
            if number > HEADER_LINES and line.strip():
                _ = float(fields[0]), float(fields[1]), float(fields[4])
        except (ValueError, IndexError):
            return number
    return 0


def _timed(columns_P3: np.ndarray) -> np.ndarray:
    """Day numbers to whole seconds since 1970 GMT, as they were before they were days."""
    seconds_P = ((columns_P3[:, 2] - SERIAL_1970) * DAY_SECONDS).round()
    return np.column_stack([columns_P3[:, :2], seconds_P])


def _read_labels(file: Path) -> list[Label]:
    labels = []
    for number, line in _label_lines(file):
        label, wrong = _parse_label(line)
        if label is None:
            raise UserError(
                f"{file}:{number}: {wrong}; see all bad lines with hetsync data check geolife {file.parent}"
            )
        labels.append(label)
    return labels


def _label_lines(file: Path) -> list[tuple[int, str]]:
    """Numbered lines below the header; none where a user has no labels."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if number > 1 and line.strip()]


def _parse_label(line: str) -> tuple[Label | None, str | None]:
    fields = line.strip().split("\t")
    if len(fields) != 3:
        return None, f"has {len(fields)} fields instead of start, end and mode"
    try:
        start, end = (
            datetime.strptime(field, "%Y/%m/%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
            for field in fields[:2]
        )
    except ValueError:
        return None, "start or end is no time such as 2008/05/20 09:39:00"
    return ((start, end, fields[2]), None) if start <= end else (None, "ends before it starts")


def _check_labels(file: Path, findings: Findings) -> list[Label]:
    labels = []
    for number, line in _label_lines(file):
        label, wrong = _parse_label(line)
        if label is None:
            findings.problem(f"{file}:{number}", wrong or "")
        else:
            labels.append(label)
    findings.count("labels", len(labels))
    return labels


def _check_track(file: Path, findings: Findings) -> np.ndarray:
    """Points of the readable lines."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if len(lines) < HEADER_LINES or not lines[0].startswith("Geolife trajectory"):
        findings.problem(f"{file}:1", f"the {HEADER_LINES} header lines are not there")
    points: list[tuple[float, float, float]] = []
    latest = -np.inf
    for number, line in enumerate(lines[HEADER_LINES:], HEADER_LINES + 1):
        where = f"{file}:{number}"
        try:
            latitude, longitude, _, altitude, serial, date, time = line.split(",")
            point = (float(latitude), float(longitude), float(serial))
            clock = datetime.fromisoformat(f"{date}T{time.strip()}").replace(tzinfo=timezone.utc).timestamp()
            findings.count("points without altitude", float(altitude) == NO_ALTITUDE)
        except ValueError:
            findings.problem(where, "is not latitude, longitude, 0, altitude, day number, date, time")
            continue
        findings.count("points")
        if not (abs(point[0]) <= 90 and abs(point[1]) <= 180):
            findings.problem(where, "position is not on Earth")
        if not abs((point[2] - SERIAL_1970) * DAY_SECONDS - clock) <= CLOCKS_AGREE_SECONDS:
            findings.problem(where, "day number and date with time disagree")
        if point[2] < latest:
            findings.problem(where, "is earlier than a point before it")
        findings.count("points at a time repeated", point[2] == latest)
        latest = max(latest, point[2])
        points.append(point)
    return _timed(np.array(points).reshape(-1, 3))
