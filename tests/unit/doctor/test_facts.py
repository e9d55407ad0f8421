"""Facts of machines where things are broken."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from jobs import needs_loadable_mpi

from hetsync.doctor import facts
from hetsync.doctor.facts import Mpi, probed, storage
from hetsync.doctor.probe import mpi_among


def interpreter(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of Python: what a probe runs in."""
    stub = folder / "python"
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("kill -SEGV $$", "loading it ended the process with signal 11"),
        ("echo no PMI >&2; exit 14", "loading it ended the process with status 14: no PMI"),
        ("exec sleep 60", "it did not load within 1 s"),
    ],
)
def test_what_breaks_a_probe_is_a_fact(
    script: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter(tmp_path, script, monkeypatch)
    monkeypatch.setattr(facts, "PROBE_SECONDS", 1.0)
    assert Mpi(**probed("mpi")).failure.startswith(failure)  # type: ignore[union-attr]


def test_a_probe_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/libmpi.so")
    interpreter(
        tmp_path,
        """env | grep -q '^OMPI_COMM\\|^PMIX' && exit 3; echo "{\\"library\\": \\"$MPI4PY_LIBMPI\\"}\"""",
        monkeypatch,
    )
    assert Mpi(**probed("mpi")) == Mpi(library="/opt/libmpi.so")


def test_what_another_mpi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py that was built for an MPI that is not there."""
    needs_loadable_mpi()
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    assert "/nonexistent/libmpi.so" in str(probed("mpi")["failure"])


def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = storage(tmp_path / "not" / "there")
    assert found.failure is None
    assert found.free_bytes > 2**20
    (tmp_path / "file").touch()
    assert storage(tmp_path / "file").failure == "Not a directory"
    assert storage(tmp_path / "file" / "below").failure == "Not a directory"
    assert storage(Path("/proc/runs")).failure is not None

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert storage(tmp_path).failure == "No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_mpi_is_found_in_a_folder_with_a_blank() -> None:
    path = "/home/a b/venv/lib/libmpi.so.40.40.7"
    maps = f"7f00-7f01 r-xp 00000000 08:01 12   /usr/lib/libc.so.6\n7f02-7f03 r-xp 00000000 08:01 13   {path}\n"
    assert mpi_among(maps) == path
    assert mpi_among("7f00-7f01 r-xp 00000000 08:01 12   /usr/lib/libc.so.6\n") is None
