"""Searched cells and the network that stacks them: what NASNet (Zoph et al. 2018) and PNASNet (Liu et al. 2018) share.

Details that the papers leave open follow the authors' code. Three things differ, none of which moves a count of
weights by 0.1 %: a cell's earlier input always passes a 1×1 convolution of its own (theirs leaves it raw where
there is no earlier cell); padding is symmetric; normalisation has ε 1e-3 and momentum 0.1 throughout, since their
momentum of 3e-4 suits runs of millions of images only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from hetsync.errors import UserError
from hetsync.models.image_layers import AuxiliaryHead, BatchNorm2d, initialise
from hetsync.models.limits import require, require_count

# A cell's states: its current and its earlier input, and from 2 on what its own combinations yield.
CURRENT, EARLIER = 0, 1

KEPT_MAPS = 3  # the furthest back that a cell's earlier input lies

Operation = Literal["identity", "average", "maximum", "separable3", "separable5", "separable7"]


@dataclass(frozen=True)
class Genotype:
    """A searched cell.

    Args:
        combinations: Pairs of (operation, state that it is applied to), whose results are added to a new state.
        outputs: Maps that the cell concatenates.
    """

    combinations: tuple[tuple[tuple[Operation, int], tuple[Operation, int]], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class CellPlan:
    """A cell's place in the network.

    Args:
        genotype: The cell.
        filters: Channels of each of its outputs.
        stride: Of its operations on the two inputs; 2 halves the size.
        earlier: Which cell's output is its earlier input, counted back; -1 would be its current input.
    """

    genotype: Genotype
    filters: int
    stride: int = 1
    earlier: int = -2


@dataclass(frozen=True)
class NetworkPlan:
    """A network of cells.

    Args:
        stem: Channels and stride of the first convolution, 3×3.
        cells: All cells, in order.
        auxiliary_after: Number of cells below the auxiliary head.
        auxiliary_map: Side in pixels of the map that the auxiliary head pools to; see `AuxiliaryHead`.
    """

    stem: tuple[int, int]
    cells: tuple[CellPlan, ...]
    auxiliary_after: int
    auxiliary_map: int


def imagenet_stem(genotype: Genotype, filters: int) -> tuple[CellPlan, CellPlan]:
    """The two cells that quarter the size before the first stage of a network for large images."""
    require_count("filters", filters, 8)
    return CellPlan(genotype, filters // 4, stride=2), CellPlan(genotype, filters // 2, stride=2)


@dataclass(frozen=True)
class Map:
    """A feature map while building: its channels, and by how much it is smaller than the stem's."""

    channels: int
    reduction: int


class CellNetwork(nn.Module):
    """(N, 3, H, W) to scores (N, classes); to (scores, auxiliary scores) while training with the auxiliary head.

    Args:
        plan: The cells.
        classes: Classes to score.
        auxiliary: Whether there is an auxiliary head.
        drop_path: Probability that training drops an operation's result, sample by sample, in the last cell; it
            grows linearly over depth up to there. ScheduledDropPath (Zoph et al. 2018) also raises it from zero over
            the course of training; a model knows of no course, so here it is constant in time.
        dropout: Probability of dropping a feature before the classifier.
    """

    def __init__(self, plan: NetworkPlan, classes: int, auxiliary: bool, drop_path: float, dropout: float) -> None:
        super().__init__()
        require_count("classes", classes)
        require("dropout", dropout, 0, 1)
        if isinstance(drop_path, bool) or not isinstance(drop_path, int | float) or not 0 <= drop_path < 1:
            raise UserError(f"model.options.drop_path is {drop_path}: it must be at least 0 and below 1")
        channels, stride = plan.stem
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride, 1, bias=False), BatchNorm2d(channels, eps=1e-3))
        self.cells = nn.ModuleList()
        self.earlier = [cell.earlier for cell in plan.cells]
        below = [Map(channels, 1)] * KEPT_MAPS
        for index, cell in enumerate(plan.cells):
            rate = drop_path * (index + 1) / len(plan.cells)
            current = below[-1]
            self.cells.append(Cell(cell, current, below[cell.earlier], rate))
            below.append(Map(cell.filters * len(cell.genotype.outputs), current.reduction * cell.stride))
        self.auxiliary_after = plan.auxiliary_after
        middle = below[KEPT_MAPS - 1 + plan.auxiliary_after].channels
        self.auxiliary = AuxiliaryHead(middle, classes, plan.auxiliary_map) if auxiliary else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(below[-1].channels, classes)
        initialise(self)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        maps = [self.stem(images_NCHW)] * KEPT_MAPS
        middle_NCHW = maps[-1]
        for number, (cell, earlier) in enumerate(zip(self.cells, self.earlier, strict=True), 1):
            maps = [*maps[1:], cell(maps[-1], maps[earlier])]
            if number == self.auxiliary_after:
                middle_NCHW = maps[-1]
        features_NC = functional.relu(maps[-1]).mean((2, 3))
        scores: torch.Tensor = self.classifier(self.dropout(features_NC))
        if self.auxiliary is None or not self.training:
            return scores
        return scores, self.auxiliary(middle_NCHW)


