"""The synthetic city: always alike for one seed, and with a structure that can be learned, above a noise floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsync.data.sets import synthetic_city as module
from hetsync.data.sets.city_traffic import RING, SIDE, USUAL_HOURS, City, Router, usual_pattern
from hetsync.data.sets.synthetic_city import Drives, make_trips, simulate, synthetic_city
from hetsync.data.sets.trips import TripTable, split_by_date, validate
from hetsync.errors import UserError

TRIPS, DAYS, DRIVERS = 4000, 14, 40


@pytest.fixture(scope="module")
def block() -> tuple[Drives, list[dict[str, Any]]]:
    ((made, rng),) = simulate(TRIPS, DAYS, DRIVERS, seed=0)
    return made, list(made.records(rng))


@pytest.fixture
def drives(block: tuple[Drives, list[dict[str, Any]]]) -> Drives:
    return block[0]


@pytest.fixture
def records(block: tuple[Drives, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return block[1]


@pytest.fixture(scope="module")
def city() -> City:
    return City.build(np.random.default_rng(1))


@pytest.fixture(scope="module")
def router(city: City) -> Router:
    return Router(city)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def mape(predicted: np.ndarray, true: np.ndarray) -> float:
    return float(100 * np.mean(abs(predicted - true) / true))


def flat(records: Any) -> list[np.ndarray]:
    table = TripTable.from_records(records)
    return [table.trips, table.points]


def test_records_are_valid_trips_of_10_to_128_points(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert validate(record) is None
        assert 10 <= len(record["lngs"]) <= 128
        assert record["weekID"] == record["dateID"] % 7
        assert record["dist"] == record["dist_gap"][-1] > 1.5
        assert record["time"] == record["time_gap"][-1]
        assert 5 < 3600 * record["dist"] / record["time"] < 130


def test_same_seed_same_trips_other_seed_others() -> None:
    first, again, other = (flat(make_trips(200, DAYS, DRIVERS, seed)) for seed in (5, 5, 6))
    for ours, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(first[0]["time"], other[0]["time"])


def test_blocks_are_of_one_city_and_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_TRIPS", 50)
    blocks = [block for block, _ in simulate(120, DAYS, DRIVERS, seed=0)]
    assert [len(block.days_T) for block in blocks] == [50, 50, 20]
    np.testing.assert_array_equal(blocks[0].city.free_seconds_E, blocks[1].city.free_seconds_E)
    assert not np.array_equal(blocks[0].hours_T, blocks[1].hours_T)


def test_routes_are_unbroken_and_take_the_least_usual_time(city: City, router: Router) -> None:
    rng = np.random.default_rng(0)
    origins, destinations = rng.integers(SIDE * SIDE, size=(2, 200))
    routes_TS = router.routes(origins, destinations, rng.integers(len(USUAL_HOURS), size=200))
    for origin, destination, route in zip(origins, destinations, routes_TS, strict=True):
        roads = route[route >= 0]
        stops = [origin, *city.heads_E[roads]]
        np.testing.assert_array_equal(city.tails_E[roads], stops[:-1])
        assert stops[-1] == destination
        assert len(set(stops)) == len(stops)


def test_a_direct_road_is_never_faster_than_the_route(city: City, router: Router) -> None:
    night = np.zeros(len(city.tails_E), int)
    routes_ES = router.routes(city.tails_E, city.heads_E, night)
    seconds_E = city.free_seconds_E * city.slowdown(
        np.arange(len(night)), np.full(len(night), USUAL_HOURS[0]), night + 1
    )
    seconds_E += city.mean_waits(np.arange(len(night)))
    route_seconds = np.where(routes_ES >= 0, seconds_E[routes_ES], 0).sum(1)
    assert (route_seconds <= seconds_E + 1e-6).all()


@given(st.floats(0, 24, exclude_max=True), st.integers(0, 6))
@settings(deadline=None)
def test_traffic_only_ever_slows(city: City, hour: float, weekday: int) -> None:
    roads = np.arange(len(city.tails_E))
    slowdown = city.slowdown(roads, np.full(len(roads), hour), np.full(len(roads), weekday))
    assert (slowdown >= 1).all()
    assert slowdown.max() < 5
    assert usual_pattern(np.array([hour]), np.array([weekday]))[0] in range(len(USUAL_HOURS))


def test_the_rush_is_of_working_days_and_leads_inwards_in_the_morning(city: City) -> None:
    inwards = np.flatnonzero(city.inbound_E > 0.8)
    outwards = np.flatnonzero(city.inbound_E < -0.8)

    def slowdown(roads: np.ndarray, hour: float, weekday: int) -> float:
        return float(city.slowdown(roads, np.full(len(roads), hour), np.full(len(roads), weekday)).mean())

    assert slowdown(inwards, 8, 1) > slowdown(outwards, 8, 1) > slowdown(outwards, 3, 1)
    assert slowdown(inwards, 18, 1) < slowdown(outwards, 18, 1)
    assert slowdown(inwards, 8, 6) < slowdown(inwards, 8, 1) < slowdown(inwards, 8, 0)


def test_mean_waits_are_the_mean_of_waits(city: City) -> None:
    roads = np.flatnonzero(city.classes_E != RING)[:50]
    luck = np.random.default_rng(0).random((20_000, 1))
    np.testing.assert_allclose(city.waits(roads, luck).mean(0), city.mean_waits(roads), rtol=0.05)
    assert not city.mean_waits(np.flatnonzero(city.classes_E == RING)).any()


def test_what_is_left_to_the_best_predictor_is_the_stated_noise(drives: Drives) -> None:
    errors = np.log(drives.seconds_TS().sum(1) / drives.expected_seconds())
    assert abs(errors.mean()) < 0.03  # the days' own noise does not average out over 14 days
    assert 5 < mape(drives.expected_seconds(), drives.seconds_TS().sum(1)) < 8


def test_time_of_day_road_and_driver_each_matter(drives: Drives) -> None:
    seconds = drives.seconds_TS().sum(1)
    floor = mape(drives.expected_seconds(), seconds)
    anyone = replace(drives, pace_T=np.ones(TRIPS)).expected_seconds()
    noon = replace(drives, hours_T=np.full(TRIPS, 13.0)).expected_seconds()
    one_road = replace(drives, city=replace(drives.city, free_seconds_E=np.full_like(drives.city.free_seconds_E, 40.0)))
    level = one_road.expected_seconds()
    assert mape(anyone, seconds) > floor + 3
    assert mape(noon, seconds) > floor + 10
    assert mape(level * np.median(seconds / level), seconds) > floor + 2


def test_simple_predictors_stand_between_guessing_and_the_floor(records: list[dict[str, Any]]) -> None:
    train, test = split_by_date(TripTable.from_records(records), 0.25)
    mean_pace = train.trips["time"].sum() / train.trips["dist"].sum()
    constant = 100 * np.mean(np.abs(test.trips["dist"] * mean_pace / test.trips["time"] - 1))

    def slots(table: TripTable) -> np.ndarray:
        return table.trips["minute"] // 60 + 24 * (table.trips["week"] >= 5)

    pace = train.trips["time"] / train.trips["dist"]
    overall = np.median(pace)
    by_slot = np.array(
        [np.median(pace[slots(train) == slot]) if slot in slots(train) else overall for slot in range(48)]
    )
    by_hour = mape(test.trips["dist"] * by_slot[slots(test)], test.trips["time"])
    assert 22 < constant < 32
    assert 13 < by_hour < constant - 6


def test_the_data_set_is_the_whole_of_the_trips_split_by_date() -> None:
    data = synthetic_city(trips=200, days=8, drivers=5)
    train, test = data.train.table.trips, data.test.table.trips  # type: ignore[attr-defined]
    assert len(train) + len(test) == 200
    assert train["date"].max() < test["date"].min()
    assert data.model_options["drivers"] == 5
    np.testing.assert_array_equal(
        np.sort(np.concatenate([train, test])["time"]), np.sort(flat(make_trips(200, 8, 5, 0))[0]["time"])
    )


@pytest.mark.parametrize("option", [{"trips": 1}, {"days": 1}, {"drivers": 0}, {"seed": -1}])
def test_bad_options_are_named(option: dict[str, int]) -> None:
    ((key, value),) = option.items()
    with pytest.raises(UserError, match=f"data.options.{key} is {value}"):
        synthetic_city(**option)  # type: ignore[arg-type]
