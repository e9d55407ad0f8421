"""Threads that work beside the model's."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

T = TypeVar("T")

ENDING_SECONDS = 5.0  # for what a thread is at when it is to end
LONGEST_GAP_SECONDS = 1.0  # between two looks at what is awaited: a longer one is this process's own


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


def single_threaded(work: Callable[[], None]) -> Callable[[], None]:
    """`work` for a thread whose tensor operations leave the other cores to the model, and run on the same CUDA device.

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


class HelperThread:
    """Does what it is given, in order, as a ThreadPoolExecutor of one thread has it. But Python does not wait for it in
    the end: a read may block for ever."""

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._dropped = False
        work = single_threaded(self._run)
        self._thread = threading.Thread(target=lambda: self._begin(work), name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._dropped:
                future.cancel()
            else:
                self._given.put((future, partial(function, *arguments)))
        return future

    def drop(self) -> None:
        """Cancel what has not begun, and what is still to come."""
        with self._lock, suppress(queue.Empty):
            self._dropped = True
            while (given := self._given.get_nowait()) is not None:
                given[0].cancel()
        self._given.put(None)

    def close(self) -> None:
        """`drop`, and let what has begun end, since a thread that Python's end meets within torch's code ends the
        process by abort."""
        self.drop()
        self._thread.join(ENDING_SECONDS)

    def _begin(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as failure:  # of the device
            while (given := self._given.get()) is not None:
                _settle(given[0], partial(_raise, failure))

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            _settle(*given)
            del given  # or the newest result would stay until the next


def _raise(failure: Exception) -> NoReturn:
    raise failure


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """By what the function returns or raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class LivedSeconds:
    """For how long this process has waited, of which the clock knows nothing where it was stopped: whom it waits for
    may have been stopped, too, and what they said meanwhile is still unread. Look often."""

    def __init__(self) -> None:
        self._seconds, self._looked_at = 0.0, time.monotonic()

    def look(self) -> float:
        now = time.monotonic()
        self._seconds += min(LONGEST_GAP_SECONDS, now - self._looked_at)
        self._looked_at = now
        return self._seconds


def cpu_seconds(thread: threading.Thread) -> float:
    """What a thread has taken of a core so far; nothing before it begins and once it has ended."""
    if not thread.is_alive():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
