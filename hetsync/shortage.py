"""What a machine has run out of, as libraries' errors tell it, and of memory the kernel's counts; and what to do about
it."""

from __future__ import annotations

import _thread
import errno
import os
import resource
import sys
import threading
from pathlib import Path

from hetsync.cgroups import memory_kills, most_processes

SHARED = Path("/dev/shm")
MIB = 2**20
KILLED_BEFORE = memory_kills()  # as this process starts


def shortage(error: BaseException) -> str | None:
    """A sentence with the remedy, where that is what the error says. Most libraries have nothing but words for it."""
    words, number = str(error), error.errno if isinstance(error, OSError) else None
    if "unable to allocate shared memory" in words:  # torch 2.11 calls what is full by another name
        return no_shared_memory()
    if "shared memory" in words and os.strerror(errno.ENOSPC) in words:
        return no_shared_memory()
    if number == errno.ENOSPC and str(getattr(error, "filename", None)).startswith(str(SHARED)):
        return no_shared_memory()
    if number == errno.EAGAIN or "can't start new thread" in words or os.strerror(errno.EAGAIN) in words:
        return no_processes()
    return None


def no_shared_memory() -> str:
    about = os.statvfs(SHARED)
    free, all_ = (blocks * about.f_frsize / MIB for blocks in (about.f_bavail, about.f_blocks))
    return (
        f"{SHARED} is full, by which data workers hand over batches ({free:,.1f} of {all_:,.1f} MiB are left): give it"
        " more (docker: --ipc=host or --shm-size 8g), remove what ended jobs have left there, or set data.workers to 0"
        " (in a script: num_workers=0 or workers=0)"
    )


def no_processes() -> str:
    limit, granted = resource.getrlimit(resource.RLIMIT_NPROC)[0], most_processes()
    limits = [] if limit == resource.RLIM_INFINITY else [f"ulimit -u is {limit:,}, for all that this user runs here"]
    limits += [] if granted is None else [f"its cgroup may have {granted:,}: pids.max, docker's --pids-limit"]
    told = f" ({'; '.join(limits)})" if limits else ""
    return f"no more threads or processes can be started{told}: raise that, or start fewer ranks and data workers"


def killed_for_memory(before: int = KILLED_BEFORE) -> str | None:
    """What who outlives it says for who was killed so; None where nobody has been since there were so many."""
    killed = memory_kills() - before
    if killed <= 0:
        return None
    return (
        f"the kernel has killed {killed} {'process' if killed == 1 else 'processes'} of this host for want of memory:"
        " lower data.batch_size (or sync.pins; in a script: batch_size, pins=), or raise the job's memory limit"
    )


def can_start_threads(number: int) -> bool:
    """Whether so many would run beside each other now. A library that cannot start its own may hang or abort."""
    over, left = threading.Event(), threading.Semaphore(0)

    def run() -> None:
        over.wait()
        left.release()

    started = 0
    try:
        for _ in range(number):
            _thread.start_new_thread(run, ())
            started += 1
    except RuntimeError:
        pass
    over.set()
    for _ in range(started):
        left.acquire()
    return started == number


if __name__ == "__main__":  # for launch/local, which knows how many there were before its job
    print(killed_for_memory(int(sys.argv[1])) or "", end="")
