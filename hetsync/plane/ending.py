"""How a job ends where something fails: on all ranks, with one sentence for a user's mistake, and with its status."""

from __future__ import annotations

import _thread
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from hetsync.errors import (
    INTERNAL_ERROR,
    INTERRUPTED,
    USER_ERROR,
    OwnMistakeError,
    UserError,
    complain,
    one_sentence,
    speak_of,
)
from hetsync.launchers import HOW_TO_TOLERATE, told_rank
from hetsync.shortage import killed_for_memory, shortage

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane

SECONDS_TO_SPEAK = 1.0  # at the end
RESUMED = "training goes on with --resume (in a script: resume='auto')"


def end_job(plane: Plane, failure: BaseException, again: str = RESUMED) -> NoReturn:
    """Say what happened and end all ranks. `again`: what there is to do where another has gone."""
    if isinstance(failure, SystemExit):
        _exit_together(plane, failure)
    status, sentence = _verdict(failure)
    if status == USER_ERROR and plane.rank > 0:
        # Rank 0 has most likely found the same mistake, and its word ends this process too.
        time.sleep(1.0)
    where = "" if status == USER_ERROR and plane.rank == 0 else f"rank {plane.rank}: "
    # Here, as it reads the files of all its lines, wherever they lie.
    story = "" if sentence is not None else "".join(traceback.format_exception(failure))
    advice = list(_advice(plane, failure, again)) if status == INTERNAL_ERROR else []

    def say() -> None:
        sys.stderr.write(story)
        complain(f"{where}{one_sentence('; '.join([sentence or 'failed, so the job ends', *advice]))}")

    last_words(say)
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
    sentence = one_sentence(f"rank {plane.rank}: sys.exit was called{said}, so the job ends with status {status}")
    last_words(lambda: complain(sentence))
    plane.abort(status)
    os._exit(status)


def _verdict(failure: BaseException) -> tuple[int, str | None]:
    """Exit status, and what to say in place of a traceback."""
    from hetsync.plane.base import DamagedError, LateError, LostError, StalledError
    from hetsync.plane.faulty import NeverStruckError

    if isinstance(failure, UserError):
        return USER_ERROR, str(failure)
    if (short := shortage(failure)) is not None:
        return USER_ERROR, short
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


def _advice(plane: Plane, failure: BaseException, again: str) -> Iterator[str]:
    """What there is to do where another rank may have died, which said nothing."""
    from hetsync.plane.base import CutOffError, LostError

    if (killed := killed_for_memory()) is not None:
        yield killed
    if isinstance(failure, LostError) and not isinstance(failure, CutOffError):  # whose others may go on
        yield again
        if not plane.tolerant and again == RESUMED:
            yield f"to outlive a death, {HOW_TO_TOLERATE}, and leave fault.tolerate at auto"


def end_loop(plane: Plane, failure: BaseException) -> None:
    """A loop of the user's own has failed. A lone rank's failure goes its own way, but a mistake is one sentence.

    Raises SystemExit for such a mistake; returns where the failure is to be raised again.
    """
    from hetsync.plane.faulty import NeverStruckError

    if plane.size > 1:
        end_job(plane, failure)
    short = shortage(failure)
    if short is not None or isinstance(failure, UserError | NeverStruckError):
        complain(one_sentence(short or str(failure)))
        raise SystemExit(INTERNAL_ERROR if isinstance(failure, NeverStruckError) else USER_ERROR) from failure


@contextmanager
def opening() -> Iterator[None]:
    """Inside a plane is opened, or its job begun: what fails ends this process, with one sentence for a mistake. One of
    several ranks ends at once: an orderly end of MPI waits for the others."""
    try:
        yield
    except Exception as failure:
        alone = told_rank() is None
        mistake = OwnMistakeError(short) if (short := shortage(failure)) is not None else failure
        if isinstance(mistake, UserError):
            speak_of(mistake)
            sys.exit(USER_ERROR) if alone else leave(USER_ERROR)
        if alone:
            raise
        traceback.print_exception(failure)
        leave(INTERNAL_ERROR, f"rank {told_rank()}: failed before all ranks had met, so the job ends")


def leave(code: int, sentence: str = "") -> NoReturn:
    """End this process now, whatever its threads do, with a word to whoever started the job, and none to others."""
    try:
        last_words((lambda: complain(sentence)) if sentence else None)
    finally:  # also where a signal's handler raises meanwhile
        os._exit(code)


def last_words(say: Callable[[], object] | None = None) -> None:
    """Of a process that ends: say this on standard error, and write out what was printed, in a second at most.

    Whoever reads it may have gone, or stopped reading; a stream may be closed, or None; and a signal's handler may have
    interrupted a write to end the process.
    """

    def on_standard_error() -> None:
        if say is not None:
            say()
        sys.stderr.flush()

    deadline = time.monotonic() + SECONDS_TO_SPEAK
    for under_way in [_begun(lambda: sys.stdout.flush()), _begun(on_standard_error)]:
        under_way.acquire(timeout=max(0.0, deadline - time.monotonic()))


def _begun(act: Callable[[], object]) -> threading.Lock:
    """Free once that is over, or has failed, in a thread of its own. It is none of `threading`'s, whose start takes
    locks: a signal's handler may have interrupted this thread while it holds them."""
    under_way = threading.Lock()
    under_way.acquire()

    def run() -> None:
        with suppress(Exception):
            act()
        under_way.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # there can be no more threads
        run()
    return under_way


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

    # torch has no class for it on CPUs and Apple's GPUs.
    if isinstance(failure, torch.cuda.OutOfMemoryError) or "MPS backend out of memory" in str(failure):
        return "GPU memory"
    return "memory" if isinstance(failure, MemoryError) or "can't allocate memory" in str(failure) else None
