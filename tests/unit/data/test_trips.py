"""Trips: what is a valid record, tables larger than memory, splits, batches, metrics, DeepTTE's files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.data.findings import Findings
from hetsync.data.sets import trip_table
from hetsync.data.sets.deeptte import check, deeptte
from hetsync.data.sets.trips import (
    ConstantSpeed,
    TripTable,
    collate,
    normalisation,
    split_by_date,
    travel_time_loss,
    travel_time_report,
    travel_time_sums,
    trip_data,
    trip_rows,
    validate,
)
from hetsync.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
CHENGDU = Path(os.environ.get("HETSYNC_TEST_DATA", ROOT / "../shared/data")) / "deeptte_chengdu"


def made(points: int = 4, **changes: Any) -> dict[str, Any]:
    """A trip straight north: 60 s and 0.5 km between its points."""
    steps = np.arange(points)
    record = {
        "driverID": 3,
        "dateID": 24,
        "weekID": 6,
        "timeID": 548,
        "dist": 0.5 * (points - 1),
        "time": 60.0 * (points - 1),
        "lngs": [104.0] * points,
        "lats": (30.0 + 0.0045 * steps).tolist(),
        "states": [1.0] * points,
        "time_gap": (60.0 * steps).tolist(),
        "dist_gap": (0.5 * steps).tolist(),
    }
    return record | changes


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Constant(torch.nn.Module):
    """Always the same seconds; no loss of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = torch.nn.Parameter(torch.tensor(seconds))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.seconds.expand(len(batch["time"]))


# Records.


def test_a_good_record_is_valid() -> None:
    assert validate(made()) is None
    assert validate(made(2)) is None
    assert validate(made(driverID=np.int64(5), lngs=np.full(4, 104.0))) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lats": [30.0, 30.1]}, "unequal"),
        ({"time_gap": [0.0, 60.0, 50.0, 180.0]}, "time_gap decreases"),
        ({"dist_gap": [0.0, 0.5, 0.4, 1.5]}, "dist_gap decreases"),
        ({"lngs": [104.0, float("nan"), 104.0, 104.0]}, "lngs"),
        ({"lngs": [104.0, 204.0, 104.0, 104.0]}, "lngs lies outside"),
        ({"lats": ["30", "30", "30", "30"]}, "lats"),
        ({"lats": [[30.0], 30.0, 30.0, 30.0]}, "lats"),
        ({"lats": None}, "lats"),
        ({"states": [0, 1, 2, 1]}, "states"),
        ({"time": 0}, "time is not"),
        ({"time": float("inf")}, "time is not"),
        ({"time": "60"}, "time is not"),
        ({"dist": -1}, "dist is not"),
        ({"weekID": 7}, "weekID"),
        ({"timeID": 1440}, "timeID"),
        ({"timeID": 3.5}, "timeID"),
        ({"driverID": -1}, "driverID"),
        ({"driverID": 10**400}, "driverID"),
        ({"driverID": True}, "driverID"),
        ({"dateID": [1]}, "dateID"),
    ],
)
def test_a_bad_record_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in (validate(made(**changes)) or "")


def test_a_record_of_one_point_or_without_a_key_is_bad() -> None:
    assert validate(made(1, time=5.0)) == "fewer than 2 points"
    record = made()
    del record["time_gap"], record["dist"]
    assert validate(record) == "lacks dist, time_gap"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(JSON, st.dictionaries(st.sampled_from(sorted(made())), JSON, max_size=3))
def test_validate_never_raises(anything: Any, changes: dict[str, Any]) -> None:
    for record in (anything, made() | changes):
        wrong = validate(record)
        if wrong is None:  # then a table can hold it
            assert len(TripTable.from_records([record]).path(0)) >= 2


# Tables.


def trips_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [made(points, driverID=number, dateID=24 + number % 3) for number, points in enumerate(lengths)]


@pytest.mark.parametrize("count", [1, 5, 12])
def test_a_table_comes_back_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(trip_table, "BLOCK", 5)  # so that 12 trips are three blocks, the last not full
    records = trips_of([2 + number % 7 for number in range(count)])
    memory = TripTable.from_records(records)
    for folder in ("streamed", "saved"):
        (tmp_path / folder).mkdir()
    TripTable.write(iter(records), tmp_path / "streamed")
    memory.save(tmp_path / "saved")
    for folder in ("streamed", "saved"):
        table = TripTable.open(tmp_path / folder)
        assert len(table) == count
        np.testing.assert_array_equal(table.trips, memory.trips)
        np.testing.assert_array_equal(table.points, memory.points)
    for number, record in enumerate(records):
        np.testing.assert_allclose(memory.path(number)[:, 1], record["lats"], rtol=1e-6)
        np.testing.assert_array_equal(memory.path(number)[:, 3], record["time_gap"])


