"""The data sets that recipes and `hetsync data` know by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Download:
    """A file as its publishers distribute it; `unpack` where it is an archive."""

    url: str
    sha256: str
    unpack: bool = True


@dataclass(frozen=True)
class Entry:
    """A data set.

    Args:
        make: Import path of the function that makes its `Data`.
        check: Import path of its checker: (path, Findings) to nothing.
        downloads: What `hetsync data download` may fetch.
        terms: The licence as its publishers state it, and where to get what cannot be fetched; one sentence.
    """

    make: str
    check: str | None = None
    downloads: tuple[Download, ...] = ()
    terms: str = ""


SETS = "hetsync.data.sets."

CATALOGUE = {
    "digits": Entry(
        SETS + "digits:digits", terms="part of scikit-learn, which pip has installed already (BSD licence)"
    ),
    "cifar10": Entry(SETS + "cifar10:cifar10", SETS + "cifar10:check"),
    "image_folder": Entry(
        SETS + "image_folder:image_folder", SETS + "image_folder:check", terms="your own images, one folder a class"
    ),
    "deeptte": Entry(SETS + "deeptte:deeptte", SETS + "deeptte:check"),
    "geolife": Entry(SETS + "geolife:geolife", SETS + "geolife:check"),
    "synthetic_city": Entry(
        SETS + "synthetic_city:synthetic_city", terms="made on the spot by a documented generator; nothing to fetch"
    ),
    "ptb": Entry(SETS + "ptb:ptb", SETS + "ptb:check"),
    "multi30k": Entry(SETS + "multi30k:multi30k", SETS + "multi30k:check"),
}
