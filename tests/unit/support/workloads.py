"""Every model of hetsync.models, small, with data of its kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import TensorDataset

from hetsync import models
from hetsync.data import Data
from hetsync.data.sets.multi30k import multi30k
from hetsync.data.sets.ptb import ptb
from hetsync.data.sets.synthetic_city import synthetic_city
from hetsync.files import write_atomically

CLASSES = 3
SAMPLES = 32


def images(channels: int, size: int) -> Callable[[Path], Data]:
    def make(folder: Path) -> Data:
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(SAMPLES) % CLASSES
        # Each class has a picture of its own, so that learning shows within a few rounds of tiny slices.
        pictures = torch.randn(CLASSES, channels, size, size, generator=generator)
        pixels = pictures[labels] + torch.randn(SAMPLES, channels, size, size, generator=generator)
        split = TensorDataset(pixels, labels)
        return Data(split, split, model_options={"classes": CLASSES})

    return make


def city(folder: Path) -> Data:
    return synthetic_city(trips=3 * SAMPLES, days=4, drivers=5)


def sentences(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices("abcdef", k=draw.randint(3, 9))) for _ in range(count)]


def write_lines(path: Path, lines: list[str]) -> None:
    """Every rank writes the same, while others may read."""
    write_atomically(path, "\n".join(lines) + "\n")


def text(folder: Path) -> Data:
    for split in ("train", "valid", "test"):  # rare words are <unk> in the real text
        write_lines(folder / f"ptb.{split}.txt", [*sentences(3, 8 * SAMPLES), "a <unk>"])
    return ptb(str(folder), window=8, context=4)


def pairs(folder: Path) -> Data:
    for split in ("train", "val", "test_2016_flickr"):
        lines = sentences(5, SAMPLES)
        write_lines(folder / f"{split}.lc.norm.tok.en", lines)
        write_lines(folder / f"{split}.lc.norm.tok.de", [line.upper() for line in lines])
    return multi30k(str(folder))


@dataclass(frozen=True)
class Workload:
    """A model's recipe name, options that make it small and deterministic, and how Adam is to train it."""

    name: str
    data: Callable[[Path], Data]
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 3e-3
    rounds: int = 16

    def model(self, data: Data) -> torch.nn.Module:
        torch.manual_seed(7)
        return models.build_for(data, self.name, self.options)


NAS = {"cells": 1, "filters": 8, "drop_path": 0.0, "dropout": 0.0}
COLOUR = images(3, 16)

WORKLOADS = (
    Workload("digits_cnn", images(1, 8), {"batch_norm": True}),
    Workload("resnet18", COLOUR, {"stem": "cifar", "width": 4}),
    Workload("resnet50", COLOUR, {"stem": "cifar", "width": 4}),
    Workload("inception_v3", COLOUR, {"width": 0.05, "image_size": 75, "dropout": 0.0}, 4e-3, 32),
    Workload("nasnet_a_cifar", COLOUR, {**NAS, "filters": 4}, 1e-2, 6),
    Workload("nasnet_a_mobile", COLOUR, NAS, 1e-2, 6),
    Workload("nasnet_a_large", COLOUR, NAS, 1e-2, 6),
    Workload("pnasnet5_cifar", COLOUR, {**NAS, "filters": 4}, 1e-2, 6),
    Workload("pnasnet5_mobile", COLOUR, NAS, 1e-2, 6),
    Workload("pnasnet5_large", COLOUR, NAS, 1e-2, 6),
    Workload("deeptte", city, {"hidden_size": 16}),
    Workload("trajectory_transformer", city, {"width": 16, "layers": 2, "heads": 2, "dropout": 0.0}),
    Workload("ptb_lstm", text, {"hidden": 16, "dropout": 0.0}, 1e-2, 32),
    Workload("transformer_lm", text, {"width": 16, "layers": 2, "heads": 2, "dropout": 0.0, "tied": False}, 1e-2, 32),
    Workload("nmt", pairs, {"hidden": 16, "dropout": 0.0}, 1e-2),
)


def freeze_norms(model: torch.nn.Module) -> None:
    """Batch normalisation is the one place where samples of a slice meet: let it use its running statistics."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