def test_an_opened_table_is_sent_without_its_points(tmp_path: Path) -> None:
    TripTable.from_records(trips_of([100] * 50)).save(tmp_path)
    table = TripTable.open(tmp_path).select([7, 3])
    sent = pickle.dumps(table)
    assert len(sent) < 2000
    received = pickle.loads(sent)
    np.testing.assert_array_equal(received.path(1), table.path(1))


def test_a_selection_is_saved_alone(tmp_path: Path) -> None:
    table = TripTable.from_records(trips_of([3, 4, 5, 6]))
    table.select([2, 0]).save(tmp_path)
    saved = TripTable.open(tmp_path)
    assert len(saved.points) == 8
    assert saved.trips["driver"].tolist() == [2, 0]
    np.testing.assert_array_equal(saved.path(1), table.path(0))


def test_an_empty_table_has_no_trips() -> None:
    assert len(TripTable.from_records([])) == 0


# Splits and constants.


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_later_whole_days_are_the_test_set(days: list[int], fraction: float) -> None:
    dates = [day for day in days for _ in range(day)]
    table = TripTable.from_records([made(2, dateID=date) for date in dates])
    if len(set(dates)) < 2:
        with pytest.raises(UserError, match="one day"):
            split_by_date(table, fraction)
        return
    train, test = split_by_date(table, fraction)
    assert len(train) + len(test) == len(table)
    assert train.trips["date"].max() < test.trips["date"].min()
    share = len(test) / len(table)
    possible = [np.mean(np.array(dates) >= date) for date in sorted(set(dates))[1:]]
    assert abs(share - fraction) == pytest.approx(min(abs(each - fraction) for each in possible))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -3.0, float("nan"), 1, "half"])
def test_a_fraction_is_between_0_and_1(fraction: Any) -> None:
    with pytest.raises(UserError, match="test_fraction"):
        split_by_date(TripTable.from_records(trips_of([2, 2, 2])), fraction)


def test_constants_are_those_of_the_training_trips_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    records = [
        made(n, lngs=generator.normal(104, 0.05, n).tolist(), time_gap=np.cumsum(generator.random(n)).tolist())
        for n in generator.integers(2, 20, 11)
    ]
    table = TripTable.from_records(records)
    gaps = np.concatenate([np.diff(record["time_gap"]) for record in records])
    lngs = np.concatenate([record["lngs"] for record in records])
    monkeypatch.setattr("hetsync.data.sets.trips.BLOCK", 3)
    constants = normalisation(table)
    np.testing.assert_allclose(constants["time_gap"], (gaps.mean(), gaps.std()), rtol=1e-4)
    np.testing.assert_allclose(constants["lngs"], (lngs.mean(), lngs.std()), rtol=1e-4)
    assert constants["dist_gap"] == (0.5, 1.0)  # they do not differ: divided by one
    data = trip_data(table, TripTable.from_records([made(9, lngs=[10.0] * 9)]))
    assert data.model_options["normalisation"] == constants
    assert data.costs == [len(record["lngs"]) for record in records]
    assert data.model_options["mean_points"] == pytest.approx(np.mean(data.costs))


# Batches and metrics.


def test_a_short_trip_is_padded_with_its_last_point() -> None:
    dataset = trip_data(table := TripTable.from_records(trips_of([2, 5])), table).train
    batch = collate([dataset[0], dataset[1]])
    assert batch["lengths"].tolist() == [2, 5]
    assert batch["time_gap"].tolist() == [[0, 60, 60, 60, 60], [0, 60, 120, 180, 240]]
    assert batch["driver"].tolist() == [0, 1]
    assert batch["time"].tolist() == [60, 240]
    assert {value.dtype for value in batch.values()} == {torch.float32, torch.int64}


def test_metrics_are_of_the_whole_test_set_however_it_is_cut() -> None:
    table = TripTable.from_records(trips_of([2, 3, 6]))  # 60, 120 and 300 s
    data, model = trip_data(table, table), Constant(120.0)
    sums: dict[str, float] = {"samples": 3}
    for part in ([0, 1], [2]):
        batch = collate([data.test[index] for index in part])
        for name, value in travel_time_sums(model, batch).items():
            sums[name] = sums.get(name, 0.0) + value
    report = travel_time_report(sums)
    assert report["mape"] == pytest.approx(100 * (1 + 0 + 0.6) / 3)
    assert report["mae"] == pytest.approx((60 + 0 + 180) / 3)
    assert report["rmse"] == pytest.approx(((60**2 + 180**2) / 3) ** 0.5)


