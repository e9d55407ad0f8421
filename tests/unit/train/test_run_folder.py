"""Run folders: one job at a time in each, taken over from the dead, and no two jobs in one by accident."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetsync.config.schema import RunConfig
from hetsync.errors import UserError
from hetsync.plane.local import LocalPlane
from hetsync.train import run_folder
from hetsync.train.run_folder import LOCK, keep, mark_failed, shared_folder, status_of, working_folder

FORK = multiprocessing.get_context("fork")


def working(folder: Path, resume: bool = False) -> Any:
    run = RunConfig(dir=None if resume else str(folder))
    return working_folder(LocalPlane(), run, folder if resume else None)


class Holder:
    """Another process that works in the folder until it is told to end, or killed."""

    def __init__(self, folder: Path) -> None:
        there = FORK.Event()
        self.end, end = FORK.Pipe()

        def work() -> None:
            with working(folder) as place:
                (place / "recipe.yaml").write_text("")
                there.set()
                end.poll(60)

        self.process = FORK.Process(target=work)
        self.process.start()
        assert there.wait(10)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.end.send(None)
        self.process.join(10)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_job_is_refused_and_told_by_whom(tmp_path: Path, resume: bool) -> None:
    folder = tmp_path / "run"
    with Holder(folder) as holder:
        by = f"process {holder.process.pid} on {socket.gethostname()}"
        with pytest.raises(UserError, match=rf"{folder} .*{by}.*wait"), working(folder, resume):
            pytest.fail("both work in one folder")
    with working(folder, resume):
        assert (folder / LOCK).exists()
    assert [path.name for path in folder.iterdir()] == ["recipe.yaml"]


def test_a_folder_that_a_newcomers_host_does_not_see(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not on this host"), shared_folder(tmp_path / "elsewhere"):
        pass


def test_the_folder_of_a_killed_job_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Holder(folder) as holder:
        holder.kill()
        assert (folder / LOCK).exists()
        with working(folder, resume=True):
            assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert not (folder / LOCK).exists()


def test_a_job_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a mistake"), working(tmp_path / "run"):
        raise UserError("a mistake")
    assert not (tmp_path / "run").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(UserError, match="a mistake"), working(tmp_path / "old", resume=True):
        raise UserError("a mistake")
    assert (tmp_path / "old").is_dir()


@pytest.mark.parametrize("left", ["", ".partial-samples-000000000128"])
def test_a_job_that_died_in_its_first_checkpoint_is_started_afresh(tmp_path: Path, left: str) -> None:
    (tmp_path / "checkpoints" / left).mkdir(parents=True)
    (tmp_path / "summary.json").write_text('{"status": "running"}')
    with working(tmp_path):
        pass


def test_two_jobs_of_one_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    with contextlib.ExitStack() as jobs:
        made = [jobs.enter_context(working_folder(LocalPlane(), RunConfig(name="x"), None)) for _ in range(3)]
    assert [path.name for path in made] == [f"x-20260101-000000{more}" for more in ("", "-2", "-3")]


# Without locks of the file system the file's word counts.

BEFORE: dict[str, Callable[[], dict[str, Any]]] = {
    "dead": lambda: {"host": socket.gethostname(), "pid": dead_process()},
    "alive": lambda: {"host": socket.gethostname(), "pid": os.getppid()},
    "elsewhere": lambda: {"host": "another", "pid": dead_process()},
}


def dead_process() -> int:
    process = FORK.Process(target=lambda: None)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


@pytest.mark.parametrize("before", BEFORE)
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / LOCK).write_text(json.dumps(BEFORE[before]()))
    if before == "dead":
        with working(tmp_path, resume=True):
            pass
        assert not (tmp_path / LOCK).exists()
        return
    remove = f"remove {tmp_path / LOCK}"
    with pytest.raises(UserError, match=remove), working(tmp_path, resume=True):
        pytest.fail("taken over from a job that may be alive")
    assert (tmp_path / LOCK).exists()


# Recipes.


def test_what_a_file_held_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for text in ("a", "b", "b", "c", "a"):
        keep(path, text)
    held = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert held == {"recipe.yaml": "a", "recipe-1.yaml": "a", "recipe-2.yaml": "b", "recipe-3.yaml": "c"}


def test_other_users_write_nothing_in_a_run_folder(tmp_path: Path, no_umask: None) -> None:
    with working(tmp_path / "runs" / "run") as folder:
        (folder / "summary.json").write_text("{}")
        made = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
        assert {path.name: oct(path.stat().st_mode & 0o777) for path in made} == {
            "runs": "0o775",
            "run": "0o775",
            "job.lock": "0o644",
            "summary.json": "0o664",
        }
    (tmp_path / "after").touch()
    assert (tmp_path / "after").stat().st_mode & 0o777 == 0o666, "the user's umask is back"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, resume: bool) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UserError, match=f"{tmp_path} can be written by every user.*: chmod -R o-w"):
        working(tmp_path, resume).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_permissions_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(run_folder, "_ignores_modes", lambda folder: True)
    with working(tmp_path):
        pass
    assert "is on a file system without permissions" in capsys.readouterr().err


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize(("before", "after"), [("running", "failed"), ("finished", "finished"), ("stopped", "stopped")])
def test_only_a_run_under_way_fails(tmp_path: Path, before: str, after: str) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": before, "ranks": 2}))
    mark_failed(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": after, "ranks": 2}


@pytest.mark.parametrize("content", [None, "", "[]", "3"])
def test_a_failure_without_a_readable_summary_stays_what_it_is(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    mark_failed(tmp_path)
    assert status_of(tmp_path) == (None if content is None else "unknown")


def test_a_run_that_failed_before_it_saved_gives_its_folder_back(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "failed"}')
    with working(tmp_path) as folder:
        assert folder == tmp_path.resolve()
