"""What models of sensor networks share: batches, the scale of readings, and diffusion over a graph of roads.

Batches are those of hetsync.data.sets.sensor_network. Models return predictions (N, H, S), in the sensors' own units.

Inside, the sensors' axis comes first and the channels' last: a diffusion step is one product of matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import one_hot

from hetsync.data.sets.sensor_network import Batch
from hetsync.errors import UserError, brief
from hetsync.models.limits import require, require_count

Adjacency = Sequence[Sequence[float]] | np.ndarray | torch.Tensor

DAYS = 7
LARGEST = sys.float_info.max


class Readings:
    """From readings to what layers read, and back, by mean and standard deviation of the training readings.

    Not buffers: what is constant has no place in the averages over ranks.

    Attributes:
        features: Of a sensor at a step: the reading, normalised, and the time of the day; with `week` also which of the
            seven days it is.
    """

    def __init__(self, mean: float, deviation: float, week: bool) -> None:
        require("mean", mean, -LARGEST, LARGEST)
        require("deviation", deviation, 0, LARGEST)
        if deviation == 0:
            raise UserError(f"model.options.deviation is {deviation}: it must be a number above 0")
        self._mean, self._deviation, self._week = mean, deviation, week
        self.features = 2 + (DAYS if week else 0)

    def normalised(self, readings: torch.Tensor) -> torch.Tensor:
        """Of any shape; missing ones stay nan."""
        return (readings - self._mean) / self._deviation

    def undo(self, normalised: torch.Tensor) -> torch.Tensor:
        """Readings: of half precision they would be too coarse."""
        return normalised.to(torch.promote_types(normalised.dtype, torch.float32)) * self._deviation + self._mean

    def read(self, batch: Batch) -> torch.Tensor:
        """(N, T, S, features): what is missing is as the mean."""
        values_NTS = self.normalised(batch["values"])
        values_NTS = torch.where(values_NTS.isnan(), 0, values_NTS)
        times_NTC = batch["day_time"][:, :, None]
        if self._week:
            times_NTC = torch.cat([times_NTC, one_hot(batch["weekday"], DAYS).to(times_NTC.dtype)], 2)
        times_NTSC = times_NTC[:, :, None].expand(*values_NTS.shape, -1)
        return torch.cat([values_NTS[..., None], times_NTSC], 3)


class Walks(nn.Module):
    """To the transition matrices (S, S) of random walks along the roads and against them; to none without a graph.

    They come from the data: no weights, and of no checkpoint.

    Args:
        sensors: S.
        adjacency: (S, S), weights [i, j] of the road from i to j.
        sparse: Whether they are sparse matrices.
    """

    def __init__(self, sensors: int, adjacency: Adjacency | None, sparse: bool) -> None:
        super().__init__()
        if adjacency is None:
            return
        weights_SS = _checked(sensors, adjacency)
        for name, walk_SS in (("along", transitions(weights_SS)), ("against", transitions(weights_SS.T))):
            self.register_buffer(name, walk_SS.to_sparse() if sparse else walk_SS, persistent=False)

    def forward(self) -> list[torch.Tensor]:
        return list(self.buffers())


class DiffusionConvolution(nn.Module):
    """(S, ..., inputs) to (S, ..., outputs): a linear map of what is at a sensor and of what diffuses there.

    Args:
        inputs: Channels.
        outputs: Channels.
        supports: How many matrices it diffuses by.
        order: Steps of the diffusion.
        bias: Of the linear map.
    """

    def __init__(self, inputs: int, outputs: int, supports: int, order: int, bias: bool = True) -> None:
        super().__init__()
        self._order = order
        self.mix = nn.Linear(inputs * (1 + supports * order), outputs, bias)

    def forward(self, nodes: torch.Tensor, supports: Sequence[torch.Tensor]) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(diffuse(nodes, supports, self._order))
        return mixed


def diffuse(nodes: torch.Tensor, supports: Sequence[torch.Tensor], order: int) -> torch.Tensor:
    """(S, ..., C) to (S, ..., C·(1 + supports·order)): as it is, and after 1 to `order` steps by each support.

    A step of support A makes Σ_j A[i, j]·x[j] of x[i].
    """
    diffused = [nodes]
    for support_SS in supports:
        moved_SM = nodes.flatten(1)
        for _ in range(order):
            moved_SM = _step(support_SS, moved_SM)
            diffused.append(moved_SM.view(nodes.shape))
    return torch.cat(diffused, -1)


def _step(support_SS: torch.Tensor, nodes_SM: torch.Tensor) -> torch.Tensor:
    if not support_SS.is_sparse:
        return support_SS @ nodes_SM
    with torch.autocast(nodes_SM.device.type, enabled=False):  # no product of a sparse matrix has half precision
        return torch.sparse.mm(support_SS, nodes_SM.to(support_SS.dtype))


def transitions(weights_SS: torch.Tensor) -> torch.Tensor:
    """Each row over its sum; a row of zeros, a sensor that no road leaves, stays one."""
    sums_S1 = weights_SS.sum(1, keepdim=True)
    return (weights_SS / torch.where(sums_S1 == 0, 1, sums_S1)).float()


def require_network(sensors: int, horizon: int) -> None:
    """Raise UserError unless both are counts."""
    require_count("sensors", sensors)
    require_count("horizon", horizon)


def _checked(sensors: int, adjacency: Adjacency) -> torch.Tensor:
    try:
        weights_SS = torch.as_tensor(adjacency).detach().to_dense().double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model.options.adjacency is {brief(adjacency)}: it must be rows of numbers") from error
    if weights_SS.shape != (sensors, sensors):
        shape = " × ".join(map(str, weights_SS.shape))
        raise UserError(f"model.options.adjacency is {shape}: with sensors {sensors} it must be {sensors} × {sensors}")
    if not (weights_SS.isfinite() & (weights_SS >= 0)).all():
        raise UserError("model.options.adjacency has weights that are negative or not finite: give 0 where no road is")
    return weights_SS
