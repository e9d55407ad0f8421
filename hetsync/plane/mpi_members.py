"""The ranks of an MPI job that are left, the communicators among them, and the end of the job.

Where MPI tells survivors of a death (ULFM; `launchers.told_of_deaths`), it neither ends them, nor does `MPI_Abort` end
anybody but its caller. So whoever ends the job tells the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, cast

import torch

from hetsync.launchers import told_of_deaths
from hetsync.plane.base import LateError, LostError, MembersLost, PlaneError, named
from hetsync.plane.blocking import wait_until
from hetsync.plane.ending import last_words
from hetsync.plane.mpi_start import start_mpi

start_mpi()
from mpi4py import MPI  # noqa: E402 - it would start MPI in a way of its own

SECONDS_TO_TELL = 2.0  # all ranks that the job ends
LOOK_SECONDS = 0.05  # from one look for its end to the next


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """As MPI takes it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def ranks_here(comm: MPI.Intracomm) -> int:
    """Collective: how many of these ranks are on this host."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = host.Get_size()
    host.Free()
    return ranks


def gathered(comm: MPI.Intracomm, timeout_seconds: float, what: str, numbers: Sequence[int]) -> list[list[int]]:
    """Collective: every rank's numbers, as many of each. LateError where others do not come to `what`."""
    own = torch.tensor(numbers, dtype=torch.int64)
    found = torch.empty(comm.Get_size(), len(numbers), dtype=torch.int64)
    request = comm.Iallgather([memory(own), MPI.BYTE], [memory(found), MPI.BYTE])
    wait_until(request.Test, timeout_seconds, lambda: f"other ranks to {what}")
    return found.tolist()


