"""Layers that the image models share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

AUXILIARY_CHANNELS = (128, 768)


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` that also trains on a single value a channel.

    A slice of one sample has that where its feature map is 1×1 (auxiliary heads, deep layers of small images).
    One value has no variance and PyTorch refuses it; here the running statistics normalise it, unchanged.
    """

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        if self.training and features_NCHW.numel() == self.num_features:
            mean, variance = self.running_mean, self.running_var
            return functional.batch_norm(features_NCHW, mean, variance, self.weight, self.bias, eps=self.eps)
        return super().forward(features_NCHW)


class AuxiliaryHead(nn.Module):
    """A classifier on an intermediate feature map, used in training only (Szegedy et al. 2015, section 4).

    (N, inputs, H, W) to scores (N, classes). The papers pool to a map of `map_size` pixels a side, 5×5 at stride
    3, and take it in with one convolution as large. A feature map too small for that is pooled adaptively, what
    remains of a larger one is averaged, so that the weights fit every image size.

    Args:
        inputs: Channels of the feature map.
        classes: Classes to score.
        map_size: Side of the pooled map in pixels.
        width: Factor on the head's channels.
    """

    def __init__(self, inputs: int, classes: int, map_size: int, width: float = 1.0) -> None:
        super().__init__()
        self.map_size = map_size
        squeezed, hidden = (scaled(channels, width) for channels in AUXILIARY_CHANNELS)
        self.features = nn.Sequential(
            nn.Conv2d(inputs, squeezed, 1, bias=False),
            BatchNorm2d(squeezed, eps=1e-3),
            nn.ReLU(inplace=True),
            nn.Conv2d(squeezed, hidden, map_size, bias=False),
            BatchNorm2d(hidden, eps=1e-3),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        rectified = functional.relu(features_NCHW)
        if min(rectified.shape[2:]) >= 3 * self.map_size + 2:
            pooled = functional.avg_pool2d(rectified, 5, stride=3)
        else:
            pooled = functional.adaptive_avg_pool2d(rectified, self.map_size)
        scores: torch.Tensor = self.classifier(self.features(pooled).mean((2, 3)))
        return scores


def scaled(channels: int, width: float) -> int:
    """Channels at a width factor; at least 4, so that no layer is lost."""
    return max(4, round(channels * width))


def initialise(model: nn.Module) -> None:
    """Convolutions with the variance of He et al. 2015, which rectified features keep over depth."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
