"""Folders and archives of images, a class each: what is read, split and complained of."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import BLUE, GREEN, RED, archive, checked, picture, pixels, tree

from hetsync import extras
from hetsync.data import build
from hetsync.data.sets import cifar10 as cifar10_module
from hetsync.data.sets import image_folder as image_folder_module
from hetsync.data.sets.cifar10 import cifar10
from hetsync.data.sets.image_folder import image_folder
from hetsync.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


TRAIN = {
    "train/apple/2.png": picture(RED),
    "train/apple/1.PNG": picture(BLUE),
    "train/pear/1.bmp": picture(GREEN, (7, 31), "BMP"),
    "train/pear/notes.txt": b"no picture",
    "train/pear/._1.bmp": b"what another system leaves",
}
NAMELESS = f"no image by its name ({', '.join(sorted(image_folder_module.SUFFIXES))})"
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
    (stray,) = told
    assert stray[0].endswith("train/pear/notes.txt" if not packed else "train.tar.gz, train/pear/notes.txt")
    assert stray[1].startswith("no image by its name")


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    tree(
        tmp_path,
        TRAIN | TEST | {"train/plum/.hidden": b"", "train/list.csv": b"", "val/apple/more/1.png": picture(RED)},
    )
    (tmp_path / "val/pear/1.png").unlink()
    counts, told = checked(image_folder_module.check, tmp_path)
    assert counts == {"training images": 3, "test images": 1, "classes": 2}
    assert [(Path(where).name, what.partition(":")[0]) for where, what in told] == [
        ("list.csv", "a file where folders of classes are expected"),
        ("notes.txt", NAMELESS),
        ("plum", "a class without images"),
        ("more", NAMELESS),
        ("pear", "a class without images"),
    ]


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
    assert [Path(where).name for where, _ in told] == ["notes.txt", "3.png", "0.jpg", "val"]
    assert "plum" in told[3][1]
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
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install pillow"):
        image_folder(str(tree(tmp_path, TRAIN)))
