"""What anybody could predict of a sensor without a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hetsync.data.sets.sensor_network import BLOCK, DAY_MINUTES, Batch, Network


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
