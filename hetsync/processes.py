"""The processes of a job, as their peers on the same host see them: what they do, where in Python they are, how they
are ended. Linux only: elsewhere nothing can be told of them, and none is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SECONDS_TO_WRITE = 0.5  # a stack: a process that runs does so at once
POLL_SECONDS = 0.01
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """`host` and its space of process ids; `started` tells it from a later one of the same id, 0 where nothing can be
    told. Its stacks are written to its open file `stacks`, -1 where they are not."""

    host: str
    pid: int
    started: int = 0
    stacks: int = -1

    @property
    def state(self) -> str:
        """What it does, of this host: runs, stopped or gone."""
        found = _stat(self.pid)
        if found is None or found[1] != self.started:
            return "gone"
        return "stopped" if found[0] in "Tt" else "runs"

    @property
    def has_gone(self) -> bool:
        """Is it known to have ended? False where it was on another host."""
        return self.started > 0 and self.host == _host() and self.state == "gone"

    def kill(self) -> bool:
        """End it at once. False where it is not on this host, or has gone."""
        if not self.started or self.host != _host() or self.state == "gone":
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False

    def stack(self) -> str:
        """Where in Python its threads are, written by itself; empty where it cannot."""
        if self.stacks < 0 or self.host != _host() or self.state != "runs":
            return ""
        file = Path(f"/proc/{self.pid}/fd/{self.stacks}")
        with contextlib.suppress(OSError):
            before = size = file.stat().st_size
            os.kill(self.pid, signal.SIGUSR2)
            deadline = time.monotonic() + SECONDS_TO_WRITE
            while time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                now = file.stat().st_size
                if size == now > before:  # it writes no more
                    return file.read_bytes()[before:].decode(errors="replace")
                size = now
        return ""


class Stacks:
    """While it is open, this process writes its threads' Python stacks where its peers on this host can read them, once
    it gets SIGUSR2: also while it computes in C and keeps Python's lock. A handler of the user's own stays."""

    def __init__(self) -> None:
        free = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        self._file = tempfile.TemporaryFile() if free else None  # noqa: SIM115
        if self._file is not None:
            faulthandler.register(signal.SIGUSR2, self._file)
        self.process = own_process()._replace(stacks=-1 if self._file is None else self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._file.close()
            self._file = None


def own_process() -> Process:
    found = _stat(os.getpid())
    return Process(_host(), os.getpid(), 0 if found is None else found[1])


def own_stack() -> str:
    """Where in Python the threads of this process are; empty where no file can be written.

    faulthandler reads all of it while no other thread moves on. To walk the frames of a thread one by one while it runs
    on is a segmentation fault now and then, where garbage is collected meanwhile (seen with CPython 3.11.7).
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""


def _host() -> str:
    """Processes that can see each other have the same. Every machine numbers its first space of process ids alike."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def boot_id() -> str:
    """Of this host's kernel: hosts may have one name, as images and containers give it, but no two have started at
    once. Containers of one host share it. Empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """State and moment of start, in the system's units; None where there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return None
