"""CIFAR-10 in all its forms: what is read, split, normalised and complained of."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import RED, archive, checked, made, picture, pixels, tree, write_binary

from hetsync.data.sets import cifar10 as cifar10_module
from hetsync.data.sets.cifar10 import RECORD_BYTES, cifar10
from hetsync.errors import UserError

REAL = Path(os.environ.get("HETSYNC_TEST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write_python(file: Path, labels_N: np.ndarray, pixels_NP: np.ndarray, protocol: int = 4) -> None:
    file.write_bytes(pickle.dumps({b"labels": labels_N.tolist(), b"data": pixels_NP}, protocol))


# The two official forms.


@pytest.mark.parametrize(("write", "suffix"), [(write_binary, ".bin"), (write_python, "")])
@pytest.mark.parametrize("below", ["", "cifar-10-batches"])
def test_official_split(write: Callable[..., None], suffix: str, below: str, tmp_path: Path) -> None:
    folder = tmp_path / (below + ("-bin" if suffix else "-py") if below else "")
    folder.mkdir(exist_ok=True)
    parts = [made(30, seed) for seed in range(3)]
    for name, part in zip(["data_batch_1", "data_batch_2", "test_batch"], parts, strict=True):
        write(folder / (name + suffix), *part)
    data = cifar10(str(tmp_path), augment=False)
    assert data.model_options == {"classes": 10}
    train = np.concatenate([parts[0][1], parts[1][1]]).reshape(-1, 3, 32, 32)
    assert (pixels(data.train) == train).all()
    assert (pixels(data.test) == parts[2][1].reshape(-1, 3, 32, 32)).all()
    assert data.test.__getitems__([3, 14])[1].tolist() == [3, 4]
    counts, told = checked(cifar10_module.check, tmp_path)
    assert counts == {"files": 3, "training images": 60, "test images": 30}
    assert told == []


def test_normalised_by_the_training_split_only(tmp_path: Path) -> None:
    labels, train = made(100)
    write_binary(tmp_path / "data_batch_1.bin", labels, train)
    write_binary(tmp_path / "test_batch.bin", labels, np.full_like(train, 255))
    data = cifar10(str(tmp_path), augment=False)
    images, _ = data.train.__getitems__(range(100))
    assert images.mean((0, 2, 3)).abs().max() < 1e-5
    assert (images.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    mean, deviation = train.reshape(-1, 3, 1024).mean((0, 2)), train.reshape(-1, 3, 1024).std((0, 2))
    tests, _ = data.test.__getitems__([0])
    assert tests[0, :, 0, 0].numpy() == pytest.approx((255 - mean) / deviation, rel=1e-5)


def test_without_a_test_batch_the_last_of_each_class_are_held_out(tmp_path: Path) -> None:
    labels, images = made(50)
    write_binary(tmp_path / "part0.bin", labels[:30], images[:30])
    write_binary(tmp_path / "part1.bin", labels[30:], images[30:])
    data = cifar10(str(tmp_path), augment=False, test_fraction=0.2)
    assert (pixels(data.test) == images[40:].reshape(-1, 3, 32, 32)).all()
    assert (pixels(data.train) == images[:40].reshape(-1, 3, 32, 32)).all()
    with pytest.raises(UserError, match=r"test_fraction is 1\.5"):
        cifar10(str(tmp_path), test_fraction=1.5)
    with pytest.raises(UserError, match="no images to test with"):
        cifar10(str(tmp_path), test_fraction=0.01)


def test_bad_binaries_are_reported_and_refused(tmp_path: Path) -> None:
    labels, images = made(20)
    labels[[4, 9]] = 77, 200
    write_binary(tmp_path / "data_batch_1.bin", labels, images)
    whole = (tmp_path / "data_batch_1.bin").read_bytes()
    (tmp_path / "data_batch_2.bin").write_bytes(whole[: 3 * RECORD_BYTES + 7])
    (tmp_path / "data_batch_3.bin").write_bytes(b"")
    counts, told = checked(cifar10_module.check, tmp_path)
    assert counts == {"files": 3, "training images": 18 + 3}
    assert [(Path(where).name, what) for where, what in told] == [
        ("data_batch_1.bin, record 5", "label 77 is not 0 to 9"),
        ("data_batch_1.bin, record 10", "label 200 is not 0 to 9"),
        ("data_batch_2.bin", "ends within record 4: 7 bytes of 3073 are there"),
    ]
    with pytest.raises(UserError, match=r"data_batch_1\.bin, record 5 has label 77.* hetsync data check cifar10"):
        cifar10(str(tmp_path))
    (tmp_path / "data_batch_1.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_2\.bin ends within record 4.* hetsync data check cifar10"):
        cifar10(str(tmp_path))


# Python batches come from the internet, so they may hold anything.


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("protocol", range(6))
def test_python_batches_of_every_protocol(protocol: int) -> None:
    labels, images = made(20)
    content = pickle.dumps({"labels": labels.tolist(), "data": images}, protocol)
    records = cifar10_module._pickled(content)
    assert records.trouble == ""
    assert (records.pixels_NP == images).all()
    assert (records.labels_N == labels).all()


def test_a_batch_as_python_2_wrote_it() -> None:
    """Protocol 2, byte strings and all, put together by hand: Python 3 writes no such pickle."""
    shape = b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    dtype = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    pixels_P = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + shape
        + dtype
        + b"\x89T"
        + len(pixels_P).to_bytes(4, "little")
        + pixels_P
        + b"tb"
    )
    content = b"\x80\x02}(U\x04data" + array + b"U\x06labels]K\x07au."
    records = cifar10_module._pickled(content)
    assert records.trouble == ""
    assert records.labels_N.tolist() == [7]
    assert records.pixels_NP.tobytes() == pixels_P


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"labels": [Evil()], b"data": 0}))
    with pytest.raises(UserError, match=r"data_batch_1 is a pickle that asks for .*system, and only numpy arrays"):
        cifar10(str(tmp_path))
    _, told = checked(cifar10_module.check, tmp_path)
    assert len(told) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        pickle.dumps({b"labels": [1]}),
        pickle.dumps({b"labels": ["cat"], b"data": np.zeros((1, 3072), np.uint8)}),
        pickle.dumps({b"labels": [1, 2], b"data": np.zeros((1, 3072), np.uint8)}),
        pickle.dumps({b"labels": [1], b"data": np.zeros((1, 3072))}),
        pickle.dumps({b"labels": [1], b"data": np.zeros((), np.uint8)}),
    ],
)
def test_no_batch_is_reported_and_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    write_python(tmp_path / "data_batch_1", *made(10))
    counts, told = checked(cifar10_module.check, tmp_path)
    assert counts["training images"] == 10
    assert [Path(where).name for where, _ in told] == ["test_batch"]
    with pytest.raises(UserError, match=r"test_batch is no CIFAR-10 batch.* hetsync data check"):
        cifar10(str(tmp_path))


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_no_bytes_make_reading_raise(content: bytes) -> None:
    assert cifar10_module._pickled(content).trouble
    cifar10_module._binary(content)


# Class folders.


def test_an_image_of_another_size_is_no_cifar10(tmp_path: Path) -> None:
    tree(tmp_path, {"train/cat/1.png": picture(RED, (32, 32)), "train/cat/2.png": picture(RED, (64, 32))})
    counts, told = checked(cifar10_module.check, tmp_path)
    assert counts == {"training images": 1, "classes": 1}
    assert [what for _, what in told] == ["64×32 pixels instead of 32×32"]


# Real images.


@pytest.mark.skipif(not (REAL / "cifar10_lossless").is_dir(), reason="needs the real data")
def test_real_records() -> None:
    path = REAL / "cifar10_lossless"
    counts, told = checked(cifar10_module.check, path)
    assert (counts, told) == ({"files": 4, "training images": 4000}, [])
    data = cifar10(str(path), test_fraction=0.25)
    assert len(data.train) + len(data.test) == 4000
    # The published means of the whole training set are 125.3, 123.0 and 113.9; these are 3,000 images of it.
    assert data.train._mean_C11.flatten().tolist() == pytest.approx([125.3, 123.0, 113.9], abs=1.5)
    first = np.fromfile(path / "cifar10_first4000_part0.bin", np.uint8, RECORD_BYTES)
    kept = cifar10(str(path), augment=False, test_fraction=0.25).train
    assert (pixels(kept)[0].ravel() == first[1:]).all()
    assert kept[0][1] == first[0]


@pytest.mark.skipif(not (REAL / "cifar10_jpeg").is_dir(), reason="needs the real data")
def test_real_archives(tmp_path: Path) -> None:
    """The first images of both archives, which are read without being unpacked."""
    pytest.importorskip("PIL")
    for name in ("train", "test"):
        with tarfile.open(REAL / "cifar10_jpeg" / f"{name}.tar.gz") as content:
            some = {m.name: content.extractfile(m).read() for m, _ in zip(content, range(200), strict=False)}  # type: ignore[union-attr]
        archive(tmp_path / f"{name}.tar.gz", some)
    data = cifar10(str(tmp_path))
    assert (len(data.train), len(data.test)) == (200, 200)
    assert checked(cifar10_module.check, tmp_path) == (
        {"training images": 200, "test images": 200, "classes": 1},
        [],
    )
