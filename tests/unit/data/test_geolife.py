"""GeoLife: reading .plt trees and labels, cleaning, cutting into trips, splitting, checking."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.data.findings import Findings
from hetsync.data.sets.geolife import check, geolife, split_by_user
from hetsync.data.sets.geolife_trips import Cleaning, Label, cut, record, resample, steps_km
from hetsync.data.sets.trips import TripTable, validate
from hetsync.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
REAL = Path(os.environ.get("HETSYNC_TEST_DATA", ROOT / "../shared/data")) / "geolife"
HEADER = ["Geolife trajectory", "WGS 84", "Altitude is in Feet", "Reserved 3", "0,2,255,My Track,0,0,2,8421376", "0"]
START = datetime(2008, 10, 24, 22, 30, tzinfo=timezone.utc)  # a Friday; Saturday 06:30 in China
KM_A_DEGREE = np.pi / 180 * 6371.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def track(seconds: Sequence[float], km: Sequence[float]) -> np.ndarray:
    """Northward points, so far from 40° N."""
    return np.stack(
        [40 + np.array(km) / KM_A_DEGREE, np.full(len(km), 116.3), START.timestamp() + np.array(seconds)], 1
    )


def drive(minutes: float, kmh: float = 36.0, every: float = 10.0) -> np.ndarray:
    seconds = np.arange(0, 60 * minutes + 1, every)
    return track(seconds, kmh / 3600 * seconds)


def after(first_P3: np.ndarray, second_P3: np.ndarray, seconds: float) -> np.ndarray:
    """The second track from where and so long after the first ends."""
    moved_P3 = second_P3.copy()
    moved_P3[:, 0] += first_P3[-1, 0] - second_P3[0, 0]
    moved_P3[:, 2] += first_P3[-1, 2] - second_P3[0, 2] + seconds
    return np.concatenate([first_P3, moved_P3])


def trips(points_P3: np.ndarray, labels: Sequence[Label] = (), **rules: float) -> list[tuple[np.ndarray, str]]:
    return list(cut(points_P3, labels, Cleaning(**rules)))  # type: ignore[arg-type]


def line(point: Sequence[float]) -> str:
    moment = datetime.fromtimestamp(point[2], timezone.utc)
    serial = (moment - datetime(1899, 12, 30, tzinfo=timezone.utc)) / timedelta(days=1)
    return f"{point[0]:.6f},{point[1]:.6f},0,492,{serial:.10f},{moment:%Y-%m-%d,%H:%M:%S}"


def write_plt(root: Path, user: str, name: str, lines: Iterable[str]) -> Path:
    file = root / "Data" / user / "Trajectory" / f"{name}.plt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(f"{each}\r\n" for each in (*HEADER, *lines)).encode())
    return file


def write_days(root: Path, user: str, days: int, first_day: int = 0) -> None:
    for day in range(first_day, first_day + days):
        moved_P3 = drive(15) + np.array([0, 0, 86_400 * day])
        write_plt(root, user, f"{day:04}", map(line, moved_P3))


def problems_of(root: Path) -> tuple[Findings, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    findings = Findings(lambda where, what: told.append((where, what)))
    check(root, findings)
    return findings, told


def test_a_drive_is_one_trip_of_its_length_and_time() -> None:
    ((trip_P3, mode),) = trips(drive(20))
    assert mode == ""
    assert steps_km(trip_P3).sum() == pytest.approx(12.0)
    assert trip_P3[-1, 2] - trip_P3[0, 2] == 1200
    assert len(trip_P3) == 41
    assert steps_km(trip_P3) == pytest.approx(np.full(40, 0.3))


@pytest.mark.parametrize(("kmh", "points"), [(7.0, 10), (36.0, 41), (180.0, 128)])
def test_resampled_to_10_to_128_points(kmh: float, points: int) -> None:
    ((trip_P3, _),) = trips(drive(20, kmh))
    assert len(trip_P3) == points


@given(st.lists(st.tuples(st.floats(1, 60), st.floats(0, 0.5)), min_size=10, max_size=60))
@settings(deadline=None)
def test_resampling_keeps_ends_order_and_limits(steps: list[tuple[float, float]]) -> None:
    seconds, km = np.array([(0.0, 0.0), *steps]).cumsum(0).T
    recorded_P3 = track(seconds, km)
    trip_P3 = resample(recorded_P3, Cleaning())
    assert 10 <= len(trip_P3) <= 128
    np.testing.assert_allclose(trip_P3[-1, :2], recorded_P3[-1, :2], atol=1e-9)
    assert (np.diff(trip_P3[:, 2]) >= 0).all()
    assert steps_km(trip_P3).sum() <= steps_km(recorded_P3).sum() + 1e-6


@pytest.mark.parametrize(("missing", "count"), [(29, 1), (30, 2)])
def test_a_gap_of_more_than_five_minutes_ends_a_trip(missing: int, count: int) -> None:
    assert len(trips(np.delete(drive(20), range(40, 40 + missing), axis=0))) == count


@pytest.mark.parametrize(("minutes", "count"), [(4, 1), (6, 2)])
def test_a_stop_ends_a_trip_and_is_in_none(minutes: int, count: int) -> None:
    seconds = np.arange(0, 60 * minutes + 1, 10)
    jitter_km = 0.02 * (np.arange(len(seconds)) % 2)
    points_P3 = after(after(drive(10), track(seconds, jitter_km), 10), drive(10), 10)
    found = trips(points_P3)
    assert len(found) == count
    if count == 2:
        moving = sum(trip_P3[-1, 2] - trip_P3[0, 2] for trip_P3, _ in found)
        assert moving == pytest.approx(1200, abs=60)


def test_wrong_points_are_dropped() -> None:
    points_P3 = drive(20)
    expected_P3 = trips(points_P3)[0][0]
    spoilt_P3 = np.insert(points_P3, 50, points_P3[50], axis=0)  # repeated
    spoilt_P3 = np.insert(spoilt_P3, 60, points_P3[20], axis=0)  # back in time
    spoilt_P3 = np.insert(spoilt_P3, 70, [400.2, 116.3, spoilt_P3[70, 2] - 5], axis=0)
    spoilt_P3 = np.insert(spoilt_P3, 80, [40.5, 117.0, spoilt_P3[80, 2] - 5], axis=0)  # 80 km off for 5 s
    spoilt_P3 = np.insert(spoilt_P3, 90, [np.nan, np.inf, np.nan], axis=0)
    ((trip_P3, _),) = trips(spoilt_P3)
    np.testing.assert_allclose(trip_P3, expected_P3)


def test_a_jump_cuts_the_trip() -> None:
    points_P3 = drive(20)
    points_P3[60:, 0] += 0.5
    assert [len(trip_P3) for trip_P3, _ in trips(points_P3)] == [21, 21]


def test_too_short_too_few_or_empty_is_no_trip() -> None:
    assert not trips(drive(1))
    assert not trips(drive(20, every=200))
    assert not trips(np.empty((0, 3)))
    assert not trips(drive(20)[:1])


@given(st.lists(st.tuples(*[st.floats()] * 3), max_size=40))
@settings(deadline=None)
def test_any_numbers_make_valid_trips_or_none(points: list[tuple[float, float, float]]) -> None:
    for trip_P3, _ in trips(np.array(points).reshape(-1, 3), min_points=2, min_kilometres=1e-3):
        assert (np.diff(trip_P3[:, 2]) >= 0).all()
        assert np.isfinite(trip_P3).all()


def test_labels_give_modes_and_cut_where_they_change() -> None:
    start = START.timestamp()
    labels = [(start, start + 600, "bus"), (start + 600.5, start + 1200, "walk")]
    found = trips(drive(30), labels)
    assert [mode for _, mode in found] == ["bus", "walk", ""]
    assert found[1][0][0, 2] - start == 610


def test_times_are_chinas() -> None:
    made = record(7, trips(drive(20))[0][0])
    assert validate(made) is None
    assert (made["weekID"], made["timeID"], made["driverID"]) == (5, 6 * 60 + 30, 7)
    assert made["dateID"] == (datetime(2008, 10, 25) - datetime(1970, 1, 1)).days
    assert made["time"] == made["time_gap"][-1] == 1200
    assert made["dist"] == made["dist_gap"][-1]


def test_loads_a_tree_and_splits_by_each_users_last_days(tmp_path: Path) -> None:
    write_days(tmp_path, "003", 4)
    write_days(tmp_path, "011", 8, first_day=1000)
    write_days(tmp_path, "020", 1, first_day=2000)
    data = geolife(str(tmp_path))
    train, test = data.train.table.trips, data.test.table.trips  # type: ignore[attr-defined]
    assert np.unique(train["driver"], return_counts=True)[1].tolist() == [3, 6, 1]
    assert np.unique(test["driver"]).tolist() == [3, 11]
    for user in (3, 11):
        assert train["date"][train["driver"] == user].max() < test["date"][test["driver"] == user].min()
    by_set = geolife(str(tmp_path), split="set")
    assert np.unique(by_set.test.table.trips["driver"]).tolist() == [11, 20]  # type: ignore[attr-defined]


def test_keeps_the_modes_asked_for(tmp_path: Path) -> None:
    write_days(tmp_path, "003", 3)
    (tmp_path / "Data/003/labels.txt").write_bytes(
        b"Start Time\tEnd Time\tTransportation Mode\r\n"
        b"2008/10/24 22:00:00\t2008/10/24 23:00:00\ttaxi\r\n"
        b"2008/10/25 22:00:00\t2008/10/25 23:00:00\tbike\r\n"
        b"2008/10/26 22:00:00\t2008/10/26 23:00:00\tcar\r\n"
    )
    data = geolife(str(tmp_path), modes=["car", "taxi"], test_fraction=0.5)
    assert len(data.train) == len(data.test) == 1  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no trip labelled boat"):
        geolife(str(tmp_path), modes=["boat"])


@pytest.mark.parametrize(
    "options",
    [
        {"split": "trip"},
        {"modes": "car"},
        {"gap_minutes": 0},
        {"max_kmh": float("nan")},
        {"min_points": 1},
        {"min_points": 200},
        {"test_fraction": 1.5},
        {"path": "nowhere"},
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, object]) -> None:
    write_days(tmp_path, "003", 2)
    (key,) = options
    with pytest.raises(UserError, match=f"data.options.{key} is"):
        geolife(**{"path": str(tmp_path), **options})  # type: ignore[arg-type]


def test_one_day_for_everyone_cannot_be_split() -> None:
    trip = record(1, drive(20))
    with pytest.raises(UserError, match="one day only"):
        split_by_user(TripTable.from_records([trip, trip]), 0.25)


def test_the_loader_names_the_first_line_that_is_no_point(tmp_path: Path) -> None:
    file = write_plt(tmp_path, "003", "a", [*map(line, drive(2)), "40.0,here,0,1,2,3"])
    with pytest.raises(UserError, match=f"{file}:20: .*hetsync data check geolife"):
        geolife(str(tmp_path))
    file.unlink()
    write_days(tmp_path, "003", 2)
    labels = tmp_path / "Data/003/labels.txt"
    labels.write_text("header\n2008/10/24 22:00:00\tlater\tcar\n")
    with pytest.raises(UserError, match=f"{labels}:2: "):
        geolife(str(tmp_path))


def test_checker_counts_and_names_every_wrong_line(tmp_path: Path) -> None:
    write_days(tmp_path, "003", 2)
    good = [line(point) for point in drive(15)]
    disagreeing = good[8].replace("22:31:20", "22:31:23")
    wrong = [
        *good[:5],
        "garbage\ufffd",
        good[5].replace("40.", "400.", 1),
        good[5],
        good[2],
        disagreeing,
        good[8],
        good[8],
        *good[9:],
    ]
    bad = write_plt(tmp_path, "003", "bad", [each.replace(",492,", ",-777,") for each in wrong])
    labels = tmp_path / "Data/003/labels.txt"
    labels.write_text(
        "header\n2008/10/24 22:00:00\t2008/10/24 23:00:00\tcar\n\nx\n2009/01/02 00:00:00\t2009/01/01 00:00:00\tcar\n"
    )
    (tmp_path / "Data/me/Trajectory").mkdir(parents=True)
    (tmp_path / "Data/me/Trajectory/empty.plt").write_bytes(b"\xff\x00")
    findings, told = problems_of(tmp_path)
    places = {where: what for where, what in told}
    assert set(places) == {
        f"{bad}:12",
        f"{bad}:13",
        f"{bad}:15",
        f"{bad}:16",
        f"{labels}:4",
        f"{labels}:5",
        str(tmp_path / "Data/me"),
        f"{tmp_path}/Data/me/Trajectory/empty.plt:1",
    }
    assert "not on Earth" in places[f"{bad}:13"]
    assert "earlier" in places[f"{bad}:15"]
    assert "disagree" in places[f"{bad}:16"]
    counts = findings.counts
    assert (counts["users"], counts["files"], counts["labels"], counts["trips"]) == (2, 4, 1, 3)
    assert counts["trips by car"] == 2
    assert counts["points without altitude"] == len(wrong) - 1


def test_checker_of_a_folder_without_tracks(tmp_path: Path) -> None:
    findings, told = problems_of(tmp_path)
    assert told == [(str(tmp_path), "no USER/Trajectory below it")]
    assert not findings.counts["users"]


@pytest.mark.skipif(not REAL.is_dir(), reason="no GeoLife at HETSYNC_TEST_DATA or ../shared/data")
def test_real_tracks() -> None:
    data = geolife(str(REAL))
    table = data.train.table  # type: ignore[attr-defined]
    rows, test_rows = table.trips, data.test.table.trips  # type: ignore[attr-defined]
    assert len(rows) + len(test_rows) > 500
    assert len(np.unique(rows["driver"])) >= 17
    assert rows["length"].min() >= 10
    assert rows["length"].max() <= 128
    kmh = 3600 * rows["dist"] / rows["time"]
    assert 0.5 < kmh.min() < kmh.max() < 200
    night = np.mean(np.isin(rows["minute"] // 60, [1, 2, 3, 4]))
    assert night < 0.08  # in GMT, these would be a busy morning


@pytest.mark.skipif(not REAL.is_dir(), reason="no GeoLife at HETSYNC_TEST_DATA or ../shared/data")
def test_real_files_check_clean() -> None:
    findings, told = problems_of(REAL / "Data/010")
    assert told == []
    assert findings.counts["labels"] > 100
    assert findings.counts["trips"] > 10
