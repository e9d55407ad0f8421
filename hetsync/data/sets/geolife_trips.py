"""GPS tracks to trips: cleaned, cut at gaps, stops and changes of transport, and resampled by distance.

Points are rows of latitude and longitude in degrees and seconds since 1970 GMT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from hetsync.errors import UserError

DAY_SECONDS = 86_400
CHINA_SECONDS = 8 * 3600  # local time ahead of GMT; the few trips abroad keep China's time
EARTH_KM = 6371.0
UNLABELLED = ""
Label = tuple[float, float, str]  # from and to in seconds since 1970 GMT, mode of transport


@dataclass(frozen=True)
class Cleaning:
    """Thresholds that make trips of a track.

    Args:
        gap_minutes: A longer silence of the recorder ends a trip.
        stop_metres, stop_minutes: Staying within this distance for this long ends a trip; the stay is in none.
        max_kmh: Faster steps are errors of the GPS: a lone point is dropped, else the trip is cut there.
        min_kilometres: Shorter trips, as resampled, are dropped.
        spacing_kilometres: Distance between the points of a trip, as far as the next two allow.
        min_points, max_points: A trip is resampled to no fewer and no more; with fewer recorded it is dropped.
    """

    gap_minutes: float = 5.0
    stop_metres: float = 100.0
    stop_minutes: float = 5.0
    max_kmh: float = 200.0
    min_kilometres: float = 1.0
    spacing_kilometres: float = 0.3
    min_points: int = 10
    max_points: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise UserError(f"data.options.{field.name} is {value}: use a positive number")
        if not 2 <= self.min_points <= self.max_points:
            raise UserError(
                f"data.options.min_points is {self.min_points}: use 2 to max_points, which is {self.max_points}"
            )


def cut(points_P3: np.ndarray, labels: Sequence[Label], rules: Cleaning) -> Iterator[tuple[np.ndarray, str]]:
    """The resampled trips of one track, in any state of order, with their modes of transport ("" where unlabelled)."""
    points_P3 = _plausible(points_P3, rules)
    if len(points_P3) < 2:
        return
    modes_P = _modes(points_P3[:, 2], labels)
    silent = np.diff(points_P3[:, 2]) > 60 * rules.gap_minutes
    ends = silent | (_steps_kmh(points_P3) > rules.max_kmh) | (modes_P[1:] != modes_P[:-1])
    for ride in _runs(ends, np.zeros(len(points_P3), bool)):
        stopped_P = _stopped(points_P3[ride], rules)
        for moving in _runs(np.zeros(len(stopped_P) - 1, bool), stopped_P):
            recorded_P3 = points_P3[ride][moving]
            if len(recorded_P3) < rules.min_points:
                continue
            trip_P3 = resample(recorded_P3, rules)
            if steps_km(trip_P3).sum() >= rules.min_kilometres:
                yield trip_P3, str(modes_P[ride.start])


def resample(points_P3: np.ndarray, rules: Cleaning) -> np.ndarray:
    """A trip at even distances along its way, interpolated between the recorded points."""
    along = np.append(0, steps_km(points_P3).cumsum())
    count = np.clip(round(along[-1] / rules.spacing_kilometres) + 1, rules.min_points, rules.max_points)
    samples = np.linspace(0, along[-1], count)
    return np.stack([np.interp(samples, along, column) for column in points_P3.T], 1)


def record(user: int, points_P3: np.ndarray) -> dict[str, Any]:
    """A resampled trip in DeepTTE's form; `dateID` counts days since 1970, `states` are all 1."""
    time_gap = points_P3[:, 2] - points_P3[0, 2]
    dist_gap = np.append(0, steps_km(points_P3).cumsum())
    day, second = divmod(int(points_P3[0, 2]) + CHINA_SECONDS, DAY_SECONDS)
    return {
        "driverID": user,
        "dateID": day,
        "weekID": (day + 3) % 7,  # 1 January 1970 was a Thursday
        "timeID": second // 60,
        "dist": float(dist_gap[-1]),
        "time": float(time_gap[-1]),
        "lngs": points_P3[:, 1],
        "lats": points_P3[:, 0],
        "states": np.ones(len(points_P3)),
        "time_gap": time_gap,
        "dist_gap": dist_gap,
    }


def steps_km(points_P3: np.ndarray) -> np.ndarray:
    """(P − 1,) distances between neighbouring points."""
    return _distances_km(points_P3[:-1], points_P3[1:])


def _distances_km(here_P3: np.ndarray, there_P3: np.ndarray) -> np.ndarray:
    """Along great circles, by the haversine formula."""
    (lat, lng), (to_lat, to_lng) = np.radians(here_P3[:, :2]).T, np.radians(there_P3[:, :2]).T
    half = np.sin((to_lat - lat) / 2) ** 2 + np.cos(lat) * np.cos(to_lat) * np.sin((to_lng - lng) / 2) ** 2
    return 2 * EARTH_KM * np.arcsin(np.sqrt(np.minimum(half, 1)))


def _plausible(points_P3: np.ndarray, rules: Cleaning) -> np.ndarray:
    """Points on Earth, each later than all before it, without the lone ones that no vehicle reaches and leaves."""
    on_earth = (abs(points_P3[:, 0]) <= 90) & (abs(points_P3[:, 1]) <= 180) & np.isfinite(points_P3[:, 2])
    points_P3 = points_P3[on_earth]
    before = np.append(-np.inf, np.maximum.accumulate(points_P3[:, 2])[:-1])[: len(points_P3)]
    points_P3 = points_P3[points_P3[:, 2] > before]
    if len(points_P3) < 3:
        return points_P3
    too_fast = _steps_kmh(points_P3) > rules.max_kmh
    lone = np.concatenate([[False], too_fast[:-1] & too_fast[1:], [False]])
    return points_P3[~lone]


def _steps_kmh(points_P3: np.ndarray) -> np.ndarray:
    return 3600 * steps_km(points_P3) / np.diff(points_P3[:, 2])


def _modes(seconds_P: np.ndarray, labels: Sequence[Label]) -> np.ndarray:
    """The mode of transport at each time: of the label that began last, if it has not ended."""
    if not labels:
        return np.full(len(seconds_P), UNLABELLED)
    starts, ends, names = (np.array(column) for column in zip(*sorted(labels), strict=True))
    which = np.searchsorted(starts, seconds_P, side="right") - 1
    return np.where((which >= 0) & (seconds_P <= ends[which]), names[which], UNLABELLED)


def _stopped(points_P3: np.ndarray, rules: Cleaning) -> np.ndarray:
    """Which points belong to a stay: half of and all of `stop_minutes` after some point, it is still that near."""
    seconds = points_P3[:, 2]
    near = seconds + 60 * rules.stop_minutes <= seconds[-1]
    for share in (0.5, 1.0):
        later = np.searchsorted(seconds, seconds + 60 * share * rules.stop_minutes, side="right") - 1
        near &= _distances_km(points_P3, points_P3[later]) * 1000 < rules.stop_metres
    depth = np.zeros(len(points_P3) + 1, int)
    np.add.at(depth, np.flatnonzero(near), 1)
    np.add.at(depth, later[near] + 1, -1)
    return depth.cumsum()[:-1] > 0


def _runs(ends: np.ndarray, left_out: np.ndarray) -> list[slice]:
    """Longest runs of points between which no step `ends` and of which none is left out."""
    labels = np.append(0, (ends | (left_out[1:] != left_out[:-1])).cumsum())
    starts = np.append(np.flatnonzero(np.diff(labels, prepend=-1)), len(labels))
    return [slice(a, b) for a, b in pairwise(starts) if not left_out[a]]
