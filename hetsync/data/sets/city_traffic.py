"""Roads and traffic of the synthetic city, a made-up grid town (docs/results/synthetic-city.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SIDE = 33  # junctions along each side of the grid
BLOCK_KM = 0.5
JITTER_KM = 0.06  # junctions lie off the exact grid, so that no two routes are equally long
ARTERIAL_EVERY = 4  # lines of the grid
RING_LINES = (8, 24)  # the ring road: a square of expressway 8 km wide
RIVER_ROW = 13  # a river runs between this row and the next: streets have no bridge

STREET, ARTERIAL, RING = range(3)
FREE_KMH = np.array([32.0, 50.0, 65.0])
RUSH_DEPTH = np.array([0.5, 1.0, 1.3])  # 1.0: an empty road's time doubles at the height of an ordinary rush
QUALITY_SIGMA = 0.12  # log-normal spread of the roads' own speeds

# Signals, by the number of arterials that meet at the junction: share of vehicles stopped, length of the red.
STOP_SHARE = np.array([0.15, 0.35, 0.5])
RED_SECONDS = np.array([15.0, 40.0, 60.0])

# Monday to Sunday.
RUSH_LEVEL = np.array([1.1, 1.0, 1.0, 1.0, 1.2, 0.0, 0.0])
LEISURE_LEVEL = np.array([0.2, 0.2, 0.2, 0.2, 0.3, 0.6, 0.5])

# What drivers expect of the day when they choose a route: they know its usual pattern, not its traffic of the moment.
USUAL_HOURS = np.array([3.0, 8.0, 13.0, 18.0])
TUESDAY = 1


@dataclass(frozen=True)
class City:
    """A directed road network of N junctions and E roads, one for each direction.

    Attributes:
        positions_N2: Junctions, km east and north of the centre.
        tails_E, heads_E: Junctions where a road begins and ends.
        classes_E: STREET, ARTERIAL or RING.
        free_seconds_E: Time along the empty road, without the junction at its end.
        inbound_E: 1 towards the centre, −1 away from it, 0 around it.
        central_E: Share of the rush that a road gets, by its distance from the centre.
        stop_share_E, red_seconds_E: Signal at the end of the road; none along the ring.
    """

    positions_N2: np.ndarray
    tails_E: np.ndarray
    heads_E: np.ndarray
    classes_E: np.ndarray
    free_seconds_E: np.ndarray
    inbound_E: np.ndarray
    central_E: np.ndarray
    stop_share_E: np.ndarray
    red_seconds_E: np.ndarray

    @staticmethod
    def build(rng: np.random.Generator) -> City:
        """A town of 16 km × 16 km; the generator decides where junctions lie and how fast each road is."""
        tails_E, heads_E, classes_E = _grid()
        rows_N, columns_N = np.divmod(np.arange(SIDE * SIDE), SIDE)
        grid_N2 = np.stack([columns_N, rows_N], 1) - (SIDE - 1) / 2
        positions_N2 = BLOCK_KM * grid_N2 + rng.normal(0, JITTER_KM, grid_N2.shape)
        roads_E2 = positions_N2[heads_E] - positions_N2[tails_E]
        km_E = np.hypot(*roads_E2.T)
        middles_E2 = (positions_N2[heads_E] + positions_N2[tails_E]) / 2
        from_centre_E = np.hypot(*middles_E2.T)
        kmh_E = FREE_KMH[classes_E] * rng.lognormal(0, QUALITY_SIGMA, len(km_E))
        arterials_N = (rows_N % ARTERIAL_EVERY == 0).astype(int) + (columns_N % ARTERIAL_EVERY == 0)
        signal_E = arterials_N[heads_E]
        return City(
            positions_N2,
            tails_E,
            heads_E,
            classes_E,
            free_seconds_E=3600 * km_E / kmh_E,
            inbound_E=-(roads_E2 * middles_E2).sum(1) / (km_E * from_centre_E),
            central_E=0.4 + 0.6 * np.exp(-((from_centre_E / 5) ** 2) / 2),
            stop_share_E=STOP_SHARE[signal_E],
            red_seconds_E=np.where(classes_E == RING, 0.0, RED_SECONDS[signal_E]),
        )

    def slowdown(self, roads: np.ndarray, hours: np.ndarray, weekdays: np.ndarray) -> np.ndarray:
        """How many times longer than when empty a road takes; hours of the day, weekdays from Monday = 0."""
        inbound = 0.4 * self.inbound_E[roads]
        rush = (1 + inbound) * _bump(hours, 8.0, 1.2) + (1 - inbound) * _bump(hours, 18.0, 1.6)
        load = RUSH_LEVEL[weekdays] * rush + LEISURE_LEVEL[weekdays] * _bump(hours, 14.5, 3.0)
        return 1 + RUSH_DEPTH[self.classes_E[roads]] * self.central_E[roads] * load

    def waits(self, roads: np.ndarray, luck: np.ndarray) -> np.ndarray:
        """Seconds at the signals that end the roads, for luck uniform in [0, 1): most vehicles pass without."""
        return self.red_seconds_E[roads] * np.maximum(0, 1 - luck / self.stop_share_E[roads])

    def mean_waits(self, roads: np.ndarray) -> np.ndarray:
        """The mean of `waits` over luck."""
        return self.red_seconds_E[roads] * self.stop_share_E[roads] / 2


class Router:
    """Ways of least time through a city, as its drivers expect it of the usual pattern of traffic."""

    def __init__(self, city: City) -> None:
        self._heads_E = city.heads_E
        self._next_road_RNN = np.stack([_next_roads(city, hour) for hour in USUAL_HOURS])

    def routes(self, origins_T: np.ndarray, destinations_T: np.ndarray, usual_T: np.ndarray) -> np.ndarray:
        """Roads of each trip in order, padded with −1: (T, longest). `usual_T` are indices of USUAL_HOURS."""
        at_T = origins_T
        steps = []
        while (at_T != destinations_T).any():
            roads_T = self._next_road_RNN[usual_T, destinations_T, at_T]
            steps.append(roads_T)
            at_T = np.where(roads_T >= 0, self._heads_E[roads_T], at_T)
        return np.stack(steps, 1)


def _next_roads(city: City, hour: float) -> np.ndarray:
    """(destination, junction) to the road to take, −1 where one has arrived; by Dijkstra's method, backwards."""
    # Imported here as only the rank that makes the trips needs it, and it takes a second.
    from scipy.sparse import csr_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import dijkstra  # type: ignore[import-untyped]

    junctions, roads_E = len(city.positions_N2), np.arange(len(city.tails_E))
    slowdown_E = city.slowdown(roads_E, np.full(len(roads_E), hour), np.full(len(roads_E), TUESDAY))
    seconds_E = city.free_seconds_E * slowdown_E + city.mean_waits(roads_E)
    backwards = csr_array((seconds_E, (city.heads_E, city.tails_E)), (junctions, junctions))
    _, next_NN = dijkstra(backwards, return_predecessors=True)
    road_NN = np.full((junctions, junctions), -1, np.int16)
    road_NN[city.tails_E, city.heads_E] = roads_E
    arrived_NN = np.eye(junctions, dtype=bool)  # where there is no next junction
    return np.where(arrived_NN, -1, road_NN[np.arange(junctions), np.where(arrived_NN, 0, next_NN)]).astype(np.int16)