class MpiMembers:
    """The ranks that are left, from one death, or newcomer, to the next; `ranks` are their numbers, in MPI's order.

    Its communicators are revoked at a death and never used again, so nothing that was sent or posted before reaches
    what is sent or posted after it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        tolerant: bool,
        before_end: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Collective. `comm` belongs to the members from now on. `tolerant`: a death is `MembersLost`. `before_end` is
        called where this process ends as the job does."""
        self.ranks = ranks
        self.tolerant = tolerant
        self.before_end = list(before_end)
        self._comm = comm
        self._ends = _duplicate(comm)  # never revoked: who ends the job tells it here, by a tag
        self._communicators: list[MPI.Intracomm] = []
        self._look_at = time.monotonic()

    @staticmethod
    def of_world(tolerant: bool) -> MpiMembers:
        """All that were started; collective."""
        world = MPI.COMM_WORLD
        return MpiMembers(_duplicate(world), tuple(range(world.Get_size())), tolerant and told_of_deaths())

    @staticmethod
    def alone(rank: int) -> MpiMembers:
        """A newcomer, before it has entered."""
        return MpiMembers(_duplicate(MPI.COMM_SELF), (rank,), told_of_deaths())

    @property
    def rank(self) -> int:
        return self.ranks[self._comm.Get_rank()]

    def place(self, rank: int) -> int:
        """MPI's number of a rank."""
        if rank not in self.ranks:
            raise PlaneError(f"rank {rank} is not, or no more, a member: {named(self.ranks)} are")
        return self.ranks.index(rank)

    def communicator(self, among: Sequence[int] | None = None) -> MPI.Intracomm:
        """Another one, of all members or of these; collective among them."""
        with self.errors("making a communicator"):
            if among is None:
                comm = _duplicate(self._comm)
            else:
                comm = self._comm.Create_group(self._comm.Get_group().Incl([self.place(rank) for rank in among]))
                comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._communicators.append(comm)
        return comm

    def release(self, comm: MPI.Intracomm) -> None:
        """Collective."""
        self._communicators.remove(comm)
        comm.Free()

    def close(self) -> None:
        """Collective, once all communicators are released."""
        for comm in (self._ends, self._comm):
            comm.Free()

    # A death.

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Inside, what MPI raises becomes a PlaneError."""
        try:
            yield
        except MPI.Exception as error:
            raise self.failure(what, error) from error

    def failure(self, what: str, error: MPI.Exception) -> PlaneError:
        """What an error of MPI's means. Where members can go on after a death, all of them will hear of it.

        Which class of error a death comes as differs, and at some ranks it comes before MPI knows who has gone.
        """
        if not told_of_deaths():
            return PlaneError(f"{what} failed: {error.Get_error_string()}")
        self._heed_end_after_death()
        gone = self._gone()
        if not self.tolerant:
            return LostError(gone)
        self.revoke()
        return MembersLost(gone)

    def revoke(self) -> None:
        """What anybody has pending here raises from now on; the others would notice only what they do with the dead."""
        for comm in (self._comm, *self._communicators):
            if not comm.Is_revoked():
                comm.Revoke()

    def mended(self) -> MpiMembers:
        """Those that are left; collective among them, after MembersLost. Another death meanwhile begins it anew."""
        self._heed_end_after_death()
        self.revoke()
        comm = self._comm
        while True:
            comm = cast(MPI.Intracomm, comm.Shrink())
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            try:
                self._heed_end_after_death()  # it may have come meanwhile, and would be lost
                left = self._group_ranks(comm.Get_group())
                return MpiMembers(comm, left, self.tolerant, self.before_end)
            except MPI.Exception:
                comm.Revoke()  # or those who have noticed nothing would wait for the others

    # A newcomer.

    def joined_by(self, rank: int, address: str) -> MpiMembers:
        """These and one more; collective among them, while that one `enters`. MembersLost, at all alike, where it could
        not be."""
        joined = None
        if self._all(True):  # or Accept, which is not made for deaths, would hang
            with suppress(MPI.Exception):
                link = self._comm.Accept(address, root=0)
                joined = self._merged(link, (*self.ranks, rank))
            if self._all(joined is not None) and joined is not None:
                return joined
        if joined is not None:
            joined.revoke()  # the newcomer, which would wait for the others, ends
        raise MembersLost("a rank has gone while another joined")

    def entering(self, members: Sequence[int], address: str) -> MpiMembers:
        """The same on the newcomer. MPI.Exception where it could not be."""
        link = self._comm.Connect(address, root=0)
        return self._merged(link, tuple(members))

    def _merged(self, link: MPI.Intercomm, ranks: tuple[int, ...]) -> MpiMembers:
        comm = link.Merge(high=self.ranks[0] == ranks[-1])  # the newcomer comes last
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return MpiMembers(comm, ranks, self.tolerant, self.before_end)

    def _all(self, mine: bool) -> bool:
        """Collective, and the same at all: is it so at each, and has none gone?"""
        try:
            return bool(self._comm.Agree(int(mine)))
        except MPI.Exception:
            return False

    def _group_ranks(self, group: MPI.Group) -> tuple[int, ...]:
        places = MPI.Group.Translate_ranks(group, list(range(group.Get_size())), self._comm.Get_group())
        return tuple(self.ranks[place] for place in places)

    def _gone(self) -> str:
        """For people to read; who it is becomes known at some ranks before others."""
        with suppress(MPI.Exception):
            if gone := self._group_ranks(self._comm.Get_failed()):
                return f"{named(gone)} has gone"
        return "another rank has gone"

    # The end of the job.

    def end_job(self, code: int) -> NoReturn:
        """End all ranks with this exit code."""
        self._come_to_an_end()
        if not told_of_deaths():
            MPI.COMM_WORLD.Abort(code)
            os._exit(code)  # should MPI return
        telling = [self._tell_end(code, place) for place in range(len(self.ranks)) if place != self._comm.Get_rank()]

        def told() -> bool:
            self._heed_end_after_death()  # others may end the job, too, and wait for this rank
            return all([_arrived(request) for request in telling])

        try:
            wait_until(told, SECONDS_TO_TELL, lambda: "other ranks")
        except LateError:
            # MPI would not tell them of a mere exit.
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(SECONDS_TO_TELL)
        os._exit(code)

    def _tell_end(self, code: int, place: int) -> MPI.Request:
        try:
            return self._ends.Issend([b"", MPI.BYTE], place, code)
        except MPI.Exception:  # that rank has gone
            return MPI.REQUEST_NULL

    def heed_end(self) -> None:
        """End this process, too, where another rank has ended the job. Looks now and then, however often it is asked:
        each look is a call of MPI's, at every poll."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look_for_end()

    def _look_for_end(self) -> None:
        if not told_of_deaths():
            return
        status = MPI.Status()
        if (message := self._ends.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            message.Recv([bytearray(), MPI.BYTE])
            self._come_to_an_end()
            os._exit(status.Get_tag())

    def _come_to_an_end(self) -> None:
        last_words()
        for last_act in self.before_end:
            last_act()

    def _heed_end_after_death(self) -> None:
        with suppress(MPI.Exception):
            self._ends.Ack_failed()  # or each look would raise
            self._look_for_end()


def _arrived(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:  # its receiver has gone
        return True


def _duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    copy = comm.Dup()
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy
