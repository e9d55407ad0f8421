"""Mistakes that a user can mend, and how users hear of what goes wrong."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn

from hetsync.launchers import first_rank, told_rank

# Exit statuses of a job. The second line's are of one that has saved after a signal: hetsync/slurm/batch.sh requeues on
# STOPPED, the others are what shells expect.
INTERNAL_ERROR, USER_ERROR = 1, 2
STOPPED, TERMINATED, INTERRUPTED, HUNG_UP = 85, 143, 130, 129
TOO_FEW_LEFT = 86  # of one that has saved since too few ranks are left: requeued like STOPPED

LONGEST_SHOWN = 100  # characters of a value
LONGEST_SENTENCE = 1000  # characters
REPEAT_SECONDS = 60.0
SECONDS_FOR_FIRST = 2.0  # to end the job, of which it has then said why
STANDARD_ERROR = 2  # its file descriptor


class UserError(ValueError):
    """Bad input: one sentence that names the key, the value and the remedy.

    The command line prints it once for the whole job, without a traceback, and the job ends non-zero.
    """


class CommonMistakeError(UserError):
    """A mistake that all ranks have heard of: rank 0 says it."""


class OwnMistakeError(UserError):
    """A mistake that this rank alone may see, before ranks can speak to each other: it says so whichever it is."""


def complain(sentence: str) -> None:
    """Tell whoever started the job, on standard error."""
    _write(f"hetsync: {sentence}\n")


def announce(what: str) -> None:
    """Say what is about to happen, on standard error: nothing is wrong."""
    _write(f"{what}\n")


def _write(line: str) -> None:
    if sys.stderr is None:  # it was closed before the start
        return
    with contextlib.suppress(OSError):  # a full disk or a closed pipe ends no job
        try:
            sys.stderr.write(line)  # not print: unbuffered, it writes the line's end apart
            sys.stderr.flush()
        except RuntimeError:  # a signal's handler speaks, and has interrupted this thread in the middle of the same
            os.write(STANDARD_ERROR, line.encode(errors="backslashreplace"))


def brief(value: object) -> str:
    """A value as it stands in a sentence: long ones are cut."""
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def one_sentence(message: str) -> str:
    return " ".join(message.split())[:LONGEST_SENTENCE]


def cause(error: BaseException) -> str:
    """The first sentence of a library's error, without the place in its sources."""
    return re.sub(r"\[\S+:\d+\] ", "", one_sentence(str(error))).partition(". ")[0][:200]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest of the known words, in brackets; nothing where none is near."""
    found = difflib.get_close_matches(word[:LONGEST_SHOWN], list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


class Trouble:
    """Something that may go wrong again and again without ending the job: told once a minute at most."""

    def __init__(self) -> None:
        self._told_at: float | None = None

    def tell(self, sentence: str) -> None:
        """As `complain`, unless it was told lately."""
        now = time.monotonic()
        if self._told_at is None or now >= self._told_at + REPEAT_SECONDS:
            self._told_at = now
            complain(sentence)


def speak_of(mistake: UserError) -> None:
    """Before ranks can speak to each other, or once they cannot. mpirun ends the job with the first that leaves, which
    must be the one that speaks; a rank that lives on when rank 0 would have spoken has found something of its own."""
    own = isinstance(mistake, OwnMistakeError)
    if not first_rank() and not own:
        time.sleep(SECONDS_FOR_FIRST)
        if isinstance(mistake, CommonMistakeError):
            return
    where = "" if own or first_rank() else f"rank {told_rank()}: "
    complain(one_sentence(f"{where}{mistake}"))


def end_early(sentence: str) -> NoReturn:
    """End for a mistake that every rank has most likely made, before ranks can speak to each other."""
    speak_of(UserError(sentence))
    sys.exit(USER_ERROR)


@contextlib.contextmanager
def early_mistakes() -> Iterator[None]:
    """Inside, a mistake ends the process as `end_early` does."""
    try:
        yield
    except UserError as mistake:
        speak_of(mistake)
        sys.exit(USER_ERROR)
