"""Other programs than HetSync under mpirun, on this machine."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.local_job import ROOT

PORTS = range(20_000, 32_000)
SECONDS_TO_SETTLE = 0.1


def mpirun(ranks: int) -> list[object]:
    beside = Path(sys.executable).parent / "mpirun"
    program = beside if beside.exists() else shutil.which("mpirun") or "mpirun"
    flags = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [program, *flags, "-np", ranks]


def environment() -> dict[str, str]:
    """One thread a rank; a rendezvous for torch.distributed on this machine."""
    told = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told["GLOO_SOCKET_IFNAME"] = "lo"
    if os.getuid() == 0:
        told |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **told}


def launched_as() -> tuple[int, int]:
    """Rank and world size as Open MPI or torchrun tell them."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    return int(rank), int(size)


def end_groups() -> None:
    """Of torch.distributed. DistributedDataParallel keeps Gloo's threads alive (torch 2.13), and one that asks for
    Python's lock in the interpreter's end, to destroy the work of the last collective, aborts the process."""
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(SECONDS_TO_SETTLE)


def free_port() -> int:
    """Of those that the kernel gives to nobody who does not name them: it stays free until the job takes it."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    sys.exit(f"no free port among {PORTS.start} to {PORTS.stop}")


def end_session(leader: int) -> None:
    """The launcher, and ranks that may be process groups of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)
        except ProcessLookupError:
            continue


def failure_of(command: Sequence[object], env: dict[str, str], limit_seconds: float) -> str | None:
    """Runs a job to its end, from the clone's root, where its modules are; what went wrong, if anything did."""
    words = list(map(str, command))
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True) as job:
        try:
            said, _ = job.communicate(timeout=limit_seconds)
        except BaseException as failure:
            job.terminate()  # mpirun ends its ranks
            if not isinstance(failure, subprocess.TimeoutExpired):
                raise
            job.communicate()
            return f"failed: it did not end within {limit_seconds:.0f} s"
    if job.returncode:
        print(said[-3000:], file=sys.stderr, flush=True)
        return f"failed: it ended with status {job.returncode}"
    return None
