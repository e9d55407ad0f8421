"""A process that MPI starts while a job runs, to take the place of a rank that has gone: as the member sees it that has
started it, and as it sees itself until it has entered.

MPI_Comm_spawn waits for the process to come up, so a thread calls it. What the two tell each other travels on the
communicator between them, which nobody else uses.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from hetsync.errors import complain
from hetsync.plane import codec
from hetsync.plane.base import Invitation, LateError, LostError, Newcomer, Summoned
from hetsync.plane.blocking import wait_until
from hetsync.plane.mpi_members import MPI

POLL_SECONDS = 0.02
SECONDS_TO_DISMISS = 5.0
SECONDS_TO_KNOCK = 60.0
WORD, DISMISSAL = 1, 2  # tags


class _Link:
    """Messages to and from the other one, in order."""

    def __init__(self, comm: MPI.Intercomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm

    def send(self, value: Any, tag: int = WORD, seconds: float = SECONDS_TO_DISMISS) -> None:
        """LateError where the other has not received it by then, MPI.Exception where it has gone."""
        request = self._comm.Issend([codec.dumps(value), MPI.BYTE], 0, tag)
        wait_until(request.Test, seconds, lambda: "another process")

    def receive(self) -> tuple[int, bytearray]:
        """The next message, and its tag. MPI.Exception where the other has gone."""
        status = MPI.Status()
        while (message := self._comm.Improbe(0, MPI.ANY_TAG, status)) is None:
            time.sleep(POLL_SECONDS)
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, MPI.BYTE])
        return status.Get_tag(), data


class MpiSummoned(Summoned):
    def __init__(self, rank: int, ranks_at_start: int, told: Any) -> None:
        self._rank = rank
        self._link: _Link | None = None
        self._dismissed = False
        words = rank, ranks_at_start, codec.dumps(told)  # which it reads once it knows what is in it
        threading.Thread(None, self._raise, f"hetsync-summons-{rank}", (words,), daemon=True).start()

    def _raise(self, first: tuple[int, int, bytes]) -> None:
        """The process comes up, and gets ready."""
        try:
            info = MPI.Info.Create()
            info.Set("wdir", os.getcwd())
            self._link = _Link(MPI.COMM_SELF.Spawn(sys.executable, sys.orig_argv[1:], 1, info))
            self._link.send(first)
            if self._dismissed:
                self.dismiss()
                return
            _, data = self._link.receive()
            self.ready = codec.loads(data)
        except (MPI.Exception, LateError, LostError) as error:
            complain(f"no process takes the place of rank {self._rank}: {error}")
            self.gone = True

    def invite(self, told: Any) -> str:
        assert self._link is not None
        address = MPI.Open_port()
        try:
            self._link.send(Invitation(address, told))
        except (MPI.Exception, LateError) as error:
            self.gone = True
            raise LostError(f"the process that was to take the place of rank {self._rank} has gone") from error
        return address

    def dismiss(self) -> None:
        self._dismissed = True
        if self._link is not None:
            with suppress(MPI.Exception, LateError):
                self._link.send(None, DISMISSAL)


class MpiNewcomer(Newcomer):
    def __init__(self, parent: MPI.Intercomm) -> None:
        # mpirun takes a process that ends without this for one that has failed, and MPI_Finalize, which does it, waits
        # for all ranks, of which some have gone.
        atexit.register(_sign_off)
        self._link = _Link(parent)
        self._words: list[bytearray] = []
        self._heard = threading.Condition()
        self._over = False
        threading.Thread(None, self._listen, "hetsync-newcomer", daemon=True).start()
        self.rank, self.ranks_at_start, self._told = codec.loads(self._next())

    def _listen(self) -> None:
        """Until it is invited: it ends at once where it is not needed any more, whatever it does."""
        try:
            for _ in ("told", "invited"):
                tag, data = self._link.receive()
                if tag == DISMISSAL:
                    leave()
                with self._heard:
                    self._words.append(data)
                    self._heard.notify()
        except MPI.Exception:
            leave()

    def _next(self) -> bytearray:
        with self._heard:
            self._heard.wait_for(lambda: self._words)
            return self._words.pop(0)

    @property
    def told(self) -> Any:
        return codec.loads(self._told)

    def knock(self, told: Any) -> Invitation:
        try:
            self._link.send(told, seconds=SECONDS_TO_KNOCK)
        except (MPI.Exception, LateError):
            leave()
        invitation = codec.loads(self._next())
        assert isinstance(invitation, Invitation)
        return invitation


def leave() -> NoReturn:
    """This process is not needed."""
    sys.stdout.flush()
    sys.stderr.flush()
    _sign_off()
    os._exit(0)


def die() -> NoReturn:
    """As nobody would notice a mere exit, where the others may have admitted this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _sign_off() -> None:
    """From the runtime that has started this process."""
    with suppress(OSError, StopIteration, AttributeError), open("/proc/self/maps") as maps:
        library = next(line.split()[-1] for line in maps if "/libpmix.so" in line)
        finalize: Callable[[Any, int], int] = ctypes.CDLL(library).PMIx_Finalize
        finalize(None, 0)


def parent() -> MPI.Intercomm | None:
    """Of a process that a member has started; None where a launcher has."""
    found = MPI.Comm.Get_parent()
    return None if found == MPI.COMM_NULL else found
