"""Windows of a sensor network as a recipe's data: their parts, constants, loss, errors by horizon and rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from hetsync.data import Data
from hetsync.data.sets.parts import require_counts, require_shape, split
from hetsync.data.sets.sensor_baselines import HistoricAverage, LastValue
from hetsync.data.sets.sensor_network import BLOCK, Batch, Network, SensorWindows
from hetsync.errors import UserError
from hetsync.metrics import MAE, MAPE, RMSE

TOLD_MINUTES = (15, 30, 60)  # horizons whose errors are told apart, as the field does


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
