"""A small convolutional network for 8×8 images, trained in seconds."""

from __future__ import annotations

import torch
from torch import nn


class DigitsCNN(nn.Module):
    """(N, 1, 8, 8) to (N, classes). With `batch_norm`, a normalisation after each convolution."""

    def __init__(self, classes: int = 10, channels: int = 16, batch_norm: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *self._block(1, channels, batch_norm),
            *self._block(channels, 2 * channels, batch_norm),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * channels, 64), nn.ReLU(), nn.Linear(64, classes))

    @staticmethod
    def _block(inputs: int, outputs: int, batch_norm: bool) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU()]

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(images_NCHW))
        return scores
