"""What sets of images share: a memory-mapped cache of bytes, and batches made of it in few operations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from hetsync.data import Data
from hetsync.data.cache import save_rows
from hetsync.errors import UserError

Batch = tuple[torch.Tensor, torch.Tensor]

LAYOUT = "images 1"  # of the cache; change it with what `save` writes
FACTS = "facts.json"


class Split(NamedTuple):
    """Images of a training or test set: N labels, and pieces of shape (n, 3, H, W) in bytes, N together."""

    labels_N: np.ndarray
    pieces: Iterable[np.ndarray]


def save(folder: Path, train: Split, test: Split, classes: Sequence[str]) -> None:
    """Fill a cache folder. The normalisation is of the training images only."""
    histograms_CV = np.zeros((3, 256), np.int64)

    def counted() -> Iterator[np.ndarray]:
        for piece_NCHW in train.pieces:
            for channel, histogram_V in enumerate(histograms_CV):
                histogram_V += np.bincount(piece_NCHW[:, channel].ravel(), minlength=256)
            yield piece_NCHW

    for name, split, pieces in (("train", train, counted()), ("test", test, test.pieces)):
        if not len(split.labels_N):
            raise UserError(f"data.options.path holds no images to {name} with: add some, or change test_fraction")
        save_rows(folder / f"{name}_images.npy", len(split.labels_N), pieces)
        save_rows(folder / f"{name}_labels.npy", len(split.labels_N), [split.labels_N.astype(np.int64)])
    mean_C, deviation_C = _moments(histograms_CV)
    facts = {"classes": list(classes), "mean": mean_C.tolist(), "deviation": deviation_C.tolist()}
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def load(folder: Path, augment: bool) -> Data:
    """The data sets of a folder that `save` filled."""
    classes = json.loads((folder / FACTS).read_text(encoding="utf-8"))["classes"]
    return Data(
        Images(folder, "train", augment),
        Images(folder, "test", augment=False),
        collate=as_it_is,
        model_options={"classes": len(classes)},
    )


def as_it_is(batch: Any) -> Any:
    """The collate of `Images`, whose `__getitems__` returns whole batches."""
    return batch


class Images(Dataset[Batch]):
    """Images of shape (3, H, W), each channel normalised to mean 0 and deviation 1 over the training set.

    `__getitems__` returns a batch, for `as_it_is` to pass on. Only bytes are stored, and only what a batch needs
    is read and made floating-point.

    With `augment`, images are shifted by up to an eighth of their size in either direction (4 pixels of 32, black
    coming in) and mirrored with probability 1/2 (He et al. 2016, section 4.2). What is drawn follows from the list
    of indices alone: a loader's threads, workers and restarts change nothing, and as every epoch has another order,
    drawn from the run's seed, the list and so the draws are new in each (but for batches of one sample).

    Args:
        folder: Filled by `save`.
        split: train or test.
        augment: Shift and mirror at random.
    """

    def __init__(self, folder: Path, split: str, augment: bool) -> None:
        self._made_of = (folder, split, augment)
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self._mean_C11, self._deviation_C11 = (torch.tensor(facts[k]).view(3, 1, 1) for k in ("mean", "deviation"))
        # As plain arrays: numpy's memmap class costs time at every indexing.
        self._images_NCHW = np.asarray(np.load(folder / f"{split}_images.npy", mmap_mode="r"))
        self._labels_N = np.load(folder / f"{split}_labels.npy")
        self._augment = augment

    def __reduce__(self) -> tuple[Any, ...]:
        return Images, self._made_of  # worker processes map the files anew instead of getting their content

    def __len__(self) -> int:
        return len(self._labels_N)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        images_NCHW = self._images_NCHW[indices]
        if self._augment:
            images_NCHW = shift_and_mirror(images_NCHW, np.random.default_rng(indices))
        scaled = torch.from_numpy(images_NCHW).float().sub_(self._mean_C11).div_(self._deviation_C11)
        return scaled, torch.from_numpy(self._labels_N[indices])


def shift_and_mirror(images_NCHW: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Each image shifted by up to an eighth of its size, and mirrored left to right with probability 1/2."""
    count, channels, height, width = images_NCHW.shape
    margins = height // 8, width // 8
    padded = np.zeros((count, channels, height + 2 * margins[0], width + 2 * margins[1]), images_NCHW.dtype)
    padded[:, :, margins[0] : margins[0] + height, margins[1] : margins[1] + width] = images_NCHW
    windows_NCYXHW = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (2, 3))
    down, right = (draw.integers(0, 2 * margin, count, endpoint=True) for margin in margins)
    shifted: np.ndarray = windows_NCYXHW[np.arange(count), :, down, right]
    mirrored = draw.random(count) < 0.5
    shifted[mirrored] = shifted[mirrored, :, :, ::-1]
    return shifted


def hold_out(labels_N: np.ndarray, fraction: float) -> np.ndarray:
    """Which samples are for testing where a set has no split of its own: the last `fraction` of each class.

    In the order given: the last ones, as neighbours (frames of a film, say) may be alike.
    """
    if not 0 < fraction < 1:
        raise UserError(f"data.options.test_fraction is {fraction}: choose one between 0 and 1")
    held_N = np.zeros(len(labels_N), bool)
    for label in np.unique(labels_N):
        (of_class,) = np.nonzero(labels_N == label)
        held_N[of_class[len(of_class) - int(len(of_class) * fraction) :]] = True
    return held_N


def _moments(histograms_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel from how often each byte occurs in it."""
    values_V = np.arange(256)
    counts_C = histograms_CV.sum(1)
    mean_C = histograms_CV @ values_V / counts_C
    variance_C = (histograms_CV * (values_V - mean_C[:, None]) ** 2).sum(1) / counts_C
    return mean_C, np.sqrt(variance_C).clip(min=1.0)  # a channel of one colour stays finite
