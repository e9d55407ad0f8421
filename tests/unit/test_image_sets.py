"""CIFAR-10 in all its forms, and folders of images: what is read, split, normalised, drawn and complained of."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hetsync.data import Data, build
from hetsync.data.findings import Findings
from hetsync.data.sets import cifar10 as cifar10_module
from hetsync.data.sets import image_folder as image_folder_module
from hetsync.data.sets.cifar10 import RECORD_BYTES, cifar10
from hetsync.data.sets.image_folder import image_folder
from hetsync.data.sets.images import Images, Split, hold_out, load, save, shift_and_mirror
from hetsync.data.workers import fetch
from hetsync.errors import UserError

REAL = Path(os.environ.get("HETSYNC_TEST_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def made(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of all classes, and pixels of shape (count, 3072)."""
    return np.arange(count) % 10, np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)


def write_binary(file: Path, labels_N: np.ndarray, pixels_NP: np.ndarray) -> None:
    file.write_bytes(np.concatenate([labels_N[:, None].astype(np.uint8), pixels_NP], 1).tobytes())


def write_python(file: Path, labels_N: np.ndarray, pixels_NP: np.ndarray, protocol: int = 4) -> None:
    file.write_bytes(pickle.dumps({b"labels": labels_N.tolist(), b"data": pixels_NP}, protocol))


def checked(check: Callable[[Path, Findings], None], path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    findings = Findings(lambda where, what: told.append((where, what)))
    check(path, findings)
    assert sum(findings.problems.values()) == len(told)
    return dict(findings.counts), told


def pixels(data: Images) -> np.ndarray:
    """The stored bytes, from what the data set gives."""
    images, _ = data.__getitems__(range(len(data)))
    return (images * data._deviation_C11 + data._mean_C11).round().to(torch.uint8).numpy()


# CIFAR-10's two official forms.


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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_hold_out_takes_the_last_of_each_class(labels: list[int], fraction: float) -> None:
    labels_N = np.array(labels)
    held_N = hold_out(labels_N, fraction)
    for label in set(labels):
        of_class = held_N[labels_N == label]
        assert of_class.sum() == int(len(of_class) * fraction)
        assert (np.diff(of_class.astype(int)) >= 0).all()


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


# Batches.


@pytest.fixture
def images(tmp_path: Path) -> Data:
    folder = tmp_path / "filled"
    folder.mkdir()
    labels, content = made(64)
    split = Split(labels, [content.reshape(-1, 3, 32, 32)])
    save(folder, split, split, [str(digit) for digit in range(10)])
    return load(folder, augment=True)


def test_a_batch_is_its_samples(images: Data) -> None:
    together, labels = fetch(images.test, [5, 3, 60], images.collate)
    assert together.shape == (3, 3, 32, 32)
    assert together.dtype == torch.float32
    assert (labels.dtype, labels.tolist()) == (torch.int64, [5, 3, 0])
    for place, index in enumerate([5, 3, 60]):
        image, label = images.test[index]
        assert torch.equal(image, together[place])
        assert label == labels[place]


def test_worker_processes_map_the_files_anew(images: Data) -> None:
    sent = pickle.dumps(images.train)
    assert len(sent) < 1000, "workers get the content instead of mapping the files"
    batches = [list(range(0, 30)), list(range(30, 64))]
    loader = torch.utils.data.DataLoader(pickle.loads(sent), batch_sampler=batches, collate_fn=images.collate)
    for indices, (batch, labels) in zip(batches, loader, strict=True):
        here, labels_here = images.train.__getitems__(indices)
        assert torch.equal(batch, here)
        assert torch.equal(labels, labels_here)


def test_draws_follow_from_the_indices_alone(images: Data) -> None:
    one, other = [4, 8, 15, 16, 23, 42], [42, 4, 8, 15, 16, 23]
    first, _ = images.train.__getitems__(one)
    torch.manual_seed(99)
    np.random.default_rng().random()
    again, _ = images.train.__getitems__(one)
    assert torch.equal(first, again)
    shuffled, _ = images.train.__getitems__(other)
    assert not torch.equal(first, shuffled[[1, 2, 3, 4, 5, 0]])


@settings(max_examples=30, deadline=None)
@given(
    arrays.arrays(
        np.uint8, st.tuples(st.integers(1, 6), st.just(3), st.sampled_from([8, 16]), st.sampled_from([8, 32]))
    ),
    st.integers(0, 1000),
)
def test_each_image_is_shifted_and_maybe_mirrored(content: np.ndarray, seed: int) -> None:
    height, width = content.shape[2:]
    down, right = height // 8, width // 8
    padded = np.pad(content, ((0, 0), (0, 0), (down, down), (right, right)))
    for image, whole in zip(shift_and_mirror(content, np.random.default_rng(seed)), padded, strict=True):
        windows = [whole[:, y : y + height, x : x + width] for y in range(2 * down + 1) for x in range(2 * right + 1)]
        assert any((image == w).all() or (image == w[:, :, ::-1]).all() for w in windows)


def test_shifts_and_mirrors_are_uniform() -> None:
    image = np.zeros((1, 1, 32, 32), np.uint8)
    image[..., 16, 10] = 255
    out = shift_and_mirror(image.repeat(4000, 0), np.random.default_rng(0))
    _, _, rows, columns = np.nonzero(out)
    assert len(rows) == 4000
    assert set(rows) == set(range(12, 21))
    straight = columns < 16
    assert 0.45 < straight.mean() < 0.55
    assert set(columns[straight]) == set(range(6, 15))
    assert set(columns[~straight]) == {31 - column for column in range(6, 15)}
    assert np.bincount(rows)[12:21].min() > 4000 / 9 * 0.8


# Class folders.


def picture(color: tuple[int, int, int], size: tuple[int, int] = (20, 10), form: str = "PNG") -> bytes:
    image_module = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image_module.new("RGB", size, color).save(out, form)
    return out.getvalue()


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def archive(file: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(file, "w:gz") as out:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))


