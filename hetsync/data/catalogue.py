"""The data sets that recipes and `hetsync data` know by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Download:
    """A file as its publishers distribute it; `unpack` where it is a tar archive."""

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
        terms: The licence as its publishers state it, and where to get what cannot be fetched.
        layout: What the folder must hold.
    """

    make: str
    check: str | None = None
    downloads: tuple[Download, ...] = ()
    terms: str = ""
    layout: str = ""


SETS = "hetsync.data.sets."

CATALOGUE = {
    "digits": Entry(SETS + "digits:digits", terms="it is part of scikit-learn (BSD licence)"),
    "cifar10": Entry(
        SETS + "cifar10:cifar10",
        SETS + "cifar10:check",
        # The publishers' page (www.cs.toronto.edu/~kriz/cifar.html) gives MD5 c32a1d4ab5d03f1284b67883e8d87530 for it.
        downloads=(
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        terms="its publishers state no licence; they ask to cite Krizhevsky 2009, Learning Multiple Layers of Features",
        layout="data_batch_*.bin, test_batch.bin, or the Python version's files, or train/CLASS/* and test/CLASS/*",
    ),
    "image_folder": Entry(
        SETS + "image_folder:image_folder",
        SETS + "image_folder:check",
        terms="it is your own images",
        layout="train/CLASS/* and test/CLASS/* (or val), or CLASS/*",
    ),
    "deeptte": Entry(
        SETS + "deeptte:deeptte",
        SETS + "deeptte:check",
        terms="no licence is stated for the trips that come with DeepTTE's code (github.com/UrbComp/DeepTTE), "
        "so get them from its authors",
        layout="a file of JSON lines, one trip each, or several named *.jsonl, train*, eval* or test*",
    ),
    "geolife": Entry(
        SETS + "geolife:geolife",
        SETS + "geolife:check",
        terms="it comes under a licence of Microsoft Research, for research, that you must accept yourself: "
        "get GeoLife GPS Trajectories from Microsoft's download centre",
        layout="USER/Trajectory/*.plt, some users with labels.txt, as unpacked",
    ),
    "synthetic_city": Entry(
        SETS + "synthetic_city:synthetic_city", terms="it is made on the spot by a documented generator"
    ),
    "sensors": Entry(
        SETS + "sensors:sensors",
        SETS + "sensors:check",
        terms="get METR-LA and PEMS-BAY from DCRNN's authors (github.com/liyaguang/DCRNN), PEMS04 and PEMS08 from those"
        " of ASTGCN, or use readings of your own",
        layout="the readings as one *.h5, *.npz or *.csv, and the graph as a *.csv of from, to and distance",
    ),
    "synthetic_sensors": Entry(
        SETS + "synthetic_sensors:synthetic_sensors", terms="it is made on the spot by a documented generator"
    ),
    "frames": Entry(
        SETS + "frames:frames",
        SETS + "frames:check",
        terms="get Moving MNIST's mnist_test_seq.npy from its authors (www.cs.toronto.edu/~nitish/unsupervised_video),"
        " who state no licence, or use frames of your own",
        layout="one *.npy or *.npz of (clips, frames, height, width) or (frames, height, width)",
    ),
    "synthetic_frames": Entry(
        SETS + "synthetic_frames:synthetic_frames", terms="it is made on the spot by a documented generator"
    ),
    "ptb": Entry(
        SETS + "ptb:ptb",
        SETS + "ptb:check",
        terms="the Penn Treebank is licensed by the Linguistic Data Consortium (LDC99T42), which allows no copies: "
        "use the text of Mikolov's preprocessing if your institution has the licence",
        layout="ptb.train.txt, ptb.valid.txt and ptb.test.txt",
    ),
    "multi30k": Entry(
        SETS + "multi30k:multi30k",
        SETS + "multi30k:check",
        terms="it is for non-commercial research only, which is yours to decide: "
        "get the text of task 1 from its authors (github.com/multi30k/dataset)",
        layout="train.en.gz, train.de.gz and the like of val and test_2016_flickr, or the tokenised "
        "train.lc.norm.tok.en and the like",
    ),
}
