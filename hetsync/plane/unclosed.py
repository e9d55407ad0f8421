"""A job whose script never closes it: the end of the interpreter does, or says what is missing."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

from hetsync.errors import UserError
from hetsync.plane.base import Plane
from hetsync.plane.ending import end_job, end_loop


class Unclosed:
    """From `watch` until `closed`: what nobody catches ends the job on all ranks, and a script that ends first closes
    it, where training is over.

    Where it is not, nobody can tell a loop that was left from a `sys.exit` in the middle: that is a mistake.
    """

    def __init__(
        self,
        plane: Plane,
        *,
        is_over: Callable[[], bool],
        close: Callable[[], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        """`close` ends the job in order, and collectively; `give_up` releases what this rank holds of it,
        where such a failure has ended it."""
        self._plane = plane
        self._is_over = is_over
        self._close = close
        self._give_up = give_up
        self._hook_before = sys.excepthook

    def watch(self) -> None:
        self._hook_before = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._script_ended)

    def closed(self) -> None:
        atexit.unregister(self._script_ended)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook_before

    def fail(self, failure: BaseException) -> None:
        """See `end_loop`."""
        self.closed()
        self._give_up(failure)
        end_loop(self._plane, failure)

    def _uncaught(self, kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
        at_a_prompt = hasattr(sys, "ps1")  # where the next line may mend it
        if not at_a_prompt:
            self.fail(failure)
        self._hook_before(kind, failure, trace)

    def _script_ended(self) -> None:
        try:
            if not self._is_over():
                raise UserError(
                    "the script has ended before its training: use 'with hetsync.join(...)', or call close() where the"
                    " loop has been left"
                )
            self._close()
        except BaseException as failure:
            self._give_up(failure)
            end_job(self._plane, failure)
