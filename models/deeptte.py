"""DeepTTE, a travel-time model of whole paths (Wang et al., "When Will You Arrive?", AAAI 2018).

Batches are those of hetsync.data.sets.trips: N trips of up to T points. A window is `kernel_size` neighbouring
points, W of them a trip. A trip shorter than the kernel is one window that repeats its last point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import elu, leaky_relu, softmax

from hetsync.data.sets.trips import Batch, absolute_percentage_errors
from hetsync.errors import UserError
from hetsync.models.limits import require, require_count
from hetsync.models.recurrent import Pack, RecurrentLayer, Unpack

EPSILON_SECONDS = 10.0  # keeps short windows from ruling the local loss
MINUTES = 1440  # of a day
PATH = ("lngs", "lats", "states", "dist_gap", "time_gap")


class Scales:
    """Mean and standard deviation of each quantity; 0 and 1 for those not given.

    Not buffers: what is constant has no place in the averages over ranks.
    """

    def __init__(self, normalisation: Mapping[str, Sequence[float]] | None) -> None:
        self._constants = dict(normalisation or {})

    def __call__(self, name: str, values: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Normalised values; of sums over `steps` neighbours, whose scale is so many times that of one."""
        mean, deviation = self._constants.get(name, (0.0, 1.0))
        return (values - steps * mean) / (steps * deviation)

    def undo(self, name: str, values: torch.Tensor, steps: int = 1) -> torch.Tensor:
        mean, deviation = self._constants.get(name, (0.0, 1.0))
        return values * (steps * deviation) + steps * mean


