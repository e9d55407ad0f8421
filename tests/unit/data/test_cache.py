"""The data cache: built once by whoever comes first, whole or not there, and a sentence where it cannot be."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetsync.data import cache
from hetsync.data.cache import cached_folder, fingerprint, save_rows
from hetsync.errors import UserError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hetsync" / "data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("content")
    return path


def builder(log: Path, seconds: float = 0.0) -> Callable[[Path], None]:
    """Notes each build in a log, and writes two files slowly enough for others to look in between."""

    def build(folder: Path) -> None:
        assert not list(folder.iterdir())
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        (folder / "first").write_text("1")
        time.sleep(seconds)
        (folder / "second").write_text("2")

    return build


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != cache.DIGESTS)


def in_process(target: Callable[[], Any]) -> Any:
    process = FORK.Process(target=target)
    process.start()
    return process


def test_processes_race_and_one_builds(home: Path, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ready = FORK.Barrier(5)

    def race() -> None:
        ready.wait(10)
        folder = cached_folder("race", [source], "1", builder(log, 0.3))
        # Whoever sees the folder sees all of it.
        if content(folder) != ["first", "second"]:
            os._exit(1)

    processes = [in_process(race) for _ in range(5)]
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0] * 5
    assert len(log.read_text().split()) == 1
    assert [path.name for path in home.iterdir() if path.is_dir()] == [
        cached_folder("race", [source], "1", builder(log)).name
    ]


def test_after_a_killed_build_the_next_process_builds(home: Path, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = in_process(lambda: cached_folder("killed", [source], "1", builder(log, 60)))
    deadline = time.monotonic() + 10
    while not list(home.glob(".killed*/first")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert list(home.glob(".killed*")), "the dead build left nothing: the test tests nothing"
    folder = cached_folder("killed", [source], "1", builder(log))
    assert content(folder) == ["first", "second"]
    assert len(log.read_text().split()) == 2
    assert not list(home.glob(".killed*"))


def test_a_failed_build_leaves_nothing(home: Path, source: Path, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise UserError("bad record")

    with pytest.raises(UserError, match="bad record"):
        cached_folder("failed", [source], "1", fail)
    assert not [path for path in home.iterdir() if path.is_dir()]
    assert cached_folder("failed", [source], "1", builder(tmp_path / "log")).is_dir()


def test_a_changed_source_or_version_is_built_anew(home: Path, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def folder(version: str = "1") -> Path:
        return cached_folder("changes", [tmp_path / "source.txt"], version, builder(log))

    first = folder()
    assert folder() == first
    assert folder("2") != first
    source.write_text("other content")
    second = folder()
    assert second != first
    os.utime(source, (1, 1))
    assert folder() not in (first, second)
    assert len(log.read_text().split()) == 4


def test_a_folder_stands_for_all_files_below(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    deep = tmp_path / "tree" / "branch" / "leaf"
    deep.parent.mkdir(parents=True)
    deep.write_text("1")
    first = cached_folder("tree", [tmp_path / "tree"], "1", builder(log))
    deep.write_text("22")
    assert cached_folder("tree", [tmp_path / "tree"], "1", builder(log)) != first


def test_waiting_is_bounded_and_says_for_what(
    home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "PATIENCE_SECONDS", 0.1)
    begun = FORK.Event()

    def slow(folder: Path) -> None:
        begun.set()
        time.sleep(60)

    process = in_process(lambda: cached_folder("slow", [source], "1", slow))
    try:
        assert begun.wait(10)
        with pytest.raises(UserError, match=r"preparing the data cache .*slow-.* for more than 1 s"):
            cached_folder("slow", [source], "1", slow, limit_seconds=0.6)
        assert "waiting for another process that prepares" in capsys.readouterr().err
    finally:
        process.kill()
        process.join(10)


def test_no_place_for_a_cache_is_a_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file where a folder should be
    with pytest.raises(UserError, match=r"cannot be written: .*set XDG_CACHE_HOME"):
        cached_folder("nowhere", [source], "1", builder(tmp_path / "log"))


def test_a_full_disk_is_a_sentence(home: Path, source: Path) -> None:
    def fill(folder: Path) -> None:
        save_rows(Path("/dev/full"), 1 << 16, [np.zeros((1 << 16, 8))])

    with pytest.raises(UserError, match=r"cannot be written: No space left .*free space"):
        cached_folder("full", [source], "1", fill)

    def numpy_fills(folder: Path) -> None:
        raise OSError("80 requested and 16 written")

    with pytest.raises(UserError, match="cannot be written: 80 requested and 16 written; free space"):
        cached_folder("full", [source], "1", numpy_fills)
    assert not [path for path in home.iterdir() if path.is_dir()]


def test_a_source_that_cannot_be_read_is_not_the_caches_fault(home: Path, source: Path) -> None:
    def read(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        cached_folder("unread", [source], "1", read)
    with pytest.raises(FileNotFoundError):
        cached_folder("unread", [source.with_name("missing")], "1", read)


def test_a_cache_once_built_may_be_read_only(home: Path, source: Path, tmp_path: Path) -> None:
    folder = cached_folder("kept", [source], "1", builder(tmp_path / "log"))
    for lock in home.glob("*.lock"):
        lock.unlink()
    assert cached_folder("kept", [source], "1", builder(tmp_path / "log")) == folder
    assert not list(home.glob("*.lock"))


# Damage.

LARGE = 40 * 2**20


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def other_half(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"x" * (LARGE // 2))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit": lambda folder: flip(folder / "second"),
    "cut": lambda folder: os.truncate(folder / "large", LARGE - 1),
    "longer": lambda folder: os.truncate(folder / "large", LARGE + 1),
    "half": lambda folder: other_half(folder / "large"),
    "missing": lambda folder: (folder / "first").unlink(),
    "one more": lambda folder: (folder / "third").touch(),
    "no digests": lambda folder: (folder / cache.DIGESTS).unlink(),
    "torn digests": lambda folder: (folder / cache.DIGESTS).write_text("["),
    "other digests": lambda folder: (folder / cache.DIGESTS).write_text("[]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_built_once_more(
    home: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    log = tmp_path / "log"
    small = builder(log)

    def build(folder: Path) -> None:
        small(folder)
        with (folder / "large").open("wb") as file:
            file.truncate(LARGE)

    folder = cached_folder("damaged", [source], "1", build)
    DAMAGE[kind](folder)
    for _ in range(2):
        assert cached_folder("damaged", [source], "1", build) == folder
        assert content(folder) == ["first", "large", "second"]
        assert (folder / "second").read_text() == "2"
    assert len(log.read_text().split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"the data cache {folder} is damaged (" in said
    assert not list(home.glob(".damaged*"))


def test_what_is_damaged_again_is_a_sentence(
    home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not give back what was written."""
    numbers = iter(range(1000))
    monkeypatch.setattr(cache, "fingerprint", lambda path: str(next(numbers)))
    with pytest.raises(UserError, match=r"is damaged as soon as it is built \(first .*set XDG_CACHE_HOME"):
        cached_folder("worn", [source], "1", builder(tmp_path / "log"))


@pytest.mark.parametrize("size", [0, 1, 2**20, 5 * 2**20, 16 * 2**20])
def test_files_of_some_megabytes_are_looked_at_in_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    seen = {fingerprint(path)}
    places = sorted({0, size // 3, size // 2, size - 1} if size else ())
    for place in places:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(fingerprint(path))
    assert len(seen) == 1 + len(places)


def test_rows_come_back_as_saved(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.int16).reshape(10, 3, 2)
    save_rows(tmp_path / "rows.npy", 10, (rows[i : i + 4] for i in (0, 4, 8)))
    back = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert back.dtype == np.int16
    assert (back == rows).all()
    with pytest.raises(ValueError, match="4 rows came where 10"):
        save_rows(tmp_path / "rows.npy", 10, [rows[:4]])
