"""Residual networks (He et al. 2016, "Deep Residual Learning for Image Recognition").

With 1,000 classes at width 64: ResNet-18 has 11,689,512 weights and ResNet-50 25,557,032, as published. The
stride of a bottleneck is in its 3×3 convolution, as most implementations have it since (the paper: in the
first 1×1); that changes no count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from hetsync.errors import UserError
from hetsync.models.image_layers import BatchNorm2d, initialise
from hetsync.models.limits import require_count

Stem = Literal["cifar", "imagenet"]


def resnet18(classes: int = 1000, stem: Stem = "imagenet", width: int = 64) -> ResNet:
    """ResNet-18; see `ResNet`."""
    return ResNet([2, 2, 2, 2], _basic_branch, 1, classes, stem, width)


def resnet50(classes: int = 1000, stem: Stem = "imagenet", width: int = 64) -> ResNet:
    """ResNet-50; see `ResNet`."""
    return ResNet([3, 4, 6, 3], _bottleneck_branch, 4, classes, stem, width)


class ResNet(nn.Module):
    """(N, 3, H, W) to scores (N, classes).

    Args:
        blocks: Residual blocks of each of the four stages.
        branch: (inputs, channels, stride) to a block's residual branch, which ends in channels × expansion.
        expansion: Channels of a block's output over those inside it.
        classes: Classes to score.
        stem: imagenet (7×7 at stride 2 and a pool: maps of a quarter of the image's side) or cifar (3×3 at stride 1,
            for images of about 32 pixels).
        width: Channels of the first stage; each later stage has twice as many. 64 in the paper.
    """

    def __init__(
        self,
        blocks: list[int],
        branch: Callable[[int, int, int], nn.Sequential],
        expansion: int,
        classes: int,
        stem: Stem,
        width: int,
    ) -> None:
        super().__init__()
        require_count("classes", classes)
        require_count("width", width)
        self.stem = _make_stem(stem, width)
        stages, inputs = [], width
        for stage, count in enumerate(blocks):
            channels = width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                stages.append(Residual(branch(inputs, channels, stride), inputs, channels * expansion, stride))
                inputs = channels * expansion
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        features_NCHW = self.stages(self.stem(images_NCHW))
        scores: torch.Tensor = self.classifier(features_NCHW.mean((2, 3)))
        return scores


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1×1 projection where the shape changes (option B)."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride)) if changes else nn.Identity()

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.branch(features_NCHW) + self.shortcut(features_NCHW))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), BatchNorm2d(outputs)]


_Relu = partial(nn.ReLU, inplace=True)


def _make_stem(stem: Stem, width: int) -> nn.Sequential:
    if stem == "cifar":
        return nn.Sequential(*_convolution(3, width, 3), _Relu())
    if stem == "imagenet":
        return nn.Sequential(*_convolution(3, width, 7, 2), _Relu(), nn.MaxPool2d(3, 2, 1))
    raise UserError(f"model.options.stem is {stem}: use cifar or imagenet")


def _basic_branch(inputs: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*_convolution(inputs, channels, 3, stride), _Relu(), *_convolution(channels, channels, 3))


def _bottleneck_branch(inputs: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_convolution(inputs, channels, 1),
        _Relu(),
        *_convolution(channels, channels, 3, stride),
        _Relu(),
        *_convolution(channels, 4 * channels, 1),
    )
