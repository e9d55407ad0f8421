"""Digits in the files of data sets that scripts know."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hetsync.data.sets.digits import digits


def as_mnist(folder: Path) -> None:
    """data/MNIST/raw beside the script's folder: images of 28 x 28 that are those of 8 x 8, three times as large."""
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", digits().train), ("t10k", digits().test)):
        images = np.stack([np.pad(np.kron(image[0].numpy(), np.ones((3, 3))), 2) for image, _ in part])
        _idx(raw / f"{name}-images-idx3-ubyte", np.round(255 * images / images.max()))
        _idx(raw / f"{name}-labels-idx1-ubyte", np.array([int(label) for _, label in part]))


def _idx(path: Path, values: np.ndarray) -> None:
    """The format of http://yann.lecun.com/exdb/mnist: bytes, and before them how many there are in each dimension."""
    head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


def as_image_folder(folder: Path, most: int | None = None) -> None:
    """digits/train and digits/val, with a folder for each class: images of 32 x 32, those of 8 x 8 enlarged."""
    for name, part in (("train", digits().train), ("val", digits().test)):
        for number, (image, label) in enumerate(islice(part, most)):
            place = folder / "digits" / name / str(int(label))
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.kron(image[0].numpy(), np.ones((4, 4)))
            Image.fromarray(np.round(255 * pixels / pixels.max()).astype(np.uint8)).save(place / f"{number:04}.png")


def as_pictures_for_diffusion(folder: Path) -> None:
    """A few of them, and unet/config.json of a small network."""
    as_image_folder(folder, 240)
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    sizes = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": [8, 16], "norm_num_groups": 4}
    (folder / "unet").mkdir()
    told = {"_class_name": "UNet2DModel", "in_channels": 3, "out_channels": 3, **blocks, **sizes}
    (folder / "unet" / "config.json").write_text(json.dumps(told))


def augmented_by_sample() -> None:
    """What an image folder's transforms draw is a function of the image, drawn before a job has threads that draw, too.
    Images have torch's default type."""
    from torchvision import datasets

    class Drawn(datasets.ImageFolder):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            with torch.random.fork_rng():
                self.drawn = [self._seeded(index) for index in range(len(self))]

        def _seeded(self, index: int) -> tuple[torch.Tensor, int]:
            torch.manual_seed(index)
            image, label = super().__getitem__(index)
            return image.to(torch.get_default_dtype()), label

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return self.drawn[index]

    datasets.ImageFolder = Drawn
