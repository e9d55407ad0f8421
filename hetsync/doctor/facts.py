"""What is found on a host. Nothing here judges, and nothing that is broken raises: it is a fact, too."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetsync.errors import one_sentence
from hetsync.launchers import LAUNCHER_PREFIXES, half_told, launched_by_mpi, launched_by_torch, ranks_started
from hetsync.version import version_with_commit

PROBE_SECONDS = 120.0
PACKAGES = ("torch", "mpi4py", "numpy")
WRITTEN_BYTES = 2**20  # a disk that takes these is not full
CLOCK_CALLS = 1000


@dataclass(frozen=True)
class Mpi:
    """The MPI that mpi4py loads; with a `failure` there is none. `cuda_aware`: None where it does not say."""

    failure: str | None = None
    library: str = ""
    thread_multiple: bool = False
    cuda_aware: bool | None = None
    ulfm: bool = False


@dataclass(frozen=True)
class Torch:
    """With a `failure` it does not load. `cuda` and `nccl` are versions that it was built with. `without_kernels`:
    those of the `gpus` for which it was not built."""

    failure: str | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    without_kernels: tuple[str, ...] = ()
    nccl: str | None = None
    gloo: bool = False


@dataclass(frozen=True)
class Horovod:
    installed: bool = False
    failure: str | None = None
    carriers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Storage:
    """A folder, which need not be there yet; `failure` is why nothing can be written there."""

    path: str
    free_bytes: int = 0
    failure: str | None = None


@dataclass(frozen=True)
class Limits:
    """None is unlimited."""

    open_files: int | None
    locked_bytes: int | None
    infiniband: bool = False


@dataclass(frozen=True)
class Facts:
    """Of one host, as one of the job's ranks there sees it.

    `required`: the oldest versions that will do. `launcher_left_out`: what a launcher like torchrun has not
    set, where it has set other variables.
    """

    host: str
    python: str
    hetsync: str
    packages: Mapping[str, str | None]
    mpi: Mpi
    torch: Torch
    run_folder: Storage
    shared_memory: Storage
    limits: Limits
    required: Mapping[str, str] = field(default_factory=dict)
    launcher: str | None = None
    launcher_left_out: str | None = None
    ranks: int = 1
    mpirun: str | None = None
    ulfm_in_force: bool = False
    nvidia_gpus: tuple[str, ...] = ()
    horovod: Horovod = field(default_factory=Horovod)
    torchrun: bool = True
    clock_call_seconds: float = 0.0


def gather(run_folder: Path) -> Facts:
    """All of it, within minutes whatever hangs. `run_folder` is where runs are to be written."""
    packages = {name: _version(name) for name in PACKAGES}
    by_torch, by_mpi = launched_by_torch(), launched_by_mpi()
    return Facts(
        host=socket.gethostname(),
        python=".".join(map(str, sys.version_info[:3])),
        hetsync=version_with_commit(),
        packages=packages,
        required=_required(),
        launcher="torchrun" if by_torch else "MPI" if by_mpi else None,
        launcher_left_out=half_told(),
        ranks=max(1, by_torch, ranks_started()),
        mpi=Mpi(**probed("mpi")),
        mpirun=_first_line("mpirun", "--version"),
        ulfm_in_force=os.environ.get("OMPI_MCA_mpi_ft_enable") == "1",  # noqa: SIM112 - Open MPI's own name
        torch=Torch(**_tuples(probed("torch"))),
        nvidia_gpus=_nvidia_gpus(),
        horovod=Horovod(True, **_tuples(probed("horovod"))) if find_spec("horovod") else Horovod(),
        torchrun=_program("torchrun") is not None,
        run_folder=storage(run_folder),
        shared_memory=storage(Path("/dev/shm")),
        limits=_limits(),
        clock_call_seconds=_clock_call_seconds(),
    )


def probed(subject: str) -> dict[str, Any]:
    """What `probe.py` prints of a library, in a process of its own: what is broken may crash, hang or end its process.

    That process is none of the job's ranks.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    words = [sys.executable, "-m", "hetsync.doctor.probe", subject]
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"it did not load within {PROBE_SECONDS:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return {"failure": one_sentence(f"loading it ended the process with {ended}: {done.stderr[-300:]}")}


def storage(path: Path) -> Storage:
    """Free bytes at a path, tried by writing; leaves nothing behind."""
    try:
        there = nearest(path)
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Storage(str(path), failure=error.strerror or str(error))
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".hetsync-doctor-") as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Storage(str(path), free, error.strerror or str(error))
    return Storage(str(path), free)


def nearest(path: Path) -> Path:
    """The path itself, or the first above it that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _required() -> dict[str, str]:
    """From HetSync's own metadata; empty where it runs without being installed."""
    try:
        lines = metadata.requires("hetsync") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w-]+) *>= *([\d.]+) *$", line) for line in lines)
    return {match[1]: match[2] for match in found if match and match[1] in PACKAGES}


def _program(name: str) -> str | None:
    """In the PATH, or beside the running interpreter."""
    beside = Path(sys.executable).with_name(name)
    return shutil.which(name) or (str(beside) if beside.exists() else None)


def _first_line(name: str, *words: str) -> str | None:
    said = _said(name, *words)
    return next((line.strip() for line in (said or "").splitlines() if line.strip()), None)


def _nvidia_gpus() -> tuple[str, ...]:
    """As the driver sees them, whatever torch was built for."""
    said = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return tuple(line.strip() for line in (said or "").splitlines() if line.strip())


def _said(name: str, *words: str) -> str | None:
    program = _program(name)
    if program is None:
        return None
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _limits() -> Limits:
    def soft(kind: int) -> int | None:
        limit = resource.getrlimit(kind)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    devices = Path("/sys/class/infiniband")
    infiniband = devices.is_dir() and any(devices.iterdir())
    return Limits(soft(resource.RLIMIT_NOFILE), soft(resource.RLIMIT_MEMLOCK), infiniband)


def _clock_call_seconds() -> float:
    began = time.perf_counter()
    for _ in range(CLOCK_CALLS):
        time.perf_counter()
    return (time.perf_counter() - began) / CLOCK_CALLS
