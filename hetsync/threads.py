"""Threads that work beside the model's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch


class Bell:
    """Wakes the one thread that waits for it. A lock that is held while nobody has rung: `threading.Event` makes a new
    lock for every wait, which a thread that polls would pay for at every poll.

    `ring` may come from any thread, and from a signal handler.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Who waits goes on now; who does not, will not wait the next time."""
        with suppress(RuntimeError):  # it has rung already, and nobody has heard it yet
            self._silent.release()

    def wait(self, seconds: float) -> bool:
        """Until it rings, for so long at most; True if it has rung since the last wait."""
        return self._silent.acquire(timeout=seconds)


def single_threaded(work: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """`work`, or a pool's initializer, for a thread whose tensor operations leave the other cores to the model, and
    run on the same CUDA device.

    Each thread that runs a large operation gets a team of its own. Once all teams together have more threads than there
    are cores, libgomp's threads no longer spin between operations but sleep, the model's too: a second team made the
    slices of a small ResNet on two cores half as long again.

    A new thread's CUDA device is 0, whatever the main thread's is: to pin memory or to make an event there would open
    a context of half a gigabyte on a GPU that is another rank's.
    """
    # A thread's own number is settled at its first use, from what any thread has set last: first here, then there.
    torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        torch.set_num_threads(1)
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return run


def cpu_seconds(thread: threading.Thread) -> float:
    """What a thread has taken of a core so far; nothing before it begins and once it has ended."""
    if not thread.is_alive():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
