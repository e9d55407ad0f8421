"""A user's own images, one folder a class; the folders may also lie in tar archives."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress, islice
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hetsync.data import Data
from hetsync.data.cache import cached_folder
from hetsync.data.findings import Findings
from hetsync.data.sets.images import LAYOUT, Split, hold_out, load, save
from hetsync.errors import UserError
from hetsync.extras import require

if TYPE_CHECKING:
    import PIL.Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
ARCHIVES = (".tar", ".tar.gz", ".tgz")
TESTS = ("test", "val")  # the first that is there
DECODED_AT_ONCE = 256
NO_IMAGE = (f"no image by its name ({', '.join(sorted(SUFFIXES))}): it is left out", "stray files")
BROKEN_ARCHIVE = (tarfile.TarError, EOFError, zlib.error, OSError)


class BrokenImageError(Exception):
    """What Pillow cannot read; says where it is and why."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} is no image that Pillow can read ({why})")
        self.where = where
        self.why = why


class Picture(NamedTuple):
    """A file of some class; its content is read when asked for."""

    label: str
    where: str
    read: Callable[[], bytes]


def image_folder(path: str, image_size: int = 224, augment: bool = True, test_fraction: float = 0.2) -> Data:
    """Classes of images from PATH/train/CLASS/* and PATH/test/CLASS/* (or val), or from PATH/CLASS/*.

    In place of the folders train and test, PATH may hold archives with the same content (train.tar, train.tar.gz).
    Images are scaled and cut to squares once, into the data cache: 3·image_size² bytes each.

    Args:
        path: The folder.
        image_size: Height and width in pixels; the shorter side is scaled to it and the longer cut at the middle.
        augment: Shift and mirror training images at random.
        test_fraction: Held out for testing where there is no test folder: the last of each class by name.
    """
    if image_size < 1:
        raise UserError(f"data.options.image_size is {image_size}: give a number of pixels, e.g. 224")
    return load(cached(Path(path), "image_folder", image_size, test_fraction), augment)


def check(path: Path, findings: Findings) -> None:
    """Decodes every image."""
    check_class_folders(path, findings)


def cached(path: Path, name: str, image_size: int, test_fraction: float) -> Path:
    """The cache folder of class folders. `name` is the data set's, for what users are told."""
    if not path.is_dir():
        raise UserError(f"data.options.path is {path}, which is no folder: give one with CLASS/* or train/CLASS/*")
    require_pillow()
    train, test = places(path)
    sources = [train, *([test] if test else [])]
    remedy = f"look at what hetsync data check {name} {path} says, then mend or remove such files"

    def build(folder: Path) -> None:
        try:
            save(folder, *_splits(train, test, image_size, test_fraction))
        except BrokenImageError as broken:
            raise UserError(f"{broken}: {remedy}") from broken
        except (tarfile.TarError, EOFError, zlib.error) as broken:
            raise UserError(f"an archive in {path} is broken ({broken}): {remedy}") from broken

    return cached_folder(name, sources, f"{LAYOUT}, {image_size}, {test_fraction}", build)


def places(path: Path) -> tuple[Path, Path | None]:
    """Where the training and test images lie; the folder itself where it has no such parts."""
    train = _part(path, "train")
    if train is None:
        return path, None
    return train, next((part for name in TESTS if (part := _part(path, name)) is not None), None)


def pictures(place: Path) -> Iterator[Picture]:
    """Image files of a place in an order of their own, always the same; may raise one of BROKEN_ARCHIVE."""
    if not place.is_dir():
        yield from _archived(place)
        return
    for folder in sorted(child for child in place.iterdir() if child.is_dir()):
        for file in sorted(folder.iterdir()):
            if _is_image(file.name):
                yield Picture(folder.name, str(file), file.read_bytes)


def check_class_folders(path: Path, findings: Findings, image_size: int | None = None) -> None:
    """Decode every image. With `image_size`, each must have it already."""
    require_pillow()
    train, test = places(path)
    classes = _check_place(train, "training images", findings, image_size)
    if test is not None:
        for label in sorted(_check_place(test, "test images", findings, image_size) - classes):
            findings.problem(str(test), f"class {label} is not among the training images")
    findings.counts["classes"] = len(classes)
    if not classes:
        findings.problem(str(path), "no images: neither CLASS/* nor train/CLASS/* is here")


def require_pillow() -> None:
    require("images", "reading images")


