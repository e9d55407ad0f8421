"""How a job ends where something fails: on all ranks, with one sentence for a user's mistake, and with its status."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from hetsync.errors import INTERNAL_ERROR, INTERRUPTED, USER_ERROR, UserError, complain, one_sentence

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane


def end_job(plane: Plane, failure: BaseException) -> NoReturn:
    """Say what happened and end all ranks."""
    if isinstance(failure, SystemExit):
        _exit_together(plane, failure)
    status, sentence = _verdict(failure)
    if sentence is None:
        traceback.print_exception(failure)
        sentence = "failed, so the job ends"
    if status == USER_ERROR and plane.rank > 0:
        # Rank 0 has most likely found the same mistake, and its word ends this process too.
        time.sleep(1.0)
    where = "" if status == USER_ERROR and plane.rank == 0 else f"rank {plane.rank}: "
    complain(f"{where}{one_sentence(sentence)}")
    plane.abort(status)
    os._exit(status)


def _exit_together(plane: Plane, failure: SystemExit) -> NoReturn:
    """The model or the data called sys.exit on this rank, and the others would wait for it."""
    if plane.size == 1:
        raise failure
    told = failure.code is None or isinstance(failure.code, int)
    code = int(failure.code or 0) if told else INTERNAL_ERROR  # as Python has it
    status = code & 0xFF or int(code != 0)  # systems keep eight bits, and none of a failure may look like success
    said = "" if told else f": {failure.code}"
    complain(one_sentence(f"rank {plane.rank}: sys.exit was called{said}, so the job ends with status {status}"))
    plane.abort(status)
    os._exit(status)


def _verdict(failure: BaseException) -> tuple[int, str | None]:
    """Exit status, and what to say in place of a traceback."""
    from hetsync.plane.base import DamagedError, LateError, LostError, StalledError
    from hetsync.plane.faulty import NeverStruckError

    if isinstance(failure, UserError):
        return USER_ERROR, str(failure)
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            USER_ERROR,
            f"cannot write: {failure.strerror}; free space and go on with --resume (in a script: resume='auto')",
        )
    if (lacking := memory_lacking(failure)) is not None:
        return USER_ERROR, f"out of {lacking}: lower batch_size, or this rank's share by sync.pins (in a script: pins=)"
    if isinstance(failure, StalledError | LateError | LostError | DamagedError | NeverStruckError):
        return INTERNAL_ERROR, str(failure)
    if isinstance(failure, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    return INTERNAL_ERROR, None


def end_loop(plane: Plane, failure: BaseException) -> None:
    """A loop of the user's own has failed. A lone rank's failure goes its own way, but a mistake is one sentence.

    Raises SystemExit for such a mistake; returns where the failure is to be raised again.
    """
    from hetsync.plane.faulty import NeverStruckError

    if plane.size > 1:
        end_job(plane, failure)
    if isinstance(failure, UserError | NeverStruckError):
        complain(one_sentence(str(failure)))
        raise SystemExit(USER_ERROR if isinstance(failure, UserError) else INTERNAL_ERROR) from failure


def leave(code: int) -> NoReturn:
    """End this process now, whatever its threads do, and say nothing to others."""
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it has gone; or a signal's handler leaves, which has interrupted a write.
        with suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


@contextmanager
def within(seconds: float, otherwise: Callable[[], None]) -> Iterator[None]:
    """What is inside may wait for ever, without Python's hearing of anything; `otherwise` then ends this process."""
    late = threading.Timer(seconds, otherwise)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def memory_lacking(failure: BaseException) -> str | None:
    """The kind of memory of which there was too little, if that is what the failure says."""
    import torch

    if isinstance(failure, torch.cuda.OutOfMemoryError):
        return "GPU memory"
    # torch has no class for it on CPUs.
    return "memory" if isinstance(failure, MemoryError) or "can't allocate memory" in str(failure) else None
