"""Readings of a synthetic sensor network, made on the spot, whose best predictor is known.

Sensors stand along roads that lead into a town and meet in a ring. Each has a usual course of the day, with rush hours
on working days. Deviations from it fade, and spread to neighbours: against the traffic where it queues (in rush hours),
else with it. New ones come at each step: noise, and now and then an incident. Given the readings of one step, the
expectation of each later one is exactly known (`BestReadings`). No figure on it says anything about a real town.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hetsync.config.checks import at_least
from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.sets.sensor_data import network_data
from hetsync.data.sets.sensor_network import DAY_MINUTES, LAYOUT, Batch, Network

VERSION = "1"  # of the generator: raise it when the readings change
MINUTES = 5
STEPS_A_DAY = DAY_MINUTES // MINUTES
START = np.datetime64("2024-01-01T00:00:00", "s")  # a Monday

A_ROAD = 4  # sensors
SPACING_KM = 2.0
RING_KM = 2.0
KM_A_DEGREE = 111.32  # at 0° N, 0° E, where this town lies and no real one does
REACH_KM = 2.5  # of weights in the graph, exp(-(km / REACH_KM)²)

FREE_KMH = (62.0, 4.0)  # mean and deviation over sensors
RUSH_KMH = (16.0, 26.0)  # that a rush hour takes, at most
LEISURE_KMH = 4.0  # that the weekend's afternoons take
REMAINS = 0.96  # of a deviation at the next step, all sensors together
SPREADS = (0.06, 0.30)  # part of it that comes from neighbours: in calm and in rush hours
NOISE_KMH = 0.8  # deviation of what is new at each step
INCIDENTS_A_DAY = 0.2  # of each sensor
INCIDENT_KMH = (6.0, 14.0)  # that one takes
MOST_MISSING = 0.9


def synthetic_sensors(
    sensors: int = 40,
    days: int = 28,
    missing: float = 0.0,
    seed: int = 0,
    steps: int = 12,
    horizon: int = 12,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.2,
) -> Data:
    """Synthetic readings of km/h every five minutes, always alike for the same arguments; made once a host.

    Args:
        sensors: Their number; four stand along each road.
        days: From a Monday on.
        missing: Part of the readings that is missing, in spells of up to an hour. The best predictor is told only where
            it is 0, as it would have to know them.
        seed: Of the town as well as of its traffic.
        steps: Readings that a prediction is made from (T).
        horizon: Readings that are predicted (H).
        validation_fraction: Part of the windows to evaluate on while training: those before the test part.
        test_fraction: Part of the windows to test on: the last.
    """
    for name, value, least in (("sensors", sensors, 2), ("days", days, 1), ("seed", seed, 0)):
        at_least(f"data.options.{name}", value, least)
    at_least("data.options.missing", missing, 0, most=MOST_MISSING)
    town = Town.build(sensors, seed)
    version = f"{LAYOUT} {VERSION} {sensors} {days} {missing} {seed}"
    folder = cached_folder("synthetic_sensors", [], version, lambda made: write(town, days, missing, seed, made))
    best = {} if missing else {"best known": BestReadings(town)}
    return network_data(Network.open(folder), steps, horizon, validation_fraction, test_fraction, best)


@dataclass(frozen=True)
class Town:
    """S sensors.

    Attributes:
        places_S2: km east and north of the centre.
        adjacency_SS: Weight of the road from one to another, in the direction of travel.
        usual_7DS: Usual reading by weekday and step of the day, km/h.
        spreads_7D: Part of a deviation that comes from neighbours, by weekday and step of the day.
        mixed_2SS: Means over neighbours, weighted by roads: over those that a sensor's traffic comes from, and over
            those where it goes.
        queues_7D: Does traffic queue, so that deviations go against it?
    """

    places_S2: np.ndarray
    adjacency_SS: np.ndarray
    usual_7DS: np.ndarray
    spreads_7D: np.ndarray
    mixed_2SS: np.ndarray
    queues_7D: np.ndarray

    @staticmethod
    def build(sensors: int, seed: int) -> Town:
        rng = np.random.default_rng([seed, 0])
        road_S, place_S = np.divmod(np.arange(sensors), A_ROAD)
        angle_S = 2 * np.pi * road_S / (road_S[-1] + 1) + rng.normal(0, 0.05, sensors)
        radius_S = RING_KM + SPACING_KM * (A_ROAD - 1 - place_S)  # the last one stands at the ring
        places_S2 = radius_S[:, None] * np.stack([np.cos(angle_S), np.sin(angle_S)], 1)
        hours_D = np.arange(STEPS_A_DAY) * MINUTES / 60
        morning_D, evening_D = _bump(hours_D, 8.0, 1.0), _bump(hours_D, 17.5, 1.5)
        free_S, rush_S = rng.normal(*FREE_KMH, sensors), rng.uniform(*RUSH_KMH, sensors)
        inward_S = rng.uniform(0.3, 1.0, sensors)
        working_DS = rush_S * (morning_D[:, None] * inward_S + evening_D[:, None] * (1.3 - inward_S))
        weekend_DS = np.outer(LEISURE_KMH * _bump(hours_D, 14.5, 3.0), np.ones(sensors))
        taken_7DS = np.stack([working_DS] * 5 + [weekend_DS] * 2)
        calm, rush = SPREADS
        spreads_D = calm + (rush - calm) * np.maximum(morning_D, evening_D)
        spreads_7D = np.stack([spreads_D] * 5 + [np.full(STEPS_A_DAY, calm)] * 2)
        adjacency_SS = _graph(places_S2, road_S)
        return Town(
            places_S2,
            adjacency_SS,
            free_S - taken_7DS,
            spreads_7D,
            np.stack([_mixed(adjacency_SS.T), _mixed(adjacency_SS)]),
            spreads_7D > sum(SPREADS) / 2,
        )

    def next(self, deviation_S: np.ndarray, weekday: int, day_step: int) -> np.ndarray:
        """What is left of deviations at this step at the next one."""
        spread = self.spreads_7D[weekday, day_step]
        mixed_SS = self.mixed_2SS[int(self.queues_7D[weekday, day_step])]
        left: np.ndarray = REMAINS * ((1 - spread) * deviation_S + spread * mixed_SS @ deviation_S)
        return left


def write(town: Town, days: int, missing: float, seed: int, folder: Path) -> None:
    """Readings of so many days as a network's folder."""
    rng = np.random.default_rng([seed, 1])
    sensors = len(town.places_S2)
    deviation_S = np.zeros(sensors)
    rows = []
    for step in range(-STEPS_A_DAY, days * STEPS_A_DAY):  # a day before the first, to settle
        day, day_step = divmod(step, STEPS_A_DAY)
        if step >= 0:
            rows.append(town.usual_7DS[day % 7, day_step] + deviation_S)
        deviation_S = town.next(deviation_S, day % 7, day_step) + _news(rng, sensors)
    values = np.stack(rows)
    values[_spells(rng, values.shape, missing)] = np.nan
    names = [f"{sensor // A_ROAD + 1}{sensor % A_ROAD + 1:02d}" for sensor in range(sensors)]  # 203: of road 2, third
    Network.write(folder, values, START, MINUTES, names, town.adjacency_SS, town.places_S2 / KM_A_DEGREE)


