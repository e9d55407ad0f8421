"""Travel times of trips: batches, losses, metrics and constants, whatever the trips' source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hetsync.data import Data
from hetsync.data.sets.trip_table import BLOCK, POINT, TripTable, validate
from hetsync.doubles import doubled
from hetsync.errors import UserError

__all__ = ["ConstantSpeed", "TripTable", "split_by_date", "trip_data", "validate"]

DRIVERS = 24_000  # rows of DeepTTE's driver table; ids beyond share them

Batch = dict[str, torch.Tensor]
Item = tuple[Any, np.ndarray]


def trip_data(train: TripTable, test: TripTable, local_weight: float = 0.3) -> Data:
    """Travel-time estimation: batches of trips, the model's own loss, metrics of the whole trip.

    A batch is a dictionary: `driver`, `week`, `minute` (of the day), `dist` (km), `time` (seconds, the label) and
    `lengths` (points) of shape (N,); `lngs`, `lats`, `states`, `dist_gap` (cumulative km) and `time_gap`
    (cumulative seconds, a label too) of shape (N, T). Short trips are padded with their last point.

    A model returns seconds of shape (N,); its `loss(batch)`, if any, is the training loss, else the MAPE is.

    Args:
        train: Trips to train on; all constants come from them.
        test: Trips to evaluate on.
        local_weight: Weight of the windows' loss in models that have one (DeepTTE's α).
    """
    drivers = int(train.trips["driver"].max(initial=0)) + 1
    return Data(
        Trips(train),
        Trips(test),
        loss=travel_time_loss,
        metrics=travel_time_sums,
        report=travel_time_report,
        rows=trip_rows,
        baselines={"constant speed": ConstantSpeed(train)},
        collate=collate,
        costs=train.trips["length"].tolist(),
        model_options={
            "normalisation": normalisation(train),
            "mean_points": float(train.trips["length"].mean()) if len(train) else 1.0,
            "drivers": min(drivers, DRIVERS),
            "local_weight": local_weight,
        },
    )


class Trips(Dataset[Item]):
    """Items are (row of the trip, its points)."""

    def __init__(self, table: TripTable) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Item:
        return self.table.trips[index], self.table.path(index)


def collate(items: Sequence[Item]) -> Batch:
    """Items to the batch that `trip_data` describes."""
    rows = np.stack([row for row, _ in items])
    lengths = torch.tensor([len(path) for _, path in items])
    flat = torch.from_numpy(np.concatenate([path for _, path in items]))
    steps = torch.arange(int(lengths.max()))
    starts = lengths.cumsum(0) - lengths
    points_NTC = flat[starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)]
    batch = {key: torch.from_numpy(rows[key].astype(np.int64)) for key in ("driver", "week", "minute")}
    batch |= {key: torch.from_numpy(rows[key].copy()) for key in ("dist", "time")}
    batch |= {key: points_NTC[:, :, column].contiguous() for column, key in enumerate(POINT)}
    return {**batch, "lengths": lengths}


def absolute_percentage_errors(seconds_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """|error| / true time of each trip, as a fraction."""
    return (seconds_N - batch["time"]).abs() / batch["time"]


def travel_time_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss, a mean over the batch's trips; MAPE for a model that has none."""
    own = getattr(model, "loss", None)
    loss: torch.Tensor = own(batch) if own else absolute_percentage_errors(model(batch), batch).mean()
    return loss


def travel_time_sums(model: torch.nn.Module, batch: Batch) -> dict[str, float]:
    """Absolute percentage, absolute and squared errors of the whole trips, summed."""
    seconds_N = model(batch)
    errors = doubled(seconds_N - batch["time"])
    return {
        "mape": doubled(absolute_percentage_errors(seconds_N, batch)).sum().item(),
        "mae": errors.abs().sum().item(),
        "rmse": errors.square().sum().item(),
    }


def trip_rows(model: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    """A row a trip: its seconds, and from where and when it goes how far."""
    first = {name: batch[key][:, 0] for name, key in (("longitude", "lngs"), ("latitude", "lats"))}
    return {
        "driver": batch["driver"],
        "weekday": batch["week"],
        "minute": batch["minute"],
        "hour": batch["minute"] // 60,
        "kilometres": batch["dist"],
        **first,
        "actual": batch["time"],
        "predicted": model(batch),
    }


def travel_time_report(sums: dict[str, float]) -> dict[str, float]:
    """MAPE in %, MAE and RMSE in seconds."""
    samples = max(1.0, sums["samples"])
    mape, mae, square = (sums.get(name, 0.0) / samples for name in ("mape", "mae", "rmse"))
    return {"mape": 100 * mape, "mae": mae, "rmse": square**0.5}


def split_by_date(table: TripTable, test_fraction: float) -> tuple[TripTable, TripTable]:
    """(train, test): the last whole days, whose share of the trips is nearest to `test_fraction`, are the test set.

    Raises:
        UserError: `test_fraction` is no fraction, or all trips are of one day.
    """
    if not (isinstance(test_fraction, float) and 0 < test_fraction < 1):
        raise UserError(f"data.options.test_fraction is {test_fraction}: it must be above 0 and below 1")
    dates, trips = np.unique(table.trips["date"], return_counts=True)
    if len(dates) < 2:
        raise UserError(f"all {len(table)} trips are of one day: a split by date needs data of two days or more")
    later = trips[::-1].cumsum()[::-1] / len(table)  # share of each date and those after it
    first = dates[1 + np.abs(later[1:] - test_fraction).argmin()]
    is_test = table.trips["date"] >= first
    return table.select(np.flatnonzero(~is_test)), table.select(np.flatnonzero(is_test))


def normalisation(table: TripTable) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of what models normalise; `_gap`s are of neighbouring points, log_time of ln(s)."""
    sums: dict[str, np.ndarray] = {}
    for start in range(0, len(table), BLOCK):
        for name, values in _values(table.select(slice(start, start + BLOCK))).items():
            moments = np.array([len(values), values.sum(), np.square(values).sum()])
            sums[name] = sums[name] + moments if name in sums else moments
    return {name: _mean_and_deviation(*three) for name, three in sums.items()}


def _values(table: TripTable) -> dict[str, np.ndarray]:
    points = dict(zip(POINT, table.flat_points().T.astype(np.float64), strict=True))
    trips = {name: table.trips[name].astype(np.float64) for name in ("dist", "time")}
    same_trip = np.ones(len(points["lngs"]) - 1, bool)
    same_trip[table.trips["length"].cumsum()[:-1] - 1] = False
    gaps = {name: np.diff(points[name])[same_trip] for name in ("time_gap", "dist_gap")}
    return {"lngs": points["lngs"], "lats": points["lats"], **gaps, **trips, "log_time": np.log(trips["time"])}


def _mean_and_deviation(count: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / count
    variance = squares / count - mean**2
    return float(mean), float(variance**0.5) if variance > 1e-12 else 1.0


class ConstantSpeed(torch.nn.Module):
    """The simplest predictor: the mean speed of the training trips, for every trip."""

    def __init__(self, train: TripTable) -> None:
        super().__init__()
        seconds, km = (float(train.trips[name].sum(dtype=np.float64)) for name in ("time", "dist"))
        self.seconds_a_km = seconds / max(km, 1e-9)

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch["dist"] * self.seconds_a_km
