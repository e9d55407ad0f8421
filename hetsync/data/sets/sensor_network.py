"""Sensor networks: series of readings at regular times, and windows of them.

A batch is a dictionary: `values` (N, T, S), the last T readings of S sensors in their own units, nan where missing;
`day_time` (N, T), the part of the day in [0, 1) of each, and `weekday` (N, T) from Monday = 0; `future_day_time` and
`future_weekday` (N, H) of the H readings to be predicted, which are `targets` (N, H, S), nan where missing; and `row`
(N,), the number of the first of these in the series. A model returns predictions (N, H, S).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

Batch = dict[str, torch.Tensor]

DAY_MINUTES = 1440
LAYOUT = "2"  # of a network's folder: raise it when that changes
VALUES, ADJACENCY, NETWORK = "values.npy", "adjacency.npy", "network.json"
BLOCK = 4096  # rows that are looked at together


@dataclass(frozen=True)
class Network:
    """Readings of S sensors, and how these are connected. A folder has the readings, which stay on disk until they are
    used; other processes open it there instead of being sent it.

    Attributes:
        folder: As `write` has made it.
        start: Time of the first reading.
        minutes: From one reading to the next.
        names: Of the sensors.
        adjacency_SS: Weight in [0, 1] of the road from one sensor to another; None where no graph is known.
        places_S2: Longitude and latitude of each; None where unknown.
    """

    folder: Path
    start: np.datetime64
    minutes: int
    names: Sequence[str]
    adjacency_SS: np.ndarray | None
    places_S2: np.ndarray | None

    @staticmethod
    def write(
        folder: Path,
        values_XS: np.ndarray,
        start: np.datetime64,
        minutes: int,
        names: Sequence[str],
        adjacency_SS: np.ndarray | None,
        places_S2: np.ndarray | None,
    ) -> None:
        """Into an empty folder, from where `open` has it. Readings that are missing are nan."""
        np.save(folder / VALUES, values_XS.astype(np.float32))
        told = {
            "start": str(start.astype("datetime64[s]")),
            "minutes": minutes,
            "names": list(names),
            "graph": adjacency_SS is not None,
            "places": None if places_S2 is None else places_S2.tolist(),
        }
        (folder / NETWORK).write_text(json.dumps(told))
        if adjacency_SS is not None:
            np.save(folder / ADJACENCY, adjacency_SS)

    @classmethod
    def open(cls, folder: Path) -> Network:
        told = json.loads((folder / NETWORK).read_text())
        places = None if told["places"] is None else np.array(told["places"])
        graph = np.load(folder / ADJACENCY, allow_pickle=False) if told["graph"] else None
        start = np.datetime64(told["start"], "s")
        return cls(folder, start, int(told["minutes"]), told["names"], graph, places)

    def values(self) -> np.ndarray:
        """(X, S) of float32, mapped into memory."""
        return np.asarray(np.load(self.folder / VALUES, mmap_mode="r", allow_pickle=False))

    def day_times(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Part of the day, of float32, and weekday from Monday = 0, of readings by their rows."""
        midnight = self.start.astype("datetime64[D]")
        minutes = int((self.start - midnight) / np.timedelta64(1, "m")) + rows * self.minutes
        weekday = int((midnight - np.datetime64("1970-01-05")) / np.timedelta64(1, "D")) + minutes // DAY_MINUTES
        return (minutes % DAY_MINUTES / DAY_MINUTES).astype(np.float32), weekday % 7


class SensorWindows(Dataset[dict[str, np.ndarray]]):
    """All windows of a network's readings, `steps` of them to predict `horizon` more, one for each time."""

    def __init__(self, network: Network, steps: int, horizon: int) -> None:
        self.network, self.steps, self.horizon = network, steps, horizon
        self._values = network.values()

    def __len__(self) -> int:
        return max(0, len(self._values) - self.steps - self.horizon + 1)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        now, end = index + self.steps, index + self.steps + self.horizon
        day_time, weekday = self.network.day_times(np.arange(index, end))
        return {
            "row": np.array(now),
            "values": np.array(self._values[index:now]),
            "day_time": day_time[: self.steps],
            "weekday": weekday[: self.steps],
            "future_day_time": day_time[self.steps :],
            "future_weekday": weekday[self.steps :],
            "targets": np.array(self._values[now:end]),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._values = self.network.values()