def _news(rng: np.random.Generator, sensors: int) -> np.ndarray:
    """What is new at a step: of mean 0, incidents included."""
    chance, (least, most) = INCIDENTS_A_DAY / STEPS_A_DAY, INCIDENT_KMH
    incidents = (rng.random(sensors) < chance) * rng.uniform(least, most, sensors)
    return rng.normal(0, NOISE_KMH, sensors) - incidents + chance * (least + most) / 2


def _spells(rng: np.random.Generator, shape: tuple[int, ...], missing: float) -> np.ndarray:
    """Where readings are missing: spells of 1 to 12 steps, until they are the wanted part."""
    gone = np.zeros(shape, bool)
    wanted = int(missing * gone.size)
    while (short := wanted - int(gone.sum())) > 0:
        count = max(1, short // 8)
        for row, sensor, length in zip(
            rng.integers(shape[0], size=count),
            rng.integers(shape[1], size=count),
            rng.integers(1, 13, count),
            strict=True,
        ):
            gone[row : row + length, sensor] = True
    return gone


class BestReadings(nn.Module):
    """The expectation of each reading to come, given the last ones: no other predictor has a smaller mean squared
    error. (Incidents are skewed, so that a smaller mean absolute error is possible, by a little.)"""

    usual_7DS: torch.Tensor
    spreads_7D: torch.Tensor
    mixed_2SS: torch.Tensor
    queues_7D: torch.Tensor

    def __init__(self, town: Town) -> None:
        super().__init__()
        for name in ("usual_7DS", "spreads_7D", "mixed_2SS"):
            self.register_buffer(name, torch.from_numpy(getattr(town, name)).float())
        self.register_buffer("queues_7D", torch.from_numpy(town.queues_7D))

    def forward(self, batch: Batch) -> torch.Tensor:
        days_NT = torch.cat([batch["weekday"][:, -1:], batch["future_weekday"]], 1)
        steps_NT = (torch.cat([batch["day_time"][:, -1:], batch["future_day_time"]], 1) * STEPS_A_DAY).round().long()
        usual_NTS = self.usual_7DS[days_NT, steps_NT]
        left_NS = batch["values"][:, -1] - usual_NTS[:, 0]
        found = []
        for step in range(days_NT.shape[1] - 1):
            spread_N1, queues_N1 = (
                each[days_NT[:, step], steps_NT[:, step], None] for each in (self.spreads_7D, self.queues_7D)
            )
            calm_NS, queue_NS = (left_NS @ mixed_SS.T for mixed_SS in self.mixed_2SS)
            left_NS = REMAINS * ((1 - spread_N1) * left_NS + spread_N1 * torch.where(queues_N1, queue_NS, calm_NS))
            found.append(usual_NTS[:, step + 1] + left_NS)
        return torch.stack(found, 1)


def _bump(hours: np.ndarray, peak: float, width: float) -> np.ndarray:
    return np.exp(-(((hours - peak) / width) ** 2) / 2)


def _graph(places_S2: np.ndarray, road_S: np.ndarray) -> np.ndarray:
    """Along each road towards the ring, and from the end of one road to that of the next around it."""
    km_SS = np.hypot(*(places_S2[:, None] - places_S2[None]).transpose(2, 0, 1))
    adjacency_SS = np.eye(len(road_S))
    ends = [int(np.flatnonzero(road_S == road)[-1]) for road in range(road_S[-1] + 1)]
    pairs = [(sensor, sensor + 1) for sensor in range(len(road_S) - 1) if road_S[sensor] == road_S[sensor + 1]]
    pairs += [(end, ends[(road + 1) % len(ends)]) for road, end in enumerate(ends) if len(ends) > 1]
    for here, there in pairs:
        adjacency_SS[here, there] = max(0.1, np.exp(-((km_SS[here, there] / REACH_KM) ** 2)))
    return adjacency_SS


def _mixed(weights_SS: np.ndarray) -> np.ndarray:
    """Rows that add up to 1, without the sensor itself; its own where it has no neighbour."""
    neighbours_SS = weights_SS * (1 - np.eye(len(weights_SS)))
    sums_S1 = neighbours_SS.sum(1, keepdims=True)
    return np.divide(neighbours_SS, sums_S1, out=np.eye(len(weights_SS)), where=sums_S1 > 0)
