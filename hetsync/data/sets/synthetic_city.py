"""Trips of a synthetic city, made on the spot: travel-time data where no real trips are at hand.

What the generator imitates and what it does not is in docs/results/synthetic-city.md. No figure on it says anything
about a real city.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.sets.city_traffic import City, Router, usual_pattern
from hetsync.data.sets.trips import TripTable, split_by_date, trip_data
from hetsync.errors import UserError

VERSION = "1"  # of the generator and the cached layout: raise it when the trips change
BLOCK_TRIPS = 10_000  # made at once: about 20 MB

DRIVER_SIGMA = 0.12  # log-normal spread of the drivers' pace: to be learned
DAY_SIGMA = 0.04  # of the days (weather, events): noise to whoever has not seen the day
TRIP_SIGMA = 0.06  # of the trips: noise
GPS_KM = 0.01
SPACING_KM = (0.2, 0.4)  # a vehicle's recorder takes a point at steps between these
POINTS = (10, 128)
LEAST_KM = 2.0  # between the ends of a trip, as the crow flies
KM_A_DEGREE = 111.32  # at 0° N, 0° E, where this city lies and no real one does


def synthetic_city(
    trips: int = 10_000,
    days: int = 28,
    drivers: int = 200,
    seed: int = 0,
    test_fraction: float = 0.25,
    local_weight: float = 0.3,
) -> Data:
    """Synthetic trips, always alike for the same arguments; made once a host.

    Args:
        trips: Number of trips, all days together.
        days: From a Monday on, at least 2.
        drivers: Who share the trips evenly at random.
        seed: Of the city as well as of its trips.
        test_fraction: Share of the trips to test on: the last whole days whose share is nearest to it.
        local_weight: Weight of the windows' loss in models that have one (DeepTTE's α).
    """
    for name, value, least in (("trips", trips, 2), ("days", days, 2), ("drivers", drivers, 1), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"data.options.{name} is {value}: the synthetic city needs {least} or more")
    version = f"{VERSION} {trips} {days} {drivers} {seed}"
    folder = cached_folder(
        "synthetic_city", [], version, lambda made: TripTable.write(make_trips(trips, days, drivers, seed), made)
    )
    train, test = split_by_date(TripTable.open(folder), test_fraction)
    return trip_data(train, test, local_weight)


def make_trips(trips: int, days: int, drivers: int, seed: int) -> Iterator[dict[str, Any]]:
    """Synthetic trip records in DeepTTE's form, with arrays for its lists; `dateID` counts from Monday, day 0."""
    for drives, rng in simulate(trips, days, drivers, seed):
        yield from drives.records(rng)


def simulate(trips: int, days: int, drivers: int, seed: int) -> Iterator[tuple[Drives, np.random.Generator]]:
    """Blocks of drives through one city, each with the generator that goes on to draw its records."""
    rng = np.random.default_rng([seed, 0])
    city = City.build(rng)
    router = Router(city)
    pace_of_driver = rng.lognormal(0, DRIVER_SIGMA, drivers)
    pace_of_day = rng.lognormal(0, DAY_SIGMA, days)
    for block, first in enumerate(range(0, trips, BLOCK_TRIPS)):
        rng = np.random.default_rng([seed, 1, block])
        count = min(BLOCK_TRIPS, trips - first)
        days_T, drivers_T = rng.integers(days, size=count), rng.integers(drivers, size=count)
        hours_T = _departures(days_T % 7, rng)
        origins_T, destinations_T = _ends(city, hours_T, days_T % 7, rng)
        routes_TS = router.routes(origins_T, destinations_T, usual_pattern(hours_T, days_T % 7))
        noise_T = pace_of_day[days_T] * rng.lognormal(0, TRIP_SIGMA, count)
        luck_TS = rng.random(routes_TS.shape)
        yield Drives(city, days_T, drivers_T, hours_T, routes_TS, pace_of_driver[drivers_T], noise_T, luck_TS), rng