def usual_pattern(hours: np.ndarray, weekdays: np.ndarray) -> np.ndarray:
    """Index of USUAL_HOURS that a driver has in mind who leaves then."""
    working = weekdays < 5
    morning, evening = working & (hours >= 6.5) & (hours < 10), working & (hours >= 16) & (hours < 20.5)
    day = (hours >= 6.5) & (hours < 20.5)
    return np.select([morning, evening, day], [1, 3, 2], 0)


def _bump(hours: np.ndarray, peak: float, width: float) -> np.ndarray:
    return np.exp(-(((hours - peak) / width) ** 2) / 2)


def _grid() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both directions between neighbours, less the missing bridges: tails, heads and classes of the roads."""
    grid = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    here = np.concatenate([grid[:, :-1].ravel(), grid[:-1].ravel()])
    there = np.concatenate([grid[:, 1:].ravel(), grid[1:].ravel()])
    rows, columns = np.divmod(here, SIDE)
    eastward = there == here + 1
    line, begin = np.where(eastward, rows, columns), np.where(eastward, columns, rows)
    on_ring = np.isin(line, RING_LINES) & (begin >= RING_LINES[0]) & (begin < RING_LINES[1])
    classes = np.select([on_ring, line % ARTERIAL_EVERY == 0], [RING, ARTERIAL], STREET)
    keep = eastward | (begin != RIVER_ROW) | (classes != STREET)
    here, there, classes = here[keep], there[keep], classes[keep]
    return np.concatenate([here, there]), np.concatenate([there, here]), np.concatenate([classes, classes])