def _part(path: Path, name: str) -> Path | None:
    candidates = [path / name, *(path / f"{name}{suffix}" for suffix in ARCHIVES)]
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def _archived(place: Path) -> Iterator[Picture]:
    with tarfile.open(place) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if member.isfile() and _is_image(name.name):
                yield Picture(name.parent.name, f"{place}, {name}", partial(_content, archive, member))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def _check_place(place: Path, what: str, findings: Findings, image_size: int | None) -> set[str]:
    classes = set()
    try:
        for where, what_is_wrong, kind in _left_out(place):
            findings.problem(where, what_is_wrong, kind)
        for picture in pictures(place):
            classes.add(picture.label)
            if (wrong := _wrong(picture, image_size)) is None:
                findings.count(what)
            else:
                findings.problem(picture.where, *wrong)
    except BROKEN_ARCHIVE as broken:
        findings.problem(str(place), f"cannot be read on: {broken}", "cannot be read")
    return classes


def _left_out(place: Path) -> Iterator[tuple[str, str, str]]:
    """What `pictures` passes over, but for hidden files: where, what is wrong, and the kind of problem."""
    if not place.is_dir():
        with tarfile.open(place) as archive:
            names = [PurePosixPath(member.name) for member in archive if member.isfile()]
        yield from ((f"{place}, {name}", *NO_IMAGE) for name in names if not (_is_image(name.name) or _hidden(name)))
        return
    for child in sorted(child for child in place.iterdir() if not _hidden(child)):
        if not child.is_dir():
            yield str(child), "a file where folders of classes are expected: it is left out", "stray files"
            continue
        files = sorted(file for file in child.iterdir() if not _hidden(file))
        if not any(_is_image(file.name) for file in files):
            yield str(child), "a class without images: it is left out", "empty classes"
        yield from ((str(file), *NO_IMAGE) for file in files if not _is_image(file.name))


def _hidden(path: PurePath) -> bool:
    return path.name.startswith(".")


def _wrong(picture: Picture, image_size: int | None) -> tuple[str, str] | None:
    """What is wrong with an image, and what kind of problem that is."""
    try:
        width, height = _open(picture.where, picture.read()).size
    except BROKEN_ARCHIVE as error:
        return f"cannot be read: {error}", "cannot be read"
    except BrokenImageError as broken:
        return f"no image that Pillow can read ({broken.why})", "no images"
    if image_size is not None and (width, height) != (image_size, image_size):
        return f"{width}×{height} pixels instead of {image_size}×{image_size}", "of another size"
    return None


def _splits(train: Path, test: Path | None, image_size: int, test_fraction: float) -> tuple[Split, Split, list[str]]:
    labels = [picture.label for picture in pictures(train)]
    classes = sorted(set(labels))
    labels_N = _numbered(labels, classes, train)
    if test is not None:
        tests_N = _numbered([picture.label for picture in pictures(test)], classes, test)
        first, second = _decoded(pictures(train), image_size), _decoded(pictures(test), image_size)
        return Split(labels_N, first), Split(tests_N, second), classes
    held_N = hold_out(labels_N, test_fraction)
    kept, held = (
        Split(labels_N[mask_N], _decoded(compress(pictures(train), mask_N), image_size)) for mask_N in (~held_N, held_N)
    )
    return kept, held, classes


def _numbered(labels: list[str], classes: list[str], place: Path) -> np.ndarray:
    numbers = {label: number for number, label in enumerate(classes)}
    if unknown := set(labels) - set(classes):
        raise UserError(f"{place} has class {min(unknown)}, which the training images lack: add it there, or remove it")
    return np.array([numbers[label] for label in labels], np.int64)


def _decoded(chosen: Iterator[Picture], image_size: int) -> Iterator[np.ndarray]:
    """Pieces of shape (n, 3, image_size, image_size); Pillow decodes on all cores."""
    with ThreadPoolExecutor() as pool:
        # Archives are read by this thread alone, in their order.
        while some := [(picture.where, picture.read()) for picture in islice(chosen, DECODED_AT_ONCE)]:
            yield np.stack(list(pool.map(partial(_pixels, image_size), some)))


def _pixels(image_size: int, named_content: tuple[str, bytes]) -> np.ndarray:
    from PIL import Image, ImageOps

    image, size = _open(*named_content), (image_size, image_size)
    fitted = image if image.size == size else ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    return np.asarray(fitted).transpose(2, 0, 1)


def _open(where: str, content: bytes) -> PIL.Image.Image:
    """The image in RGB, turned as its camera was held."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow's decoders raise whatever broken content leads them to
        raise BrokenImageError(where, " ".join(str(error).split()) or type(error).__name__) from error
