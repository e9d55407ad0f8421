"""Signals ask a job to save and stop: SIGUSR1 at any time; SIGTERM, Ctrl-C (SIGINT) and a lost terminal (SIGHUP) as
soon as there is a job.

Before that SIGTERM and Ctrl-C end the process as they always do, since there is nothing to save. `hetsync plan` stops
searching (`Interrupts`), and writes the best so far.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from hetsync.errors import HUNG_UP, INTERRUPTED, STOPPED, TERMINATED

STATUSES = {
    signal.SIGUSR1: STOPPED,
    signal.SIGTERM: TERMINATED,
    signal.SIGINT: INTERRUPTED,
    signal.SIGHUP: HUNG_UP,
}
ONCE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # whichever comes second ends the process


class StopSignal:
    """Catches the signals. SIGUSR1 may come again and again; a second one of the others ends the process at once.

    A script's own handlers are called, too, and are in place again when its job is `over`. In a thread, where Python
    takes no handlers, nothing is caught.
    """

    def __init__(self, of_script: bool = False) -> None:
        self.caught: signal.Signals | None = None  # the first one
        self._listener: Callable[[], None] | None = None
        self._of_script = of_script
        self._before: dict[int, Any] = {}  # handlers
        self._take(signal.SIGUSR1)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call the listener at the first signal, and at once if one has come already.

        It is called from a signal handler: the main thread may hold any lock, so the listener must take none.
        """
        self._listener = listener
        for number in ONCE:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                self._take(number)
        if self.caught is not None:
            listener()

    def over(self) -> None:
        """The job has ended. SIGUSR1, which launchers repeat, would kill the process: another status."""
        if not _in_main_thread():
            return
        found = self._before if self._of_script else {number: self._before[number] for number in [signal.SIGUSR1]}
        for number, before in found.items():
            if signal.getsignal(number) not in (self._catch, signal.SIG_DFL):  # the script has set another meanwhile
                continue
            repeated = number == signal.SIGUSR1 and (self.caught is not None or not self._of_script)
            signal.signal(number, signal.SIG_IGN if repeated and not callable(before) else before or signal.SIG_DFL)

    def _take(self, number: int) -> None:
        if _in_main_thread():
            self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        _end_at_next(number)
        if self.caught is None:
            self.caught = signal.Signals(number)
            if self._listener is not None:
                self._listener()
        theirs = self._before[number]
        if callable(theirs) and theirs is not signal.default_int_handler:
            with suppress(SystemExit) if self._listener is not None else nullcontext():  # the job saves, and then exits
                theirs(number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_at_next(number: int) -> None:
    """After one of `ONCE` the next of them ends the process, but for those that are ignored."""
    if number != signal.SIGUSR1:
        for other in ONCE:
            if signal.getsignal(other) is not signal.SIG_IGN:
                signal.signal(other, signal.SIG_DFL)


@contextmanager
def handled(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, the signals go to `handle`, but for those that are ignored, as nohup has it. In the main thread."""
    found = {number: signal.getsignal(number) for number in STATUSES}
    before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """For a command that looks for something, and has the best so far: `hear` is for `handled`. A signal is `heard`;
    the first one while this `raises` also raises KeyboardInterrupt. SIGUSR1 may come again, as launchers ask by it; a
    second one of the others ends the process."""

    def __init__(self, raises: bool) -> None:
        self.raises, self.heard = raises, False

    def hear(self, number: int, frame: FrameType | None) -> None:
        _end_at_next(number)
        self.heard, raises, self.raises = True, self.raises, False
        if raises:
            raise KeyboardInterrupt


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started inside never hear the signals, which launchers and terminals send to whole groups: only ranks
    are meant. What is blocked here stays so in the new process, which therefore ends by itself or by SIGKILL."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STATUSES)
    try:
        resource_tracker.ensure_running()  # starting it with the first process would unblock two of them
        signal.pthread_sigmask(signal.SIG_BLOCK, STATUSES)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
