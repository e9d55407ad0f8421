"""Frames to be predicted from those before them: parts in order, errors a pixel, and the naive predictor.

A batch is a dictionary: `frames` (N, T, 1, Y, X), the last T frames, whose values are about [0, 1], and `targets`
(N, H, 1, Y, X), the H frames to be predicted. A model returns predictions (N, H, 1, Y, X).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from hetsync.data import Data
from hetsync.data.sets.parts import Parts, require_shape
from hetsync.doubles import doubled

Batch = dict[str, torch.Tensor]


def frame_data(
    samples: Dataset[Any], parts: Parts, horizon: int, baselines: Mapping[str, nn.Module] | None = None
) -> Data:
    """Parts of the samples as a recipe's data.

    Args:
        samples: Of `frames` and `targets`.
        parts: Numbers of the samples.
        horizon: Frames that are predicted (H).
        baselines: More predictors to compare with, beside the last frame.
    """
    train, validation, test = (Subset(samples, part) for part in parts)
    return Data(
        train,
        test,
        loss=frame_loss,
        metrics=frame_sums,
        validation=validation,
        rows=frame_rows,
        baselines={"last frame": LastFrame(), **(baselines or {})},
        model_options={"horizon": horizon},
    )


# What a prediction is worth.


def frame_errors(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared and absolute errors (N, H): means over each frame's pixels."""
    predicted = model(batch)
    require_shape(predicted, batch["targets"])
    errors = (predicted - batch["targets"]).float()
    return errors.square().mean((2, 3, 4)), errors.abs().mean((2, 3, 4))


def frame_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over samples of a sample's mean squared error."""
    squared_NH, _ = frame_errors(model, batch)
    return squared_NH.mean()


def frame_sums(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Mean squared and mean absolute errors a pixel, of all predicted frames, and of the first and the last; summed
    over samples."""
    squared_NH, absolute_NH = (doubled(each) for each in frame_errors(model, batch))
    found = {
        "mse": squared_NH.mean(1),
        "mae": absolute_NH.mean(1),
        "mse_first": squared_NH[:, 0],
        "mse_last": squared_NH[:, -1],
    }
    return {name: each_N.sum().item() for name, each_N in found.items()}


def frame_rows(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """A row for each predicted frame of each sample, with the root of its mean squared error."""
    squared_NH, _ = frame_errors(model, batch)
    samples, horizon = squared_NH.shape
    return {"steps_ahead": torch.arange(1, horizon + 1).repeat(samples), "error": squared_NH.sqrt().flatten()}


class LastFrame(nn.Module):
    """Nothing moves any more."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch["frames"][:, -1:].expand(batch["targets"].shape)