@dataclass(frozen=True)
class Drives:
    """T drives on routes of up to S roads, padded with −1.

    Attributes:
        pace_T: Of the driver: 1.1 takes a tenth longer than the traffic.
        noise_T: Of day and trip, in the same sense; 1 is the expectation.
        luck_TS: At the signals; None for the mean wait at each.
    """

    city: City
    days_T: np.ndarray
    drivers_T: np.ndarray
    hours_T: np.ndarray
    routes_TS: np.ndarray
    pace_T: np.ndarray
    noise_T: np.ndarray
    luck_TS: np.ndarray | None

    def seconds_TS(self) -> np.ndarray:
        """Time on each road and at the signal that ends it, at the traffic of the moment; 0 for padding."""
        clock_T = self.hours_T.copy()
        steps = []
        for step, roads_T in enumerate(self.routes_TS.T):
            moving_T = self.city.free_seconds_E[roads_T] * self.city.slowdown(roads_T, clock_T % 24, self.days_T % 7)
            waits_T = (
                self.city.mean_waits(roads_T)
                if self.luck_TS is None
                else self.city.waits(roads_T, self.luck_TS[:, step])
            )
            seconds_T = np.where(roads_T < 0, 0, moving_T * self.pace_T * self.noise_T + waits_T)
            clock_T += seconds_T / 3600
            steps.append(seconds_T)
        return np.stack(steps, 1)

    def expected_seconds(self) -> np.ndarray:
        """(T,) what the best predictor would say who knows the whole city, the route and the driver, but no noise."""
        calm = replace(self, noise_T=np.ones_like(self.noise_T), luck_TS=None)
        return calm.seconds_TS().sum(1)

    def records(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        """What a recorder on board would have kept: noisy points at even steps along the way."""
        seconds_TS = self.seconds_TS()
        spacing_T = rng.uniform(*SPACING_KM, len(self.days_T))
        for trip, route in enumerate(self.routes_TS):
            roads = route[route >= 0]
            corners = self.city.positions_N2[np.append(self.city.tails_E[roads[0]], self.city.heads_E[roads])]
            along = np.append(0, np.hypot(*np.diff(corners, axis=0).T).cumsum())
            clock = np.append(0, seconds_TS[trip, : len(roads)].cumsum())
            samples = np.linspace(0, along[-1], np.clip(round(along[-1] / spacing_T[trip]) + 1, *POINTS))
            points_P2 = np.stack([np.interp(samples, along, corners[:, axis]) for axis in (0, 1)], 1)
            points_P2 += rng.normal(0, GPS_KM, points_P2.shape)
            time_gap = np.interp(samples, along, clock).round()
            dist_gap = np.append(0, np.hypot(*np.diff(points_P2, axis=0).T).cumsum())
            yield {
                "driverID": int(self.drivers_T[trip]),
                "dateID": int(self.days_T[trip]),
                "weekID": int(self.days_T[trip] % 7),
                "timeID": int(self.hours_T[trip] * 60),
                "dist": float(dist_gap[-1]),
                "time": float(time_gap[-1]),
                "lngs": points_P2[:, 0] / KM_A_DEGREE,
                "lats": points_P2[:, 1] / KM_A_DEGREE,
                "states": np.ones(len(samples)),
                "time_gap": time_gap,
                "dist_gap": dist_gap,
            }


def _departures(weekdays_T: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Hours of the day: working days have two peaks, the weekend a broad afternoon, all a thin night."""
    peaks = np.array([[8.0, 1.2], [18.0, 1.8], [13.5, 3.5]])  # hour and width
    shares = np.where(weekdays_T[:, None] < 5, [0.3, 0.3, 0.3], [0.0, 0.2, 0.6])
    kinds_T = (rng.random((len(weekdays_T), 1)) > shares.cumsum(1)).sum(1)  # 3: any time at all
    around_T = rng.normal(*peaks[np.minimum(kinds_T, 2)].T) % 24
    return np.where(kinds_T == 3, rng.uniform(0, 24, len(weekdays_T)), around_T)


def _ends(
    city: City, hours_T: np.ndarray, weekdays_T: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Origins and destinations: from homes to work in the morning, back in the evening, else anywhere."""
    x_N, y_N = city.positions_N2.T
    radius_N = np.hypot(x_N, y_N)
    homes_N = np.exp(-(((radius_N - 5) / 2) ** 2) / 2)
    works_N = np.exp(-((radius_N / 2) ** 2) / 2) + 0.7 * np.exp(-(np.hypot(x_N - 5, y_N - 3) ** 2) / 2)
    cumulative_3N = np.stack([each / each.sum() for each in (homes_N, works_N, homes_N + works_N)]).cumsum(1)
    commute_T = (weekdays_T < 5) & (rng.random(len(hours_T)) < 0.75)
    outbound_T, homebound_T = commute_T & (abs(hours_T - 8) < 2), commute_T & (abs(hours_T - 18) < 2.5)
    froms_T = np.select([outbound_T, homebound_T], [0, 1], 2)
    tos_T = np.select([outbound_T, homebound_T], [1, 0], 2)
    ends_2T = np.zeros((2, len(hours_T)), np.int64)
    near_T = np.ones(len(hours_T), bool)
    while near_T.any():
        for kinds_T, ends_T in zip((froms_T, tos_T), ends_2T, strict=True):
            luck = rng.random((near_T.sum(), 1))
            ends_T[near_T] = (cumulative_3N[kinds_T[near_T]] < luck).sum(1).clip(max=len(x_N) - 1)
        near_T = np.hypot(*(city.positions_N2[ends_2T[0]] - city.positions_N2[ends_2T[1]]).T) < LEAST_KM
    return ends_2T[0], ends_2T[1]