class Cell(nn.Module):
    """(current, earlier) feature maps to the concatenated outputs, of `filters` channels each."""

    def __init__(self, plan: CellPlan, current: Map, earlier: Map, drop_path: float) -> None:
        super().__init__()
        filters = plan.filters
        self.outputs = plan.genotype.outputs
        self.current = nn.Sequential(nn.ReLU(), *_projection(current.channels, filters))
        smaller = current.reduction != earlier.reduction
        fit = FactorizedReduction(earlier.channels, filters) if smaller else None
        self.earlier = nn.Sequential(nn.ReLU(), *([fit] if fit else _projection(earlier.channels, filters)))
        self.operations = nn.ModuleList()
        self.sources = []
        for pair in plan.genotype.combinations:
            for operation, source in pair:
                stride = plan.stride if source in (CURRENT, EARLIER) else 1
                self.operations.append(_make_operation(operation, filters, stride, drop_path))
                self.sources.append(source)

    def forward(self, current_NCHW: torch.Tensor, earlier_NCHW: torch.Tensor) -> torch.Tensor:
        states = [self.current(current_NCHW), self.earlier(earlier_NCHW)]
        steps = list(zip(self.operations, self.sources, strict=True))
        for (left, left_source), (right, right_source) in zip(steps[::2], steps[1::2], strict=True):
            states.append(left(states[left_source]) + right(states[right_source]))
        return torch.cat([states[index] for index in self.outputs], 1)


class FactorizedReduction(nn.Module):
    """Half the size without ignoring three pixels of four: two strided 1×1 convolutions, a pixel apart."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = BatchNorm2d(outputs, eps=1e-3)

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        shifted = functional.pad(features_NCHW, (-1, 1, -1, 1))
        reduced: torch.Tensor = self.norm(torch.cat([self.even(features_NCHW), self.odd(shifted)], 1))
        return reduced


class DropPath(nn.Module):
    """Drops a whole feature map of a sample while training; the kept ones make up for it (Larsson et al. 2017)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.keep = 1 - probability

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        if not self.training or self.keep == 1:
            return features_NCHW
        kept = features_NCHW.new_empty(len(features_NCHW), 1, 1, 1).bernoulli_(self.keep)
        return features_NCHW * (kept / self.keep)


def _projection(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 1, stride, bias=False), BatchNorm2d(outputs, eps=1e-3)]


def _separable(filters: int, stride: int, kernel: int) -> list[nn.Module]:
    """Twice ReLU, depthwise and pointwise convolution, normalisation; the stride is in the first."""
    layers: list[nn.Module] = []
    for each in (stride, 1):
        depthwise = nn.Conv2d(filters, filters, kernel, each, kernel // 2, groups=filters, bias=False)
        layers += [nn.ReLU(), depthwise, *_projection(filters, filters)]
    return layers


def _average(filters: int, stride: int) -> list[nn.Module]:
    return [nn.AvgPool2d(3, stride, 1, count_include_pad=False)]


def _maximum(filters: int, stride: int) -> list[nn.Module]:
    return [nn.MaxPool2d(3, stride, 1)]


OPERATIONS: dict[Operation, Callable[[int, int], list[nn.Module]]] = {
    "average": _average,
    "maximum": _maximum,
    "separable3": partial(_separable, kernel=3),
    "separable5": partial(_separable, kernel=5),
    "separable7": partial(_separable, kernel=7),
}


def _make_operation(operation: Operation, filters: int, stride: int, drop_path: float) -> nn.Module:
    if operation == "identity":  # never dropped, so that every combination keeps a way through
        return nn.Identity() if stride == 1 else nn.Sequential(nn.ReLU(), *_projection(filters, filters, stride))
    return nn.Sequential(*OPERATIONS[operation](filters, stride), DropPath(drop_path))