RED, GREEN, BLUE = (200, 10, 20), (10, 200, 20), (10, 20, 200)
TRAIN = {
    "train/apple/2.png": picture(RED),
    "train/apple/1.PNG": picture(BLUE),
    "train/pear/1.bmp": picture(GREEN, (7, 31), "BMP"),
    "train/pear/notes.txt": b"no picture",
    "train/pear/._1.bmp": b"what another system leaves",
}
TEST = {"val/pear/1.png": picture(GREEN), "val/apple/1.png": picture(RED)}


@pytest.mark.parametrize("packed", [False, True])
def test_class_folders_and_archives(packed: bool, tmp_path: Path) -> None:
    if packed:
        archive(tmp_path / "train.tar.gz", dict(sorted(TRAIN.items())))
        archive(tmp_path / "val.tar.gz", dict(sorted(TEST.items())))
    else:
        tree(tmp_path, TRAIN | TEST)
    data = image_folder(str(tmp_path), image_size=8, augment=False)
    assert data.model_options == {"classes": 2}
    assert (pixels(data.train)[:, :, 4, 4] == [BLUE, RED, GREEN]).all()
    assert pixels(data.train).shape == (3, 3, 8, 8)
    assert data.train.__getitems__([0, 1, 2])[1].tolist() == [0, 0, 1]
    assert (pixels(data.test)[:, :, 4, 4] == [RED, GREEN]).all()
    assert data.test.__getitems__([0, 1])[1].tolist() == [0, 1]
    counts, told = checked(image_folder_module.check, tmp_path)
    assert counts == {"training images": 3, "test images": 2, "classes": 2}
    assert told == []


def test_one_level_holds_out_the_last_of_each_class(tmp_path: Path) -> None:
    files = {f"{label}/{n}.png": picture((n, n, n)) for label in ("a", "b") for n in range(5)}
    data = image_folder(str(tree(tmp_path, files)), image_size=8, augment=False)
    assert pixels(data.train)[:, 0, 0, 0].tolist() == [0, 1, 2, 3] * 2
    assert pixels(data.test)[:, 0, 0, 0].tolist() == [4, 4]


def test_bad_images_are_reported_and_refused(tmp_path: Path) -> None:
    broken = {"train/apple/3.png": picture(RED)[:40], "train/pear/0.jpg": b"", "val/plum/1.png": picture(BLUE)}
    tree(tmp_path, TRAIN | TEST | broken)
    counts, told = checked(image_folder_module.check, tmp_path)
    assert counts == {"training images": 3, "test images": 3, "classes": 2}
    assert [Path(where).name for where, _ in told] == ["3.png", "0.jpg", "val"]
    assert "plum" in told[2][1]
    with pytest.raises(UserError, match=r"class plum, which the training images lack"):
        image_folder(str(tmp_path), image_size=8)
    (tmp_path / "val/plum/1.png").unlink()
    with pytest.raises(UserError, match=r"3\.png is no image .* hetsync data check image_folder"):
        image_folder(str(tmp_path), image_size=8)


def test_a_broken_archive_is_reported_and_refused(tmp_path: Path) -> None:
    archive(tmp_path / "train.tar.gz", TRAIN)
    whole = (tmp_path / "train.tar.gz").read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive"):
        (tmp_path / "train.tar.gz").write_bytes(content)
        _, told = checked(image_folder_module.check, tmp_path)
        assert any("train.tar.gz" in where for where, _ in told)
        with pytest.raises(UserError, match=r"broken|cannot be read"):
            build("image_folder", {"path": str(tmp_path), "image_size": 8})


def test_an_image_of_another_size_is_no_cifar10(tmp_path: Path) -> None:
    tree(tmp_path, {"train/cat/1.png": picture(RED, (32, 32)), "train/cat/2.png": picture(RED, (64, 32))})
    counts, told = checked(cifar10_module.check, tmp_path)
    assert counts == {"training images": 1, "classes": 1}
    assert [what for _, what in told] == ["64×32 pixels instead of 32×32"]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hetsync data download cifar10 --to"):
        cifar10(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="is no folder"):
        image_folder(str(tmp_path / "nowhere"))
    for make in (cifar10, image_folder):
        with pytest.raises(UserError, match="no images to train with"):
            make(str(tmp_path))
    for check in (cifar10_module.check, image_folder_module.check):
        counts, told = checked(check, tmp_path)
        assert counts["classes"] == 0
        assert len(told) == 1
    with pytest.raises(UserError, match="image_size is 0"):
        image_folder(str(tmp_path), image_size=0)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder_module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install hetsync\[images\]"):
        image_folder(str(tree(tmp_path, TRAIN)))


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
