"""CIFAR-10: 60,000 colour images of 32×32 pixels in ten classes (Krizhevsky 2009), in the forms it comes in."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.findings import Findings
from hetsync.data.sets import image_folder
from hetsync.data.sets.images import LAYOUT, Split, hold_out, load, save
from hetsync.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIZE = 32
PIXELS = 3 * SIZE * SIZE
RECORD_BYTES = 1 + PIXELS


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


# All that pickled numpy arrays name: the functions themselves, whose modules numpy 2 has renamed.
ARRAY = np.zeros(1, np.uint8)
REBUILDERS: dict[tuple[str, str], Any] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): ARRAY.__reduce__()[0] for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): ARRAY.__reduce_ex__(5)[0] for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,  # Python 3's way to write bytes for Python 2, without the other codecs
}


class Records(NamedTuple):
    """Content of a file: N labels, pixels of shape (N, 3072), each channel by rows; and what is wrong besides."""

    labels_N: np.ndarray
    pixels_NP: np.ndarray
    trouble: str = ""


def cifar10(path: str = "data/cifar10", augment: bool = True, test_fraction: float = 0.2) -> Data:
    """CIFAR-10 from binary files (*.bin), Python batches, or class folders of images.

    Official test images (test_batch.bin, test_batch, or a test folder or archive) are the test set where they
    are there. Otherwise the last `test_fraction` of each class is held out, in the order of files and records.

    Args:
        path: Folder with the files, or one above it as the official archives make it.
        augment: Shift by up to 4 pixels and mirror training images at random.
        test_fraction: Held out where there is no test batch.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"data.options.path is {path}, which is no folder: "
            f"fetch the data by hetsync data download cifar10 --to {path}, or give the folder that has it"
        )
    files = _batches(folder)
    if not files:
        return load(image_folder.cached(folder, "cifar10", SIZE, test_fraction), augment)

    def build(cache: Path) -> None:
        remedy = f"look at what hetsync data check cifar10 {path} says, and fetch the files anew"
        save(cache, *_splits(files, remedy, test_fraction), CLASSES)

    return load(cached_folder("cifar10", files, f"{LAYOUT}, {test_fraction}", build), augment)


def check(path: Path, findings: Findings) -> None:
    """Counts files and images; looks at every label, and decodes every image of class folders."""
    files = _batches(path)
    if not files:
        image_folder.check_class_folders(path, findings, SIZE)
        return
    findings.count("files", len(files))
    for file in files:
        records = _read(file)
        if records.trouble:
            findings.problem(str(file), records.trouble, "files that are not as they should be")
        bad = _mislabelled(records)
        for number in bad:
            label = records.labels_N[number]
            findings.problem(f"{file}, record {number + 1}", f"label {label} is not 0 to 9", "labels out of range")
        findings.count("test images" if _is_test(file) else "training images", len(records.labels_N) - len(bad))


def _batches(path: Path) -> list[Path]:
    """Binary files, or else Python batches; none where there are neither."""
    for folder in (path, path / "cifar-10-batches-bin", path / "cifar-10-batches-py"):
        files = sorted(folder.glob("*.bin")) or sorted(folder.glob("data_batch_[0-9]")) + list(
            folder.glob("test_batch")
        )
        if files:
            return files
    return []


def _is_test(file: Path) -> bool:
    return file.stem == "test_batch"


def _splits(files: list[Path], remedy: str, test_fraction: float) -> tuple[Split, Split]:
    """All in memory: CIFAR-10 has 184 MB."""
    contents = [_sound(file, remedy) for file in files]
    labels_N = np.concatenate([records.labels_N for records in contents])
    pixels_NP = np.concatenate([records.pixels_NP for records in contents])
    if any(map(_is_test, files)):
        held_N = np.repeat([_is_test(file) for file in files], [len(records.labels_N) for records in contents])
    else:
        held_N = hold_out(labels_N, test_fraction)
    images_NCHW = pixels_NP.reshape(-1, 3, SIZE, SIZE)
    train, test = (Split(labels_N[mask_N], [images_NCHW[mask_N]]) for mask_N in (~held_N, held_N))
    return train, test


def _sound(file: Path, remedy: str) -> Records:
    records = _read(file)
    if records.trouble:
        raise UserError(f"{file} {records.trouble}: {remedy}")
    if len(bad := _mislabelled(records)):
        raise UserError(f"{file}, record {bad[0] + 1} has label {records.labels_N[bad[0]]}, not 0 to 9: {remedy}")
    return records


def _mislabelled(records: Records) -> np.ndarray:
    return np.flatnonzero((records.labels_N < 0) | (records.labels_N >= len(CLASSES)))


def _read(file: Path) -> Records:
    try:
        content = file.read_bytes()
    except OSError as error:
        return _nothing(f"cannot be read: {error.strerror}")
    return _binary(content) if file.suffix == ".bin" else _pickled(content)


def _nothing(trouble: str) -> Records:
    return Records(np.zeros(0, np.int64), np.zeros((0, PIXELS), np.uint8), trouble)


def _binary(content: bytes) -> Records:
    """Records of a label and 3,072 pixels."""
    whole, left = divmod(len(content), RECORD_BYTES)
    records = np.frombuffer(content, np.uint8, whole * RECORD_BYTES).reshape(whole, RECORD_BYTES)
    trouble = f"ends within record {whole + 1}: {left} bytes of {RECORD_BYTES} are there" if left else ""
    return Records(records[:, 0].astype(np.int64), records[:, 1:], trouble)


def _pickled(content: bytes) -> Records:
    """A pickled dictionary with `data`, an array of pixels, and `labels`, a list."""
    try:
        batch = ArraysUnpickler(io.BytesIO(content), encoding="bytes").load()
        named = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        labels_N, pixels_NP = np.array(named["labels"], np.int64), named["data"]
    except ForbiddenError as error:
        return _nothing(str(error))
    except Exception as error:  # unpickling broken content raises almost anything
        return _nothing(f"is no CIFAR-10 batch of the Python version ({type(error).__name__}: {error})")
    shaped = isinstance(pixels_NP, np.ndarray) and pixels_NP.dtype == np.uint8 and pixels_NP.shape[1:] == (PIXELS,)
    if not shaped or labels_N.shape != pixels_NP.shape[:1]:
        return _nothing("is no CIFAR-10 batch: `data` must be bytes of shape (N, 3072), and `labels` a list of N")
    return Records(labels_N, pixels_NP)


class ForbiddenError(pickle.UnpicklingError):
    """A pickle that would run code."""


class ArraysUnpickler(pickle.Unpickler):
    """Admits numpy arrays and built-in containers; a pickle may call nothing else, so it runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in REBUILDERS:
            raise ForbiddenError(f"is a pickle that asks for {module}.{name}, and only numpy arrays are admitted")
        return REBUILDERS[module, name]