def test_a_model_without_a_loss_is_trained_on_mape() -> None:
    table = TripTable.from_records(trips_of([2, 3]))
    batch = collate([trip_data(table, table).train[index] for index in range(2)])
    assert travel_time_loss(Constant(120.0), batch).item() == pytest.approx(0.5)


def test_constant_speed_is_exact_where_speed_is_constant() -> None:
    table = TripTable.from_records(trips_of([2, 3, 9]))
    slow = TripTable.from_records([made(3, time=240.0)])
    assert mape_of_constant_speed(table, table) == pytest.approx(0, abs=1e-4)
    assert mape_of_constant_speed(table, slow) == pytest.approx(50, abs=1e-4)


def mape_of_constant_speed(train: TripTable, test: TripTable) -> float:
    items = [(test.trips[index], test.path(index)) for index in range(len(test))]
    sums = travel_time_sums(ConstantSpeed(train), collate(items))
    return travel_time_report({**sums, "samples": len(test)})["mape"]


def test_a_row_is_a_trip_with_where_and_when_it_began() -> None:
    table = TripTable.from_records(trips_of([4, 9]))
    batch = collate([(table.trips[index], table.path(index)) for index in range(2)])
    rows = trip_rows(ConstantSpeed(table), batch)
    assert rows["actual"].tolist() == [180, 480]
    torch.testing.assert_close(rows["predicted"], torch.tensor([180.0, 480.0]))
    assert rows["kilometres"].tolist() == [1.5, 4.0]
    assert rows["hour"].tolist() == [9, 9]
    torch.testing.assert_close(rows["latitude"], torch.tensor([30.0, 30.0]))
    torch.testing.assert_close(rows["longitude"], torch.tensor([104.0, 104.0]))


# DeepTTE's files.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("train_00", "test")])
def test_files_of_a_folder_are_one_set(tmp_path: Path, names: tuple[str, str]) -> None:
    folder = tmp_path / "city"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    lines(folder / names[0], trips_of([2, 3, 4]))
    lines(folder / names[1], trips_of([5, 6, 7]))
    data = deeptte(str(folder), test_fraction=0.3)
    assert sorted(data.train.table.trips["length"].tolist()) == [2, 3, 5, 6]  # type: ignore[attr-defined]
    assert sorted(data.test.table.trips["length"].tolist()) == [4, 7]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("cache")
def test_a_bad_record_stops_the_loader_with_its_place_and_the_remedy(tmp_path: Path) -> None:
    path = lines(tmp_path / "trips.jsonl", [made(), made(time=-1)])
    with pytest.raises(UserError, match=r"trips\.jsonl:2: time .*hetsync data check deeptte"):
        deeptte(str(path))
    lines(path, trips_of([2, 3, 4]))
    assert len(deeptte(str(path)).train) + len(deeptte(str(path)).test) == 3  # type: ignore[arg-type]


@pytest.mark.usefixtures("cache")
def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.options\.path"):
        deeptte(str(tmp_path / "nowhere"))
    findings = Findings()
    check(tmp_path / "nowhere", findings)
    assert findings.problems


def test_the_checker_goes_on_after_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "trips.jsonl"
    good = json.dumps(made()).encode()
    bad = [b"{", b"\xff\xfe", b"[" * 100_000, b"3", b"[]", json.dumps(made(1, time=1)).encode()]
    path.write_bytes(b"\n".join([good, b"", *bad, good]))
    told: list[str] = []
    findings = Findings(lambda where, what: told.append(where))
    check(path, findings)
    assert findings.counts == {"trips": 2, "points": 8}
    assert [where.rsplit(":", 1)[1] for where in told] == ["3", "4", "5", "6", "7", "8"]


@pytest.mark.skipif(not CHENGDU.is_dir(), reason="no Chengdu trips here")
@pytest.mark.usefixtures("cache")
def test_chengdu() -> None:
    findings = Findings()
    check(CHENGDU, findings)
    assert findings.counts == {"trips": 1100, "points": 39522}
    assert not findings.problems
    data = deeptte(str(CHENGDU))
    assert len(data.train) == 793  # type: ignore[arg-type]
    assert len(data.test) == 307  # type: ignore[arg-type]
    constants = data.model_options["normalisation"]
    assert constants["lngs"][0] == pytest.approx(104.06, abs=0.01)
    assert constants["dist_gap"] == pytest.approx((0.275, 0.127), abs=0.005)  # as published for all 5 million
    table = data.train.table  # type: ignore[attr-defined]
    assert 28 < mape_of_constant_speed(table, data.test.table) < 33  # type: ignore[attr-defined]
