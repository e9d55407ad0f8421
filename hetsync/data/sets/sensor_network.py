"""Sensor networks: series of readings at regular times, windows of them, masked errors by horizon, naive predictors.

A batch is a dictionary: `values` (N, T, S), the last T readings of S sensors in their own units, nan where missing;
`day_time` (N, T), the part of the day in [0, 1) of each, and `weekday` (N, T) from Monday = 0; `future_day_time` and
`future_weekday` (N, H) of the H readings to be predicted, which are `targets` (N, H, S), nan where missing; and `row`
(N,), the number of the first of these in the series. A model returns predictions (N, H, S).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from hetsync.data import Data
from hetsync.data.sets.parts import require_counts, require_shape, split
from hetsync.errors import UserError
from hetsync.metrics import MAE, MAPE, RMSE

Batch = dict[str, torch.Tensor]

DAY_MINUTES = 1440
TOLD_MINUTES = (15, 30, 60)  # horizons whose errors are told apart, as the field does
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
            "places": None if places_S2 is None else places_S2.tolist(),
        }
        (folder / NETWORK).write_text(json.dumps(told))
        if adjacency_SS is not None:
            np.save(folder / ADJACENCY, adjacency_SS)

    @classmethod
    def open(cls, folder: Path) -> Network:
        told = json.loads((folder / NETWORK).read_text())
        places = None if told["places"] is None else np.array(told["places"])
        graph = np.load(folder / ADJACENCY, allow_pickle=False) if (folder / ADJACENCY).is_file() else None
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


def network_data(
    network: Network,
    steps: int,
    horizon: int,
    validation_fraction: float,
    test_fraction: float,
    baselines: Mapping[str, nn.Module] | None = None,
) -> Data:
    """Windows in the order of time: to train on, to evaluate on while training, to test on. All constants come from the
    first.

    Args:
        network: The readings.
        steps: Readings that a prediction is made from (T).
        horizon: Readings that are predicted (H).
        validation_fraction: Part of the windows to evaluate on while training: those before the test part.
        test_fraction: Part of the windows to test on: the last.
        baselines: More predictors to compare with, beside the last value and the historic average.

    Raises:
        UserError: An option is wrong, or there are too few readings.
    """
    require_counts(steps=steps, horizon=horizon)
    windows = SensorWindows(network, steps, horizon)
    train, validation, test = split(len(windows), "windows", validation_fraction, test_fraction)
    rows = train.stop + steps - 1  # that training windows look back on
    mean, deviation = scale(network, rows)
    average = HistoricAverage.of(network, rows)
    return Data(
        Subset(windows, train),
        Subset(windows, test),
        loss=masked_loss,
        metrics=partial(horizon_sums, minutes=network.minutes),
        report=horizon_errors,
        validation=Subset(windows, validation),
        rows=partial(predicted_rows, network=network),
        baselines={"last value": LastValue(mean), "historic average": average, **(baselines or {})},
        model_options={
            "sensors": len(network.names),
            "horizon": horizon,
            "mean": mean,
            "deviation": deviation,
            "adjacency": network.adjacency_SS,
        },
    )


def scale(network: Network, rows: int) -> tuple[float, float]:
    """Mean and standard deviation of the first rows' readings. UserError where there is none."""
    values = network.values()
    moments = np.zeros(3)
    for start in range(0, rows, BLOCK):
        block = values[start : min(rows, start + BLOCK)].astype(np.float64)
        there = block[~np.isnan(block)]
        moments += len(there), there.sum(), np.square(there).sum()
    if not moments[0]:
        raise UserError("all readings of the training part are missing: look at data.options.missing")
    mean = moments[1] / moments[0]
    variance = moments[2] / moments[0] - mean**2
    return float(mean), float(variance**0.5) if variance > 1e-12 else 1.0


# What a prediction is worth.


def masked_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over samples of the mean absolute error of a sample's readings that are there."""
    predicted_NHS, there_NHS = model(batch), ~batch["targets"].isnan()
    require_shape(predicted_NHS, batch["targets"])
    errors_NHS = torch.where(there_NHS, (predicted_NHS - batch["targets"].nan_to_num()).abs(), 0.0)
    return (errors_NHS.sum((1, 2)) / there_NHS.sum((1, 2)).clamp(min=1)).mean()


