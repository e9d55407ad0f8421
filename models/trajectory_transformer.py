"""A transformer over a trip's points: the baseline a practitioner would try today.

A pre-norm encoder (Xiong et al., ICML 2020) reads the points after a class token (Devlin et al., NAACL 2019) that
is made of what is known of the trip as a whole; the class token's output is the logarithm of the travel time.
Batches are those of hetsync.data.sets.trips: N trips of up to T points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hetsync.data.sets.trips import Batch, absolute_percentage_errors
from hetsync.errors import UserError
from hetsync.models.deeptte import MINUTES, Scales
from hetsync.models.limits import require, require_count

HARMONICS = 4  # of the day, so that the start time is smooth and midnight no edge
LONGEST_WAVE = 10_000.0  # of the positional encoding (Vaswani et al., NeurIPS 2017)


class TrajectoryTransformer(nn.Module):
    """Batch of trips to seconds of shape (N,), trained on their absolute percentage error.

    Padded points are masked, so a prediction does not depend on the other trips. `time_gap` is not used.

    Args:
        normalisation: (mean, standard deviation) by name: lngs, lats, dist_gap, dist, log_time.
        drivers: Rows of the driver table; ids beyond share them (id modulo rows).
        driver_size: Width of the driver embedding; 0 leaves the driver out.
        width: Of the tokens; even, and a multiple of `heads`.
        layers: Of the encoder.
        heads: Of its attention.
        dropout: In the encoder.
    """

    def __init__(
        self,
        normalisation: Mapping[str, Sequence[float]] | None = None,
        drivers: int = 24_000,
        driver_size: int = 16,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        for option, count, least in (("drivers", drivers, 1), ("driver_size", driver_size, 0), ("layers", layers, 1)):
            require_count(option, count, least)
        require_count("heads", heads)
        require("dropout", dropout, 0, 1)
        if width < 2 or width % 2 or width % heads:
            raise UserError(f"model.options.width is {width}: it must be even and a multiple of heads, {heads}")
        self._scales = Scales(normalisation)
        self._width = width
        self.driver = nn.Embedding(drivers, driver_size)
        self.week = nn.Embedding(7, 4)
        self.trip = nn.Linear(driver_size + 4 + 2 * HARMONICS + 1, width)
        self.point = nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.encoder = Encoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)
        for table in (self.driver, self.week):  # what no training trip had stays near none in particular
            nn.init.normal_(table.weight, std=0.01)
        nn.init.zeros_(self.head.weight)  # training starts from the typical trip
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> torch.Tensor:
        points_NTC = self._points(batch)
        tokens_NSC = torch.cat([self._trip(batch)[:, None], points_NTC], 1)
        steps = torch.arange(points_NTC.shape[1], device=points_NTC.device)
        padding_NT = steps >= batch["lengths"][:, None]
        padding_NS = torch.cat([torch.zeros_like(padding_NT[:, :1]), padding_NT], 1)
        outputs_NSC = self.encoder(tokens_NSC, padding_NS)
        return self._scales.undo("log_time", self.head(outputs_NSC[:, 0]).squeeze(1)).exp()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean over the trips of the absolute percentage error."""
        return absolute_percentage_errors(self(batch), batch).mean()

    def _trip(self, batch: Batch) -> torch.Tensor:
        """(N, width): the class token."""
        harmonics = torch.arange(1, HARMONICS + 1, device=batch["minute"].device)
        angles_NH = 2 * math.pi / MINUTES * batch["minute"][:, None] * harmonics
        attributes = (
            self.driver(batch["driver"] % self.driver.num_embeddings),
            self.week(batch["week"]),
            angles_NH.sin(),
            angles_NH.cos(),
            self._scales("dist", batch["dist"])[:, None],
        )
        token_NC: torch.Tensor = self.trip(torch.cat(attributes, 1))
        return token_NC

    def _points(self, batch: Batch) -> torch.Tensor:
        """(N, T, width): coordinates, state, distance from the point before and from the start, and position."""
        before_NT = torch.cat([batch["dist_gap"][:, :1], batch["dist_gap"][:, :-1]], 1)
        features = (
            self._scales("lngs", batch["lngs"]),
            self._scales("lats", batch["lats"]),
            batch["states"],
            self._scales("dist_gap", batch["dist_gap"] - before_NT),
            self._scales("dist", batch["dist_gap"]),
        )
        points_NTC = self.point(torch.stack(features, 2))
        encoded: torch.Tensor = points_NTC + self._positions(points_NTC)
        return encoded

    def _positions(self, points_NTC: torch.Tensor) -> torch.Tensor:
        """(T, width): sines and cosines of the point's number, in waves from 2π to 2π·LONGEST_WAVE points."""
        exponents = torch.arange(0, self._width, 2, device=points_NTC.device) / self._width
        steps = torch.arange(points_NTC.shape[1], device=points_NTC.device)
        angles_TH = steps[:, None] / LONGEST_WAVE**exponents
        return torch.cat([angles_TH.sin(), angles_TH.cos()], 1).to(points_NTC.dtype)


class Encoder(nn.TransformerEncoder):
    """Its layers one after the other, and nothing besides.

    (N, S, C), and where there is padding (N, S), to (N, S, C).
    """

    def forward(self, tokens_NSC: torch.Tensor, padding_NS: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for layer in self.layers:
            tokens_NSC = layer(tokens_NSC, src_key_padding_mask=padding_NS)
        outputs_NSC: torch.Tensor = self.norm(tokens_NSC)
        return outputs_NSC