class Attributes(nn.Module):
    """Batch to (N, size): embeddings of driver, weekday and start, and the path's length.

    Driver ids beyond the table share its rows (id modulo rows). What no training trip had, a driver or a weekday,
    keeps its initial row, which is near zero: close to none in particular.
    """

    def __init__(self, scales: Scales, drivers: int, driver_size: int, slot_minutes: int) -> None:
        super().__init__()
        self._scales = scales
        self._slot_minutes = slot_minutes
        self.driver = nn.Embedding(drivers, driver_size)
        self.week = nn.Embedding(7, 3)
        self.start = nn.Embedding(-(-MINUTES // slot_minutes), 8)
        self.size = driver_size + 3 + 8 + 1

    def forward(self, batch: Batch) -> torch.Tensor:
        embedded = (
            self.driver(batch["driver"] % self.driver.num_embeddings),
            self.week(batch["week"]),
            self.start(batch["minute"] // self._slot_minutes),
        )
        return torch.cat([*embedded, self._scales("dist", batch["dist"])[:, None]], 1)


class GeoConv(nn.Module):
    """Path to (N, W, filters + 1): a convolution over embedded points, and each window's distance."""

    def __init__(self, scales: Scales, kernel_size: int, filters: int) -> None:
        super().__init__()
        self._scales = scales
        self.state = nn.Embedding(2, 2)
        self.point = nn.Linear(4, 16)
        self.convolution = nn.Conv1d(16, filters, kernel_size)

    def forward(self, path: Batch) -> torch.Tensor:
        coordinates = [self._scales(name, path[name])[:, :, None] for name in ("lngs", "lats")]
        points_NTC = torch.tanh(self.point(torch.cat([*coordinates, self.state(path["states"].long())], 2)))
        windows_NWC = elu(self.convolution(points_NTC.transpose(1, 2))).transpose(1, 2)
        steps = self.convolution.kernel_size[0] - 1
        distances_NW = self._scales("dist_gap", over_windows(path["dist_gap"], steps), steps)
        return torch.cat([windows_NWC, distances_NW[:, :, None]], 2)


class Path(nn.Module):
    """Batch to paths of at least a window: where all are shorter, with their last point repeated."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, batch: Batch) -> Batch:
        missing = max(0, self.least - batch["lngs"].shape[1])
        return {name: torch.cat([batch[name], batch[name][:, -1:].expand(-1, missing)], 1) for name in PATH}


class EntireHead(nn.Module):
    """Features of the whole path to its normalised time: residual layers of one width."""

    def __init__(self, inputs: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.residuals = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features_NC: torch.Tensor) -> torch.Tensor:
        hidden_NC = leaky_relu(self.first(features_NC))
        for layer in self.residuals:
            hidden_NC = hidden_NC + leaky_relu(layer(self.dropout(hidden_NC)))
        normalised: torch.Tensor = self.last(self.dropout(hidden_NC)).squeeze(1)
        return normalised


class DeepTTE(nn.Module):
    """Batch of trips to seconds of shape (N,), while training with those of their windows. Defaults are the paper's.

    A trip's prediction does not depend on padding or on the other trips: pooling sees its own windows only, and the
    LSTM runs over packed sequences. `time_gap` is used by the loss alone.

    Args:
        normalisation: (mean, standard deviation) by name: lngs, lats, dist_gap, time_gap, dist, time.
        mean_points: Mean points of the training trips, which makes the local loss a mean over trips.
        drivers: Rows of the driver table.
        driver_size: Width of the driver embedding; 0 leaves the driver out.
        slot_minutes: Start times within so many minutes share an embedding.
        kernel_size: Points of a window.
        filters: Of the geo-convolution.
        hidden_size: Of the LSTM and of the entire-path head.
        pooling: attention (by the attributes) or mean.
        local_weight: α, weight of the windows' loss; 1 − α is the entire path's.
        dropout: On the LSTM's inputs, between its layers, on the pooled path and in the entire-path head.
    """

    def __init__(
        self,
        normalisation: Mapping[str, Sequence[float]] | None = None,
        mean_points: float = 36.0,
        drivers: int = 24_000,
        driver_size: int = 16,
        slot_minutes: int = 1,
        kernel_size: int = 3,
        filters: int = 32,
        hidden_size: int = 128,
        pooling: Literal["attention", "mean"] = "attention",
        local_weight: float = 0.3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if pooling not in ("attention", "mean"):
            raise UserError(f"model.options.pooling is {pooling}: use attention or mean")
        counts = {"drivers": drivers, "slot_minutes": slot_minutes, "filters": filters, "hidden_size": hidden_size}
        for option, count, least in (*((*each, 1) for each in counts.items()), ("driver_size", driver_size, 0)):
            require_count(option, count, least)
        require_count("kernel_size", kernel_size, 2)
        require("dropout", dropout, 0, 1)
        require("local_weight", local_weight, 0, 1)
        self._scales = Scales(normalisation)
        self._steps = kernel_size - 1
        self._mean_windows = max(1.0, mean_points - kernel_size + 1)
        self._local_weight = local_weight
        self.path = Path(kernel_size)
        self.attributes = Attributes(self._scales, drivers, driver_size, slot_minutes)
        self.geo_conv = GeoConv(self._scales, kernel_size, filters)
        inputs = filters + 1 + self.attributes.size
        self.pack, self.unpack = Pack(), Unpack()
        self.lstm = RecurrentLayer(inputs, hidden_size)
        self.upper_lstm = RecurrentLayer(hidden_size, hidden_size, dropout)
        self.query = nn.Linear(self.attributes.size, hidden_size) if pooling == "attention" else None
        self.entire = EntireHead(hidden_size + self.attributes.size, hidden_size, 3, dropout)
        self.local = nn.Sequential(
            nn.Linear(hidden_size, 64), nn.LeakyReLU(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 1)
        )
        self.dropout = nn.Dropout(dropout)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if ".bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_uniform_(parameter)
        for table in (self.attributes.driver, self.attributes.week, self.attributes.start):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seconds (N,); while training also the windows' seconds (N, W), and which of them are no padding (N, W)."""
        attributes_NC = self.attributes(batch)
        windows_NWC = self.geo_conv(self.path(batch))
        repeated_NWC = attributes_NC[:, None].expand(-1, windows_NWC.shape[1], -1)
        windows_N = (batch["lengths"] - self._steps).clamp(min=1)
        hidden_NWC = self._recur(self.dropout(torch.cat([windows_NWC, repeated_NWC], 2)), windows_N)
        real_NW = torch.arange(hidden_NWC.shape[1], device=windows_N.device) < windows_N[:, None]
        pooled_NC = self.dropout(self._pool(hidden_NWC, real_NW, attributes_NC))
        seconds_N = self._scales.undo("time", self.entire(torch.cat([attributes_NC, pooled_NC], 1)))
        if not self.training:
            return seconds_N
        return seconds_N, self._scales.undo("time_gap", self.local(hidden_NWC).squeeze(2), self._steps), real_NW

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean over the trips of (1 − α)·APE of the path + α·the windows' APEs, summed over the trip.

        The sum is divided by a constant, the windows of the mean training trip, not by the batch's windows. Of a model
        that is not training, which predicts no windows, the mean APE of the paths.
        """
        predicted = self(batch)
        if isinstance(predicted, torch.Tensor):
            return absolute_percentage_errors(predicted, batch).mean()
        seconds_N, predicted_NW, real_NW = predicted
        times_NW = over_windows(self.path(batch)["time_gap"], self._steps)
        errors_NW = (predicted_NW - times_NW).abs() / (times_NW + EPSILON_SECONDS)
        local_N = (errors_NW * real_NW).sum(1) / self._mean_windows
        entire_N = absolute_percentage_errors(seconds_N, batch)
        return ((1 - self._local_weight) * entire_N + self._local_weight * local_N).mean()

    def _recur(self, inputs_NWC: torch.Tensor, windows_N: torch.Tensor) -> torch.Tensor:
        """Packed: the work follows the windows that there are, padding costs nothing."""
        elements, packing = self.pack(inputs_NWC, windows_N)
        below, _ = self.lstm(elements, packing)
        hidden, _ = self.upper_lstm(below, packing)
        hidden_NWC: torch.Tensor = self.unpack(hidden, packing, inputs_NWC.shape[1])
        return hidden_NWC

    def _pool(self, hidden_NWC: torch.Tensor, real_NW: torch.Tensor, attributes_NC: torch.Tensor) -> torch.Tensor:
        if self.query is None:
            weights_NW = (real_NW / real_NW.sum(1, keepdim=True)).to(hidden_NWC.dtype)
        else:
            query_NC = torch.tanh(self.query(attributes_NC))
            scores_NW = torch.einsum("nwc,nc->nw", hidden_NWC, query_NC)
            weights_NW = softmax(scores_NW.masked_fill(~real_NW, -torch.inf), 1)
        return torch.einsum("nwc,nw->nc", hidden_NWC, weights_NW)


def over_windows(cumulative_NT: torch.Tensor, steps: int) -> torch.Tensor:
    """(N, T) cumulative values to what each window of `steps` steps adds, (N, W)."""
    return cumulative_NT[:, steps:] - cumulative_NT[:, :-steps]
