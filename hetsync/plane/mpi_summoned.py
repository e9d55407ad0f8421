"""A process that MPI starts while a job runs, to take the place of a rank that has gone: as the member sees it that has
started it, and as it sees itself until it has entered.

MPI_Comm_spawn waits for the process to come up, so a thread calls it. What the two tell each other travels on the
communicator between them, which nobody else uses.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from hetsync.errors import complain
from hetsync.plane import codec
from hetsync.plane.base import Invitation, LateError, LostError, Newcomer, Summoned
from hetsync.plane.blocking import wait_until
from hetsync.plane.ending import leave
from hetsync.plane.greeting import own_hello, require_versions_of_job
from hetsync.plane.mpi_members import MPI
from hetsync.processes import Process, own_process
from hetsync.start import STARTED_IN

POLL_SECONDS = 0.02
SECONDS_TO_HEAR = 30.0  # an invitation, by one that waits for it
# At the job's end, by one that is just coming up: a minute on a busy machine. What has no starter any more when it
# comes up waits for it within MPI, and mpirun for that.
SECONDS_TO_COME_UP = 120.0
SECONDS_TO_BE_TOLD = 20.0  # by the starter, which has begun to send when this process came up
SECONDS_TO_ENTER = 60.0  # which takes milliseconds
WORD, DISMISSAL = 1, 2  # tags


class _Link:
    """Messages to and from the other one, in order."""

    def __init__(self, comm: MPI.Intercomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self._sent: list[bytes] = []  # MPI may still read them

    def send(self, value: Any, tag: int = WORD, seconds: float = math.inf) -> None:
        """LateError where the other has not received it by then, MPI.Exception where it has gone."""
        self._sent.append(codec.dumps(value))
        request = self._comm.Issend([self._sent[-1], MPI.BYTE], 0, tag)
        wait_until(request.Test, seconds, lambda: "another process")

    def receive(self) -> tuple[int, bytearray] | None:
        """The next message, and its tag; None where there is none yet. MPI.Exception where the other has gone."""
        status = MPI.Status()
        if (message := self._comm.Improbe(0, MPI.ANY_TAG, status)) is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, MPI.BYTE])
        return status.Get_tag(), data


class _First(NamedTuple):
    """What a newcomer is told when it comes up."""

    rank: int
    ranks_at_start: int
    starter: Process
    told: bytes


class MpiSummoned(Summoned):
    def __init__(self, rank: int, ranks_at_start: int, told: Any) -> None:
        self._rank = rank
        self._link: _Link | None = None
        self._invited = self._dismissed = False
        # What it is told it reads once it knows what that is.
        words = _First(rank, ranks_at_start, own_process(), codec.dumps(told))
        threading.Thread(None, self._start_process, f"hetsync-summons-{rank}", (words,), daemon=True).start()

    def _start_process(self, first: _First) -> None:
        """The process comes up, and gets ready."""
        try:
            info = MPI.Info.Create()
            info.Set("wdir", STARTED_IN)
            self._link = _Link(MPI.COMM_SELF.Spawn(sys.executable, sys.orig_argv[1:], 1, info))
            self._link.send(json.dumps(own_hello({}, None)))
            self._link.send(first)
            if self._dismissed:
                return
            while (heard := self._link.receive()) is None:
                time.sleep(POLL_SECONDS)
            self.ready = codec.loads(heard[1])
        except (MPI.Exception, LostError) as error:
            complain(f"no process takes the place of rank {self._rank}: {error}")
            self.gone = True

    def invite(self, told: Any) -> str:
        assert self._link is not None
        address = MPI.Open_port()
        self._invited = True
        try:
            self._link.send(Invitation(address, told), seconds=SECONDS_TO_HEAR)
        except (MPI.Exception, LateError) as error:
            self.gone = True
            raise LostError(f"the process that was to take the place of rank {self._rank} has gone") from error
        return address

    def dismiss(self, seconds: float) -> None:
        if self._invited:
            return
        self._dismissed = True
        with suppress(MPI.Exception, LateError):
            # It may be coming up, and would wait to be told.
            wait_until(lambda: self._link is not None or self.gone, seconds, lambda: "another process")
            if self._link is not None and not self.gone:
                self._link.send(None, DISMISSAL, seconds)


class MpiNewcomer(Newcomer):
    def __init__(self, parent: MPI.Intercomm) -> None:
        # mpirun takes a process that ends without this for one that has failed, and MPI_Finalize, which does it, waits
        # for all ranks, of which some have gone.
        atexit.register(_sign_off)
        self._link = _Link(parent)
        self._words: list[bytearray] = []
        self._heard = threading.Condition()
        self._starter: Process | None = None
        threading.Thread(None, self._listen, "hetsync-newcomer", daemon=True).start()
        require_versions_of_job(codec.loads(self._next(SECONDS_TO_BE_TOLD)))
        first: _First = codec.loads(self._next(SECONDS_TO_BE_TOLD))
        self._starter, self._told = first.starter, first.told
        self.rank, self.ranks_at_start = first.rank, first.ranks_at_start

    def _listen(self) -> None:
        """Until it is invited: it ends at once where it is not needed any more, whatever it does."""
        try:
            for _ in ("versions", "first words", "an invitation"):
                while (heard := self._link.receive()) is None:
                    time.sleep(POLL_SECONDS)
                    if self._starter is not None and self._starter.has_gone:  # MPI does not tell of an exit
                        leave_unneeded()
                tag, data = heard
                if tag == DISMISSAL:
                    leave_unneeded()
                with self._heard:
                    self._words.append(data)
                    self._heard.notify()
        except MPI.Exception:
            leave_unneeded()

    def _next(self, seconds: float | None = None) -> bytearray:
        with self._heard:
            if not self._heard.wait_for(lambda: self._words, seconds):
                leave_unneeded()
            return self._words.pop(0)

    @property
    def told(self) -> Any:
        return codec.loads(self._told)

    def knock(self, told: Any) -> Invitation:
        try:
            self._link.send(told)
        except MPI.Exception:
            leave_unneeded()
        invitation = codec.loads(self._next())
        assert isinstance(invitation, Invitation)
        return invitation


def leave_unneeded() -> NoReturn:
    _sign_off()
    leave(0)


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
