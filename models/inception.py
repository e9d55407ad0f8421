"""Inception-V3 (Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision").

Layer sizes as in the authors' published weights, which torchvision and Keras count alike: 23,834,568 weights
with 1,000 classes, and 27,161,264 with the auxiliary head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hetsync.errors import UserError
from hetsync.models.image_layers import AuxiliaryHead, BatchNorm2d, initialise, scaled
from hetsync.models.limits import require, require_count

LEAST_IMAGE_SIZE = 75  # pixels a side; smaller ones vanish before the last modules


class _Conv(NamedTuple):
    """A convolution, its normalisation and a ReLU; keeps the map's size unless it has a stride or is `valid`."""

    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    valid: bool = False


class _Pool(NamedTuple):
    """3×3: `average` keeps the map's size, the maximum halves it."""

    average: bool = False


class _Fork(NamedTuple):
    """Branches over the same input, concatenated along channels."""

    branches: tuple[tuple[_Conv | _Pool | _Fork, ...], ...]


_Chain = tuple[_Conv | _Pool | _Fork, ...]


def _fork(*branches: _Chain) -> _Fork:
    return _Fork(branches)


# Modules as the paper's figures 5, 6, 7 and 10 have them.


def _fine(pooled: int) -> _Fork:
    return _fork(
        (_Conv(64),),
        (_Conv(48), _Conv(64, (5, 5))),
        (_Conv(64), _Conv(96, (3, 3)), _Conv(96, (3, 3))),
        (_Pool(average=True), _Conv(pooled)),
    )


def _middle(inner: int) -> _Fork:
    return _fork(
        (_Conv(192),),
        (_Conv(inner), _Conv(inner, (1, 7)), _Conv(192, (7, 1))),
        (_Conv(inner), _Conv(inner, (7, 1)), _Conv(inner, (1, 7)), _Conv(inner, (7, 1)), _Conv(192, (1, 7))),
        (_Pool(average=True), _Conv(192)),
    )


_SPREAD = _fork((_Conv(384, (1, 3)),), (_Conv(384, (3, 1)),))

_COARSE = _fork(
    (_Conv(320),),
    (_Conv(384), _SPREAD),
    (_Conv(448), _Conv(384, (3, 3)), _SPREAD),
    (_Pool(average=True), _Conv(192)),
)

_REDUCE_FINE = _fork(
    (_Conv(384, (3, 3), 2),),
    (_Conv(64), _Conv(96, (3, 3)), _Conv(96, (3, 3), 2)),
    (_Pool(),),
)

_REDUCE_MIDDLE = _fork(
    (_Conv(192), _Conv(320, (3, 3), 2)),
    (_Conv(192), _Conv(192, (1, 7)), _Conv(192, (7, 1)), _Conv(192, (3, 3), 2)),
    (_Pool(),),
)

_STEM: _Chain = (
    _Conv(32, (3, 3), 2),
    _Conv(32, (3, 3), valid=True),
    _Conv(64, (3, 3)),
    _Pool(),
    _Conv(80),
    _Conv(192, (3, 3), valid=True),
    _Pool(),
)

# The auxiliary head looks at what the first of these two hands to the second.
_LOWER: _Chain = (*_STEM, _fine(32), _fine(64), _fine(64), _REDUCE_FINE, *map(_middle, (128, 160, 160, 192)))
_UPPER: _Chain = (_REDUCE_MIDDLE, _COARSE, _COARSE)


class InceptionV3(nn.Module):
    """(N, 3, H, W) to scores (N, classes); to (scores, auxiliary scores) while training with the auxiliary head.

    Args:
        classes: Classes to score.
        auxiliary: Whether there is an auxiliary head. Below 299 pixels a side its map is too small for the paper's
            pooling; see `AuxiliaryHead`.
        image_size: Side in pixels to which images are enlarged (bilinearly) first; null leaves them as they are.
            299 in the paper, at least 75.
        width: Factor on the channels of all layers; 1 is the paper's.
        dropout: Probability of dropping a feature before the classifier; 0.5 in the authors' code.
    """

    def __init__(
        self,
        classes: int = 1000,
        auxiliary: bool = True,
        image_size: int | None = None,
        width: float = 1.0,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        require_count("classes", classes)
        require("width", width, 0)
        require("dropout", dropout, 0, 1)
        if image_size is not None:
            require_count("image_size", image_size, LEAST_IMAGE_SIZE)
        self.enlarge = Enlarge(image_size)
        self.lower, middle = _make_chain(_LOWER, 3, width)
        self.upper, features = _make_chain(_UPPER, middle, width)
        self.auxiliary = AuxiliaryHead(middle, classes, 5, width) if auxiliary else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(features, classes)
        initialise(self)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        middle_NCHW = self.lower(self.enlarge(images_NCHW))
        features_NCHW = self.upper(middle_NCHW)
        scores: torch.Tensor = self.classifier(self.dropout(features_NCHW.mean((2, 3))))
        if self.auxiliary is None or not self.training:
            return scores
        return scores, self.auxiliary(middle_NCHW)


class Enlarge(nn.Module):
    """Images to a side of `size` pixels, bilinearly; with None as they are, unless they are too small."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        height, width = images_NCHW.shape[2:]
        if self.size is not None and (height, width) != (self.size, self.size):
            return functional.interpolate(images_NCHW, (self.size, self.size), mode="bilinear", align_corners=False)
        if min(height, width) < LEAST_IMAGE_SIZE:
            raise UserError(
                f"model.options.image_size is null, but inception_v3 got images of {height}×{width} pixels:"
                f" set it to {LEAST_IMAGE_SIZE} or more (299 in the paper)"
            )
        return images_NCHW


class _Parallel(nn.ModuleList):
    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(features_NCHW) for branch in self], 1)


def _make_chain(chain: _Chain, inputs: int, width: float) -> tuple[nn.Sequential, int]:
    """The layers of a chain, and the channels that come out of it."""
    layers: list[nn.Module] = []
    for step in chain:
        if isinstance(step, _Conv):
            outputs = scaled(step.channels, width)
            layers += _convolution(step, inputs, outputs)
            inputs = outputs
        elif isinstance(step, _Pool):
            layers.append(nn.AvgPool2d(3, 1, 1) if step.average else nn.MaxPool2d(3, 2))
        else:
            made = [_make_chain(branch, inputs, width) for branch in step.branches]
            layers.append(_Parallel(branch for branch, _ in made))
            inputs = sum(outputs for _, outputs in made)
    return nn.Sequential(*layers), inputs


def _convolution(step: _Conv, inputs: int, outputs: int) -> list[nn.Module]:
    height, width = step.kernel
    keeps_size = step.stride == 1 and not step.valid
    padding = (height // 2, width // 2) if keeps_size else 0
    convolution = nn.Conv2d(inputs, outputs, step.kernel, step.stride, padding, bias=False)
    return [convolution, BatchNorm2d(outputs, eps=1e-3), nn.ReLU(inplace=True)]
