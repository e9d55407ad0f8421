"""Command lines as a user starts them: each in processes of its own, with a time limit and a folder of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 100.0  # this machine may be busy with other tests

QUICK_START = Path(__file__).with_name("quick_start")

SHARED_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

# Data caches are kept in one folder for all tests, away from the user's.
CACHE = Path(tempfile.gettempdir()) / f"hetsync-test-cache-{os.getuid()}"


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def sentences(self) -> list[str]:
        """What the program had to say, as against launchers and libraries."""
        lines = [line.strip(" \0") for line in self.err.splitlines()]  # mpirun ends its own words with zeros
        return [line for line in lines if line.startswith("hetsync:")]

    @property
    def story(self) -> str:
        return f"exit status {self.status}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def program(name: str) -> str:
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def needs_loadable_mpi() -> None:
    """A mpi4py that was built for the MPI of this machine takes no other."""
    (package,) = importlib.util.find_spec("mpi4py").submodule_search_locations  # type: ignore[union-attr, misc]
    if any(Path(package).glob("MPI.cpython*")):
        pytest.skip("needs a mpi4py that loads the MPI that MPI4PY_LIBMPI names")


def mpirun(ranks: int) -> list[str]:
    flags = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [program("mpirun"), *flags, "-np", str(ranks)]


def local_launcher(folder: Path) -> str:
    """launch/local, with the environment of these tests in place of one to be installed."""
    (folder / "launch").mkdir()
    said = 'say() { echo "local: $*" >&2; }\nfail() { say "$@"; exit 1; }\n'
    (folder / "launch" / "environment").write_text(f"{said}python={shlex.quote(sys.executable)}\n")
    return str(shutil.copy(ROOT / "launch" / "local", folder / "launch" / "local"))


def command(*words: str | Path | float, ranks: int | None = None) -> list[str]:
    """`hetsync-train` with these arguments, under mpirun where `ranks` are given. Devices are looked at briefly."""
    train = [program("hetsync-train"), "--run.profile_seconds", "0.1"]
    return [*(mpirun(ranks) if ranks is not None else []), *train, *map(str, words)]


def environment(**changes: str) -> dict[str, str]:
    """Nothing of a launcher around these tests; one thread a rank; Python starts as `quick_start` says."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(CACHE), "COLUMNS": "100"}
    path = [str(QUICK_START), changes.get("PYTHONPATH", kept.get("PYTHONPATH", ""))]
    return {**kept, **root, **own, **changes, "PYTHONPATH": os.pathsep.join(filter(None, path))}


@contextlib.contextmanager
def started(words: list[str], folder: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A job in a process group of its own, all of which is gone afterwards, with the files that its launcher made."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="hetsync-job-", ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(**session_folder(scratch), **(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)


def free_port() -> str:
    """Below those that a system gives to whoever asks for any, so that it is still free once torch is imported."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


@contextlib.contextmanager
def ranks_alone(
    ranks: int, words: list[str], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """A job whose launcher tells each process who it is, and nobody of a death."""
    told = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **(env or {})}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(started(words, folder, {**told, "RANK": str(rank)})) for rank in range(ranks)]


def session_folder(folder: str) -> dict[str, str]:
    """Open MPI's files in this folder. In the usual ones a killed mpirun leaves a contact file under its process id,
    and a later mpirun that happens to get the same id does not start."""
    return {"PRTE_MCA_prte_tmpdir_base": folder, "OMPI_MCA_btl_sm_backing_directory": folder}


def descendants(process: subprocess.Popen[str]) -> list[int]:
    """Ids of the processes that this one has started, and that these have started, and so on."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, table.splitlines())}
    found = [process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9 of a whole job, mpirun first; nobody is left behind."""
    pids = [process.pid, *descendants(process)] if process.poll() is None else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finished(process: subprocess.Popen[str], seconds: float = SECONDS) -> Done:
    """Of one that hangs its processes are shown, and all that it has said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        pids = ",".join(map(str, [process.pid, *descendants(process)]))
        table = ["ps", "-o", "pid,ppid,stat,etimes,wchan:20,args", "-p", pids]
        print(subprocess.run(table, capture_output=True, text=True, check=False).stdout)
        kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # somebody who was not found may hold its end of the pipes
            print(*process.communicate(timeout=10), sep="\n")
        raise
    return Done(process.returncode, out, err)


def run(
    *words: str | Path | float,
    folder: Path,
    ranks: int | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> Done:
    """`hetsync-train` to its end; `subprocess.TimeoutExpired` names the one that hangs."""
    with started(command(*words, ranks=ranks), folder, env) as process:
        return finished(process, seconds)


def summary_of(run_folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_folder / "summary.json").read_text())
    return summary
