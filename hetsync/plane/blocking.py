"""The main thread's blocking calls over MPI: they sleep while they wait, end in time, and say who is late."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hetsync.plane import codec
from hetsync.plane.base import LateError, named, wait_limit
from hetsync.threads import LivedSeconds

if TYPE_CHECKING:
    from mpi4py import MPI

# The longest sleep bounds what sleeping adds to a wait.
FIRST_SLEEP_SECONDS = 50e-6
LONGEST_SLEEP_SECONDS = 2e-3


class BlockingCollectives:
    """All ranks meet at the first of them, which knows who has come; on a communicator that nobody else uses.

    `ranks` are named in place of MPI's numbers. `look` is called again and again while a rank waits.
    """

    def __init__(
        self, comm: MPI.Intracomm, ranks: Sequence[int], timeout_seconds: float, look: Callable[[], None]
    ) -> None:
        self._comm = comm
        self._ranks = ranks
        self._place, self._size = comm.Get_rank(), comm.Get_size()
        self._timeout_seconds = timeout_seconds
        self._look = look

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        data, own = codec.dumps_own(value)
        if self._place > 0:
            request = self._comm.Issend(data, dest=0)
            self._wait(request.Test, self._first)
            return [codec.loads(part, own) for part in self.broadcast(None)]
        return [codec.loads(part, own) for part in self.broadcast(self._collect(data))]

    def _collect(self, own: bytes) -> list[bytes]:
        arrived: dict[int, bytes | bytearray] = {0: own}

        def all_here() -> bool:
            status = _status()
            while (message := self._comm.Improbe(status=status)) is not None:
                data = bytearray(status.Get_count())
                message.Recv(data)
                arrived[status.Get_source()] = data
            return len(arrived) == self._size

        self._wait(all_here, lambda: named(self._ranks[p] for p in range(self._size) if p not in arrived))
        return [bytes(arrived[place]) for place in range(self._size)]

    def broadcast(self, value: Any) -> Any:
        """The first rank's value on every rank."""
        data = bytearray(codec.dumps(value)) if self._place == 0 else bytearray()
        length = array("q", [len(data)])
        request = self._comm.Ibcast(length)
        self._wait(request.Test, self._first)
        data = data or bytearray(length[0])
        request = self._comm.Ibcast(data)
        self._wait(request.Test, self._first)
        return codec.loads(data)

    def _wait(self, done: Callable[[], bool], who: Callable[[], str]) -> None:
        def looked() -> bool:
            self._look()
            return done()

        wait_until(looked, wait_limit(self._place, self._timeout_seconds), who)

    def _first(self) -> str:
        return named(self._ranks[:1])


def wait_until(done: Callable[[], bool], limit_seconds: float, who: Callable[[], str]) -> None:
    """Sleep until `done`; LateError, naming `who`, after the limit."""
    lived = LivedSeconds()
    sleep_seconds = FIRST_SLEEP_SECONDS
    while not done():
        if lived.look() > limit_seconds:
            raise LateError(
                f"waited {limit_seconds:.0f} s for {who()} (raise run.timeout_seconds if the work takes that long)"
            )
        time.sleep(sleep_seconds)
        sleep_seconds = min(2 * sleep_seconds, LONGEST_SLEEP_SECONDS)


def _status() -> MPI.Status:
    from mpi4py import MPI

    return MPI.Status()
