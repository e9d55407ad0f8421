"""Graph WaveNet (Wu et al., "Graph WaveNet for Deep Spatial-Temporal Graph Modeling", IJCAI 2019).

Gated convolutions in time, whose dilation doubles within a block, take turns with diffusion over the graph of roads
and over one that the model learns by itself. Batches are those of hetsync.data.sets.sensor_network.

With 207 sensors there are 293,688 weights. The authors' program has 309,400: 8,448 are of convolutions that it makes
and, with a graph, never calls, 7,264 of the last layer's diffusion and norm, whose results nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import pad, relu, softmax

from hetsync.errors import UserError
from hetsync.models.limits import require, require_count
from hetsync.models.sensor_inputs import (
    Adjacency,
    Batch,
    DiffusionConvolution,
    Readings,
    Walks,
    require_network,
)

Norm = Literal["batch", "layer"]


class GraphWaveNet(nn.Module):
    """Batch of sensors' readings to predictions (N, H, S). Defaults are the paper's.

    It reads the last `steps_read` steps, 13 by default, and zeros before a shorter history. With norm "layer", or when
    it is not training, a prediction does not depend on the other samples.

    Args:
        sensors: S, 207 in METR-LA.
        horizon: H, steps to be predicted.
        mean: Of the training readings.
        deviation: Of the training readings.
        adjacency: (S, S), weights [i, j] of the road from i to j; None leaves the learnt graph alone.
        week: Whether it reads the day of the week, too.
        sparse: Whether the given graph is kept as sparse matrices.
        blocks: Of `layers` layers.
        layers: Of a block, with dilations 1, 2, 4, ...
        residual: Channels between layers.
        dilated: Channels of the gated convolutions.
        skip: Channels of what all layers add up to.
        end: Channels before the last map.
        order: Steps of a diffusion.
        embedding: Width of the learnt graph's embeddings.
        dropout: On what diffusion makes.
        norm: batch or layer; of a layer's output, for each channel.
    """

    def __init__(
        self,
        sensors: int = 207,
        horizon: int = 12,
        mean: float = 0.0,
        deviation: float = 1.0,
        adjacency: Adjacency | None = None,
        week: bool = False,
        sparse: bool = False,
        blocks: int = 4,
        layers: int = 2,
        residual: int = 32,
        dilated: int = 32,
        skip: int = 256,
        end: int = 512,
        order: int = 2,
        embedding: int = 10,
        dropout: float = 0.3,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        require_network(sensors, horizon)
        counts = {"blocks": blocks, "layers": layers, "residual": residual, "dilated": dilated, "skip": skip}
        for option, count in {**counts, "end": end, "order": order, "embedding": embedding}.items():
            require_count(option, count)
        require("dropout", dropout, 0, 1)
        if norm not in ("batch", "layer"):
            raise UserError(f"model.options.norm is {norm}: use batch or layer")
        self._readings = Readings(mean, deviation, week)
        self.walks = Walks(sensors, adjacency, sparse)
        self.learnt_walk = LearntWalk(sensors, embedding)
        supports = len(self.walks()) + 1
        dilations = [2**layer for layer in range(layers)] * blocks
        self.steps_read = 1 + sum(dilations)
        self.start = nn.Linear(self._readings.features, residual)
        self.temporal = nn.ModuleList(GatedConvolution(residual, dilated, dilation) for dilation in dilations)
        self.spatial = nn.ModuleList(
            Spatial(DiffusionConvolution(dilated, residual, supports, order), residual, dropout, norm)
            for _ in dilations[1:]  # after the last layer nobody would read it
        )
        self.skips = nn.ModuleList(nn.Linear(dilated, skip) for _ in dilations)
        self.end = nn.Sequential(nn.ReLU(), nn.Linear(skip, end), nn.ReLU(), nn.Linear(end, horizon))

    def forward(self, batch: Batch) -> torch.Tensor:
        nodes_SNTC = self.start(self._read(batch).permute(2, 0, 1, 3))
        supports = [*self.walks(), self.learnt_walk()]
        last_SNC = []  # of each layer at the last step, the only one that predictions come from
        for number, temporal in enumerate(self.temporal):
            gated_SNTC = temporal(nodes_SNTC)
            last_SNC.append(self.skips[number](gated_SNTC[:, :, -1]))
            if number < len(self.spatial):
                nodes_SNTC = self.spatial[number](gated_SNTC, nodes_SNTC, supports)
        normalised_SNH = self.end(torch.stack(last_SNC).sum(0))
        return self._readings.undo(normalised_SNH.permute(1, 2, 0))

    def _read(self, batch: Batch) -> torch.Tensor:
        """(N, steps_read, S, features)"""
        features_NTSC = self._readings.read(batch)[:, -self.steps_read :]
        return pad(features_NTSC, (0, 0, 0, 0, self.steps_read - features_NTSC.shape[1], 0))


class LearntWalk(nn.Module):
    """To the transition matrix (S, S) of a graph that embeddings of its sensors make."""

    def __init__(self, sensors: int, width: int) -> None:
        super().__init__()
        self.source = nn.Parameter(torch.randn(sensors, width))
        self.target = nn.Parameter(torch.randn(sensors, width))

    def forward(self) -> torch.Tensor:
        return softmax(relu(self.source @ self.target.T), 1)


class GatedConvolution(nn.Module):
    """(..., T, inputs) to (..., T − dilation, outputs): of two steps so far apart, tanh and a sigmoid that gates it."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self._dilation = dilation
        self.convolution = nn.Linear(2 * inputs, 2 * outputs)

    def forward(self, nodes_SNTC: torch.Tensor) -> torch.Tensor:
        pairs_SNTC = torch.cat([nodes_SNTC[:, :, : -self._dilation], nodes_SNTC[:, :, self._dilation :]], 3)
        filtered_SNTC, gates_SNTC = self.convolution(pairs_SNTC).chunk(2, 3)
        return torch.tanh(filtered_SNTC) * torch.sigmoid(gates_SNTC)


class Spatial(nn.Module):
    """What a layer's convolution makes, diffused, on top of what came into the layer; normalised."""

    def __init__(self, diffusion: DiffusionConvolution, channels: int, dropout: float, norm: Norm) -> None:
        super().__init__()
        self.diffusion = diffusion
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(channels) if norm == "batch" else nn.LayerNorm(channels)

    def forward(
        self, gated_SNTC: torch.Tensor, before_SNTC: torch.Tensor, supports: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        diffused_SNTC = self.dropout(self.diffusion(gated_SNTC, supports))
        nodes_SNTC = diffused_SNTC + before_SNTC[:, :, -diffused_SNTC.shape[2] :]
        normalised: torch.Tensor = self.norm(nodes_SNTC.flatten(0, 2)).view(nodes_SNTC.shape)
        return normalised
