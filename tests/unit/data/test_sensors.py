"""Sensor networks: files, windows, splits, masked errors, naive predictors, and the synthetic network's known best."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from told import Told
from torch.utils.data import default_collate

from hetsync.data import Data
from hetsync.data.findings import Findings
from hetsync.data.sets import sensor_baselines, sensor_data
from hetsync.data.sets import synthetic_sensors as synthetic
from hetsync.data.sets.parts import split
from hetsync.data.sets.sensor_baselines import HistoricAverage, LastValue
from hetsync.data.sets.sensor_data import (
    horizon_errors,
    horizon_sums,
    masked_loss,
    network_data,
    predicted_rows,
)
from hetsync.data.sets.sensor_graph import adjacency
from hetsync.data.sets.sensor_network import Network, SensorWindows
from hetsync.data.sets.sensors import check, sensors
from hetsync.data.sets.synthetic_sensors import Town, synthetic_sensors
from hetsync.errors import UserError

SENSORS = ["773869", "767541", "767542"]
MONDAY = np.datetime64("2024-01-01T00:00:00")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def readings(times: int = 60, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(20, 70, (times, len(SENSORS))).astype(np.float32)


def network(folder: Path, values: np.ndarray, minutes: int = 5, start: np.datetime64 = MONDAY) -> Network:
    folder.mkdir()
    names = [str(sensor) for sensor in range(values.shape[1])]
    Network.write(folder, values, start, minutes, names, None, None)
    return Network.open(folder)


# Files.


def metr_la(folder: Path, values: np.ndarray, times: np.ndarray | None = None, unit: str = "ns", tz: str = "") -> None:
    """As pandas writes a frame into HDF5, its last sensor in a block of its own; the graph and places beside it."""
    folder.mkdir(exist_ok=True)
    if times is None:
        times = MONDAY + np.arange(len(values)) * np.timedelta64(5, "m")
    with h5py.File(folder / "metr-la.h5", "w") as file:
        frame = file.create_group("df")
        frame["axis0"] = np.array(SENSORS, "S6")
        frame["axis1"] = times.astype(f"datetime64[{unit}]").astype(np.int64)
        frame["axis1"].attrs["kind"] = np.bytes_("datetime64" if unit == "ns" else f"datetime64[{unit}]")
        if tz:
            frame["axis1"].attrs["tz"] = np.bytes_(tz)
        for block, places in enumerate(([2], [0, 1])):
            frame[f"block{block}_items"] = np.array([SENSORS[place] for place in places], "S6")
            frame[f"block{block}_values"] = values[:, places].astype(np.float32 if block else np.float64)
    roads = "773869,773869,0\n773869,767541,800\n767541,767542.0,500\n767542,773869,3000.5\n1,773869,1\n"
    (folder / "distances.csv").write_text("from,to,cost\n" + roads)
    places = "".join(f"{number},{name},34.1,-118.{number}\n" for number, name in enumerate(SENSORS))
    (folder / "graph_sensor_locations.csv").write_text("index,sensor_id,latitude,longitude\n" + places)


def test_metr_la(tmp_path: Path) -> None:
    values = readings()
    values[3, 1] = 0
    metr_la(tmp_path / "la", values)
    data = sensors(str(tmp_path / "la"))
    found = data.train.dataset.network  # type: ignore[attr-defined]
    assert found.names == SENSORS
    assert found.minutes == 5
    assert found.start == MONDAY
    assert np.isnan(found.values()[3, 1])
    np.testing.assert_array_equal(np.nan_to_num(found.values()), values)
    np.testing.assert_allclose(found.places_S2[1], [-118.1, 34.1])
    assert data.model_options["sensors"] == 3
    assert data.model_options["horizon"] == 12
    counted = Findings()
    check(tmp_path / "la", counted)
    assert counted.counts["readings that are 0 or nan"] == 1
    assert not counted.problems


@pytest.mark.parametrize("unit", ["ns", "us", "ms", "s"])
def test_times_have_a_unit_and_a_zone(unit: str, tmp_path: Path) -> None:
    hours = np.datetime64("2012-06-30T12:00") + np.arange(60) * np.timedelta64(1, "h")
    metr_la(tmp_path / "la", readings(), hours, unit, "America/Los_Angeles")
    found = sensors(str(tmp_path / "la")).train.dataset.network  # type: ignore[attr-defined]
    assert found.start == np.datetime64("2012-06-30T05:00")
    assert found.minutes == 60


def test_weights_of_roads_are_by_distance(tmp_path: Path) -> None:
    metr_la(tmp_path / "la", readings())
    weights = adjacency(tmp_path / "la" / "distances.csv", SENSORS)
    deviation = np.std([0, 800, 500, 3000.5])
    assert weights[0, 1] == pytest.approx(math.exp(-((800 / deviation) ** 2)))
    assert weights[1, 2] == pytest.approx(math.exp(-((500 / deviation) ** 2)))
    assert weights[2, 0] == 0  # below a tenth: 0.001
    assert weights[1, 0] == 0
    assert (np.diag(weights) == 1).all()


def test_times_that_a_file_leaves_out_are_missing_readings(tmp_path: Path) -> None:
    times = MONDAY + np.delete(np.arange(61), 30) * np.timedelta64(5, "m")
    metr_la(tmp_path / "la", readings(60), times)
    found = sensors(str(tmp_path / "la")).train.dataset.network  # type: ignore[attr-defined]
    assert len(found.values()) == 61
    assert np.isnan(found.values()[30]).all()


def test_roads_and_places_may_have_no_heads(tmp_path: Path) -> None:
    """As those of PEMS-BAY."""
    metr_la(tmp_path / "la", readings())
    named = adjacency(tmp_path / "la" / "distances.csv", SENSORS)
    text = (tmp_path / "la" / "distances.csv").read_text().partition("\n")[2]
    (tmp_path / "la" / "distances.csv").write_text(text)
    places = "".join(f"{name},37.{place},-121.9\n" for place, name in enumerate(SENSORS))
    (tmp_path / "la" / "graph_sensor_locations.csv").write_text(places)
    found = sensors(str(tmp_path / "la")).train.dataset.network  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found.adjacency_SS, named)
    np.testing.assert_allclose(found.places_S2[1], [-121.9, 37.1])


def test_a_graph_may_be_weights(tmp_path: Path) -> None:
    metr_la(tmp_path / "la", readings())
    np.save(tmp_path / "la" / "mine.npy", np.arange(9).reshape(3, 3))
    found = sensors(str(tmp_path / "la"), graph="mine.npy").train.dataset.network  # type: ignore[attr-defined]
    assert found.adjacency_SS[1].tolist() == [3, 4, 5]
    with pytest.raises(UserError, match=r"mine.npy holds \(3, 3\): give weights of \(2, 2\)"):
        adjacency(tmp_path / "la" / "mine.npy", SENSORS[:2])


def test_times_of_a_table_are_those_on_the_wall(tmp_path: Path) -> None:
    lines = [f"2024-03-01 {hour % 24:02d}:00:00-08:00,{hour + 1}\n" for hour in range(24)]
    (tmp_path / "mine.csv").write_text("time, north\n" + "".join(lines))
    found = sensors(str(tmp_path), steps=2, horizon=2).train.dataset.network  # type: ignore[attr-defined]
    assert found.start == np.datetime64("2024-03-01T00:00")
    assert list(found.names) == ["north"]


def test_pems(tmp_path: Path) -> None:
    np.savez(tmp_path / "pems04.npz", data=np.stack([readings(), readings(seed=1)], 2))
    (tmp_path / "distance.csv").write_text("from,to,cost\n0,1,100\n1,2,300\n")
    data = sensors(str(tmp_path), feature=1, start="2018-01-06", missing=None)
    found = data.train.dataset.network  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found.values(), readings(seed=1))
    assert data.train[0]["weekday"].tolist() == [5] * 12  # type: ignore[index]
    assert found.adjacency_SS[0, 1] > 0.1
    assert found.adjacency_SS[1, 0] == 0


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    lines = [f"2024-01-01 {step // 4:02d}:{step % 4 * 15:02d},{step},,7.5\n" for step in range(60)]
    (tmp_path / "mine.csv").write_text("time,north,south,east\n" + "".join(lines))
    data = sensors(str(tmp_path), steps=4, horizon=4)
    found = data.train.dataset.network  # type: ignore[attr-defined]
    assert found.minutes == 15
    assert list(found.names) == ["north", "south", "east"]
    assert found.adjacency_SS is None
    assert np.isnan(found.values()[:, 1]).all()
    assert np.isnan(found.values()[0, 0])


def nothing(folder: Path) -> None:
    folder.mkdir()


def two_files(folder: Path) -> None:
    metr_la(folder, readings())
    np.savez(folder / "more.npz", data=readings())


def no_frame(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.h5").write_bytes(b"not HDF5")


def foreign_roads(folder: Path) -> None:
    metr_la(folder, readings())
    (folder / "distances.csv").write_text("from,to,cost\n1,2,3\n")


def table(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "mine.csv").write_text(text)

    return make


def far(distance: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        metr_la(folder, readings())
        (folder / "distances.csv").write_text(f"from,to,cost\n773869,767541,{distance}\n")

    return make


def stray(folder: Path) -> None:
    times = MONDAY + np.arange(60) * np.timedelta64(5, "m")
    times[12] += np.timedelta64(1, "m")
    metr_la(folder, readings(), times)


def infinite(folder: Path) -> None:
    values = readings()
    values[4, 0] = np.inf
    metr_la(folder, values)


def backwards(folder: Path) -> None:
    metr_la(folder, readings(), (MONDAY + np.arange(60) * np.timedelta64(5, "m"))[::-1])


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (nothing, {}, "files of readings are none: name one by data.options.readings"),
        (two_files, {}, "metr-la.h5, more.npz: name one by data.options.readings"),
        (two_files, {"readings": "other.h5"}, "data.options.readings is other.h5, which is not in"),
        (two_files, {"readings": "more.npz", "feature": 3}, "data.options.feature is 3, but"),
        (two_files, {"readings": "more.npz", "start": "soon"}, "data.options.start is soon: give a time such as"),
        (no_frame, {}, "a.h5 cannot be read as readings"),
        (foreign_roads, {}, "has no road between sensors of the readings, which are called 773869"),
        (far("far"), {}, "distances.csv:2 has far as distance: give a number"),
        (backwards, {}, "its time 2024-01-01T04:50:00 comes after a later one, or twice: leave it out"),
        (stray, {}, "its time 2024-01-01T01:01:00 is not on the grid of 5 minutes: leave it out"),
        (infinite, {}, "metr-la.h5 holds readings that are infinite: leave them empty"),
        (two_files, {"readings": "metr-la.h5", "horizon": 60}, "windows, which leave none to train"),
        (two_files, {"readings": "metr-la.h5", "test_fraction": 2}, "test_fraction is 2: it must be at most 1"),
        (table("a,b\n2024-01-01,1\n2024-01-02\n"), {}, "mine.csv:3 has 1 cells, and its head 2: mend it"),
        (table("a,b\n2024-01-01,1\n2024-01-02,x\n"), {}, "mine.csv:3 has x as a reading: give a number"),
        (table("a,b\n2024-01-01,1\nsoon,1\n"), {}, "mine.csv:3 has soon as its time: give one such as"),
        (table("a,b\n2024-01-01,1\n2024-01-02,2\n"), {"graph": "mine.csv"}, "has the heads a, b: give from, to and"),
        (far("nan"), {}, "distances.csv:2 has nan as distance: give a number"),
        (two_files, {"readings": "metr-la.h5", "steps": 0}, "data.options.steps is 0: it must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(
    make: Callable[[Path], None], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    make(tmp_path / "files")
    with pytest.raises(UserError) as told:
        sensors(str(tmp_path / "files"), **options)
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


def test_a_checker_tells_of_sensors_without_a_reading(tmp_path: Path) -> None:
    values = readings()
    values[:, 2] = 0
    metr_la(tmp_path / "la", values)
    counted = Findings()
    check(tmp_path / "la", counted)
    assert counted.problems["sensors without a reading"] == 1
    counted = Findings()
    check(tmp_path / "nowhere", counted)
    assert sum(counted.problems.values()) == 1


# Windows.


def test_a_window_is_what_came_before_and_what_comes_after(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.float32)[:, None] * [1, 100]
    windows = SensorWindows(network(tmp_path / "n", values, 60, np.datetime64("2024-01-06T22:00:00")), 3, 2)
    assert len(windows) == 36
    sample = windows[4]
    np.testing.assert_array_equal(sample["values"], values[4:7])
    np.testing.assert_array_equal(sample["targets"], values[7:9])
    np.testing.assert_allclose(sample["day_time"] * 24, [2, 3, 4], atol=1e-5)
    np.testing.assert_allclose(sample["future_day_time"] * 24, [5, 6], atol=1e-5)
    assert windows[0]["weekday"].tolist() == [5, 5, 6]
    assert windows[0]["future_weekday"].tolist() == [6, 6]


def test_other_processes_open_the_readings_and_are_not_sent_them(tmp_path: Path) -> None:
    windows = SensorWindows(network(tmp_path / "n", readings(20_000)), 12, 12)
    sent = pickle.dumps(windows)
    assert len(sent) < 2000
    np.testing.assert_array_equal(pickle.loads(sent)[7]["values"], windows[7]["values"])


@given(st.integers(0, 50_000), st.floats(0.01, 0.98), st.floats(0.01, 0.98))
def test_parts_are_all_windows_in_the_order_of_time(windows: int, validation: float, test: float) -> None:
    try:
        parts = split(windows, "windows", validation, test)
    except UserError:
        return
    assert [number for part in parts for number in part] == list(range(windows))
    assert all(parts)


def test_parts_are_as_the_field_cuts_them() -> None:
    assert [len(part) for part in split(34_249, "windows", 0.1, 0.2)] == [23_974, 3_425, 6_850]  # of METR-LA


def test_the_validation_part_comes_before_the_test_part(tmp_path: Path) -> None:
    data = network_data(network(tmp_path / "n", readings(100)), 4, 4, 0.1, 0.2)
    parts = (data.train, data.validation, data.test)
    assert [len(part) for part in parts] == [65, 9, 19]  # type: ignore[arg-type]
    assert [int(part[0]["row"]) for part in parts] == [4, 69, 78]  # type: ignore[index]


@pytest.mark.parametrize("block", [7, 4096])
def test_constants_come_from_the_training_part(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sensor_data, sensor_baselines):
        monkeypatch.setattr(module, "BLOCK", block)
    values = readings(100)
    values[::7] = np.nan
    data = network_data(network(tmp_path / "n", values), 4, 4, 0.1, 0.2)
    gone = {"values": torch.full((1, 4, 3), torch.nan), "targets": torch.zeros(1, 4, 3)}
    assert data.baselines["last value"](gone)[0, 0, 0].item() == pytest.approx(data.model_options["mean"])
    table = data.baselines["historic average"].table_7DS
    np.testing.assert_allclose(table[0, 20], values[20])  # each time of this morning comes once
    np.testing.assert_allclose(table[6, 200], np.nanmean(values[: len(data.train) + 3], 0), rtol=1e-6)  # type: ignore[arg-type]
    seen = values[: len(data.train) + 3]  # type: ignore[arg-type]
    assert data.model_options["mean"] == pytest.approx(np.nanmean(seen.astype(np.float64)), rel=1e-9)
    assert data.model_options["deviation"] == pytest.approx(np.nanstd(seen.astype(np.float64)), rel=1e-9)
    changed = values.copy()
    changed[len(seen) :] += 1000
    other = network_data(network(tmp_path / "m", changed), 4, 4, 0.1, 0.2)
    assert dict(other.model_options) == dict(data.model_options)


# Errors.


def by_hand(predicted: np.ndarray, actual: np.ndarray, steps: list[int]) -> dict[str, float]:
    absolute, squared, relative = [], [], []
    for sample in range(len(actual)):
        for step in steps:
            for sensor in range(actual.shape[2]):
                true = float(actual[sample, step, sensor])
                if not math.isnan(true):
                    error = float(predicted[sample, step, sensor]) - true
                    absolute.append(abs(error))
                    squared.append(error**2)
                    if true != 0:
                        relative.append(abs(error / true))
    return {
        "mae": float(np.mean(absolute)),
        "rmse": math.sqrt(np.mean(squared)),
        "mape": 100 * float(np.mean(relative)),
    }


def batch_with_gaps(samples: int = 9, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = np.random.default_rng(seed)
    actual = generator.uniform(10, 60, (samples, 12, 3)).astype(np.float32)
    actual[generator.random(actual.shape) < 0.3] = np.nan
    actual[0], actual[1, 2, 1] = np.nan, 0.0
    predicted = generator.uniform(10, 60, actual.shape).astype(np.float32)
    return torch.from_numpy(predicted), {"targets": torch.from_numpy(actual)}


def test_errors_are_of_the_readings_that_are_there_by_horizon() -> None:
    predicted, batch = batch_with_gaps()
    parts = [(slice(0, 2), Told(predicted[:2])), (slice(2, 9), Told(predicted[2:]))]  # as two ranks would
    sums: dict[str, float] = {}
    for part, model in parts:
        for name, value in horizon_sums(model, {"targets": batch["targets"][part]}, 5).items():
            sums[name] = sums.get(name, 0.0) + value
    found = horizon_errors(sums)
    for suffix, steps in (("", list(range(12))), ("_15min", [2]), ("_30min", [5]), ("_60min", [11])):
        for name, value in by_hand(predicted.numpy(), batch["targets"].numpy(), steps).items():
            assert found[name + suffix] == pytest.approx(value, rel=1e-6), name + suffix
    assert len(found) == 12


def test_of_no_readings_there_is_no_error() -> None:
    predicted, batch = batch_with_gaps()
    batch["targets"][:, 5] = torch.nan
    found = horizon_errors(horizon_sums(Told(predicted), batch, 5))
    assert math.isnan(found["mae_30min"])
    assert math.isfinite(found["mae"])


def test_horizons_that_are_not_predicted_are_not_told() -> None:
    predicted, batch = batch_with_gaps()
    assert set(horizon_errors(horizon_sums(Told(predicted), batch, 60))) == {
        *("mae", "rmse", "mape"),
        *("mae_60min", "rmse_60min", "mape_60min"),
    }


def test_the_loss_is_a_mean_over_samples_of_their_own_figure() -> None:
    predicted, batch = batch_with_gaps()
    own = [np.nanmean(np.abs(predicted[one].numpy() - batch["targets"][one].numpy())) for one in range(1, 9)]
    assert masked_loss(Told(predicted), batch).item() == pytest.approx(sum(own) / 9, rel=1e-6)
    each = [
        masked_loss(Told(predicted[one : one + 1]), {"targets": batch["targets"][one : one + 1]}) for one in range(9)
    ]
    whole = masked_loss(Told(predicted), batch)
    assert whole.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-6)
    assert each[0] == 0  # nothing there


def test_predictions_that_would_be_broadcast_are_refused() -> None:
    predicted, batch = batch_with_gaps()
    for wrong in (predicted[:, :, :1], predicted[:, :1], predicted.mT):
        with pytest.raises(UserError, match=r"the model returned predictions of shape .* for targets of shape"):
            masked_loss(Told(wrong), batch)


def test_a_row_is_a_sensor_at_a_horizon(tmp_path: Path) -> None:
    values = readings()
    (tmp_path / "n").mkdir()
    places = np.array([[4.0, 50.0], [4.1, 50.1], [4.2, 50.2]])
    Network.write(tmp_path / "n", values, np.datetime64("2024-01-06T23:50"), 15, ["1", "x", "30"], None, places)
    found = Network.open(tmp_path / "n")
    batch = default_collate([SensorWindows(found, 12, 12)[index] for index in (0, 5)])
    rows = predicted_rows(Told(batch["targets"] + 1), batch, found)
    assert {len(column) for column in rows.values()} == {2 * 12 * 3}
    at = 1 * 36 + 4 * 3 + 2  # the second sample's fifth step of the third sensor, which is reading 21
    assert rows["sensor"][at] == "30"
    assert rows["minutes_ahead"][at] == 75
    assert rows["time"][at] == np.datetime64("2024-01-07T05:05")
    assert rows["hour"][at] == 5
    assert (rows["longitude"][at], rows["latitude"][at]) == (4.2, 50.2)
    assert rows["actual"][at] == values[5 + 12 + 4, 2]
    assert rows["predicted"][at] == values[21, 2] + 1
    half = predicted_rows(Told(batch["targets"].bfloat16()), batch, found)  # under autocast
    np.testing.assert_allclose(half["predicted"], half["actual"], rtol=0.01)


# Naive predictors.


def test_the_last_value_is_the_last_that_is_there() -> None:
    values = torch.tensor([[[1.0, torch.nan, torch.nan], [2.0, 5.0, torch.nan], [torch.nan, torch.nan, torch.nan]]])
    found = LastValue(9.0)({"values": values, "targets": torch.zeros(1, 4, 3)})
    assert found.tolist() == [[[2.0, 5.0, 9.0]] * 4]


def test_the_historic_average_is_of_the_same_time_of_the_week(tmp_path: Path) -> None:
    hours = np.arange(24 * 21)
    values = np.stack([hours % 24 + 100 * (hours // 24 % 7), np.full(len(hours), np.nan)], 1).astype(np.float32)
    values[5, 0] = np.nan
    values[30, 1] = 3.0  # the only one
    found = network(tmp_path / "n", values, 60)
    average = HistoricAverage.of(found, len(values))
    batch = default_collate([SensorWindows(found, 24, 24)[index] for index in range(0, 400, 7)])
    predicted = average(batch)
    torch.testing.assert_close(predicted[..., 0], batch["targets"][..., 0])
    assert (predicted[..., 1] == 3.0).all()
    early = HistoricAverage.of(found, 48)  # two days: others take the mean at this time of the day
    assert early.table_7DS[4, 7, 0] == pytest.approx(7 + 50)


# The synthetic network.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Data:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return synthetic_sensors(sensors=16, days=21)


def errors_on(data: Data, model: torch.nn.Module) -> dict[str, float]:
    samples = range(0, len(data.test), 5)  # type: ignore[arg-type]
    batch = default_collate([data.test[index] for index in samples])
    return data.report({**data.metrics(model, batch), "samples": len(samples)})


def test_it_is_the_same_each_time_and_another_by_its_seed(made: Data) -> None:
    again, other = synthetic_sensors(sensors=16, days=21), synthetic_sensors(sensors=16, days=21, seed=1)
    np.testing.assert_array_equal(again.train[9]["values"], made.train[9]["values"])  # type: ignore[index]
    assert not np.allclose(other.train[9]["values"], made.train[9]["values"])  # type: ignore[index]


def test_readings_are_speeds(made: Data) -> None:
    values = made.train.dataset.network.values()  # type: ignore[attr-defined]
    assert values.min() > 10
    assert values.max() < 90
    assert not np.isnan(values).any()
    rush, night = values[8 * 12 :: 288][:5].mean(), values[3 * 12 :: 288][:5].mean()
    assert rush < night - 10


def test_the_best_predictor_is_better_than_naive_ones_and_no_change_of_it_is(made: Data) -> None:
    found = {name: errors_on(made, model) for name, model in made.baselines.items()}
    best = found.pop("best known")
    for name in ("rmse_15min", "rmse_30min", "rmse_60min", "mae", "rmse"):
        assert all(best[name] < 0.95 * other[name] for other in found.values()), name
    for change in ({"REMAINS": 0.92}, {"REMAINS": 0.99}, {"SPREADS": (0.0, 0.0)}, {"SPREADS": (0.3, 0.06)}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in change.items():
                patch.setattr(synthetic, name, value)
            changed = errors_on(made, synthetic.BestReadings(Town.build(16, 0)))
        assert changed["rmse"] > 1.002 * best["rmse"], change


def test_the_best_predictor_goes_as_traffic_does_without_news(made: Data) -> None:
    town, windows = Town.build(16, 0), made.train.dataset  # type: ignore[attr-defined]
    best = made.baselines["best known"]
    for index in (80, 85, 202, 1700):  # before and within the morning's rush, in the evening's, on a Saturday
        sample = windows[index]
        day, step = divmod(index + 11, synthetic.STEPS_A_DAY)
        deviation, expected = sample["values"][-1] - town.usual_7DS[day % 7, step], []
        for _ in range(12):
            deviation = town.next(deviation, day % 7, step)
            day, step = divmod(synthetic.STEPS_A_DAY * day + step + 1, synthetic.STEPS_A_DAY)
            expected.append(town.usual_7DS[day % 7, step] + deviation)
        np.testing.assert_allclose(best(default_collate([sample]))[0], np.stack(expected), rtol=1e-5)


def test_the_best_predictor_errs_as_its_law_says(made: Data) -> None:
    """By the variance of what is new, through one step: no sensor mixes with others then but by what it was told."""
    chance, (least, most) = synthetic.INCIDENTS_A_DAY / synthetic.STEPS_A_DAY, synthetic.INCIDENT_KMH
    second_moment = (most**3 - least**3) / (3 * (most - least))
    variance = synthetic.NOISE_KMH**2 + chance * second_moment - (chance * (least + most) / 2) ** 2
    samples = range(0, len(made.train), 3)  # type: ignore[arg-type]
    batch = default_collate([made.train[index] for index in samples])
    errors = (made.baselines["best known"](batch) - batch["targets"])[:, 0]
    assert errors.square().mean().item() == pytest.approx(variance, rel=0.05)
    assert errors.mean().item() == pytest.approx(0, abs=0.02)


def test_readings_are_missing_where_asked_for() -> None:
    data = synthetic_sensors(sensors=10, days=7, missing=0.1)
    gone = np.isnan(data.train.dataset.network.values())  # type: ignore[attr-defined]
    assert 0.1 <= gone.mean() < 0.115
    assert "best known" not in data.baselines


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sensors": 1}, "data.options.sensors is 1: it must be at least 2"),
        ({"days": 0}, "data.options.days is 0"),
        ({"missing": 1.0}, "data.options.missing is 1.0: it must be at most"),
        ({"seed": -1}, "data.options.seed is -1: it must be at least 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        synthetic_sensors(**options)