def horizon_sums(model: nn.Module, batch: Batch, minutes: int) -> dict[str, float]:
    """Errors with their counts, as NAME and NAME_count: of all horizons, and of those that are told apart."""
    predicted_NHS, horizon = model(batch), batch["targets"].shape[1]
    parts = {"": slice(None)}
    for told in TOLD_MINUTES:
        if told % minutes == 0 and told // minutes <= horizon:
            parts[f"_{told}min"] = slice(told // minutes - 1, told // minutes)
    sums: dict[str, float] = {}
    for name, metric in {"mae": MAE(math.nan, 1), "rmse": RMSE(math.nan, 1), "mape": MAPE(math.nan, 1)}.items():
        metric.update(predicted_NHS, batch["targets"])
        total_H, count_H = metric.total.cpu(), metric.count.cpu()
        for part, horizons in parts.items():
            sums[f"{name}{part}"] = total_H[horizons].sum().item()
            sums[f"{name}{part}_count"] = count_H[horizons].sum().item()
    return sums


def horizon_errors(sums: dict[str, float]) -> dict[str, float]:
    """MAE and RMSE in the readings' units, MAPE in %: means over the readings that are there; nan where none is."""
    found = {}
    for name in [name for name in sums if f"{name}_count" in sums]:
        count = sums[f"{name}_count"]
        mean = sums[name] / count if count else math.nan
        found[name] = mean**0.5 if name.startswith("rmse") else mean
    return found


def predicted_rows(model: nn.Module, batch: Batch, network: Network) -> dict[str, Any]:
    """A row for each sensor and horizon of each sample."""
    predicted_NHS = model(batch).float().cpu()
    samples, horizon, _ = predicted_NHS.shape
    rows_NH = batch["row"].cpu().numpy()[:, None] + np.arange(horizon)
    times_NH = network.start + rows_NH * np.timedelta64(network.minutes, "m")
    hours_NH = (times_NH - times_NH.astype("datetime64[D]")) // np.timedelta64(1, "h")

    def spread(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values, predicted_NHS.shape).flatten()

    names_S = np.array(network.names)
    if all(name.isdecimal() and len(name) < 19 for name in network.names):
        names_S = names_S.astype(np.int64)
    places = {}
    if network.places_S2 is not None:
        longitudes, latitudes = network.places_S2.T
        places = {"longitude": spread(longitudes), "latitude": spread(latitudes)}
    return {
        "sensor": np.tile(names_S, samples * horizon),
        "time": spread(times_NH[:, :, None]),
        "minutes_ahead": spread(network.minutes * np.arange(1, horizon + 1)[:, None]),
        "hour": spread(hours_NH[:, :, None]),
        **places,
        "actual": batch["targets"].cpu().flatten().numpy(),
        "predicted": predicted_NHS.flatten().numpy(),
    }


# Naive predictors.


class LastValue(nn.Module):
    """What a sensor has read last, for all horizons; `mean` where its window has nothing."""

    mean: torch.Tensor

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, batch: Batch) -> torch.Tensor:
        last_NS = self.mean.to(batch["values"].dtype).expand(batch["values"][:, 0].shape)
        for values_NS in batch["values"].unbind(1):
            last_NS = torch.where(values_NS.isnan(), last_NS, values_NS)
        return last_NS[:, None].expand(batch["targets"].shape)


class HistoricAverage(nn.Module):
    """The mean of a sensor's readings at this time of the week, in the training part; its mean at this time of the day
    where there is none, and of all its readings where there is none of these either."""

    table_7DS: torch.Tensor

    def __init__(self, table_7DS: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table_7DS", table_7DS)

    @classmethod
    def of(cls, network: Network, rows: int) -> HistoricAverage:
        """Of the first rows."""
        slots = -(-DAY_MINUTES // network.minutes)
        values = network.values()
        sums, counts = (np.zeros((7, slots, values.shape[1])) for _ in range(2))
        for start in range(0, rows, BLOCK):
            block = values[start : min(rows, start + BLOCK)].astype(np.float64)
            day_time, weekday = network.day_times(np.arange(start, start + len(block)))
            at = weekday, (day_time * slots + 0.5).astype(int) % slots
            np.add.at(sums, at, np.nan_to_num(block))
            np.add.at(counts, at, ~np.isnan(block))
        table = np.full(sums.shape, np.nan)
        for axes in ((), (0,), (0, 1), (0, 1, 2)):  # from the finest mean that there is
            total, count = (each.sum(axes, keepdims=True) for each in (sums, counts))
            mean = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
            table = np.where(np.isnan(table), mean, table)
        return cls(torch.from_numpy(table.astype(np.float32)))

    def forward(self, batch: Batch) -> torch.Tensor:
        slots = self.table_7DS.shape[1]
        slots_NH = (batch["future_day_time"] * slots + 0.5).long() % slots
        found: torch.Tensor = self.table_7DS[batch["future_weekday"], slots_NH]
        return found
