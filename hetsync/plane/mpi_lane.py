"""Collectives over MPI, on memory that it reads directly.

MPI has a way of its own for each size of a blocking sum, and few for one that is polled: Open MPI 5 sums in place along
a binomial tree, whose root takes in and sends out everything log2(ranks) times; otherwise, from four ranks and 64 kB
on, it exchanges and adds up halves, then quarters and so on, and collects the sums the same way back (Rabenseifner),
in 2 · log2(ranks) steps, each of which waits for a poll. So between up to 16 hosts with a rank each sums are made of
messages here, in two steps (docs/results/planes.md).
"""

from __future__ import annotations

import torch

from hetsync.plane.blocking import wait_until
from hetsync.plane.mpi_members import MPI
from hetsync.plane.polled import SEGMENTS_IN_FLIGHT, Lane, Post
from hetsync.plane.staging import Test

# Small enough for MPI's copies to stay in the processor's cache (see polled.SEGMENTS_IN_FLIGHT). Segments grow with the
# ranks, each of which adds up a part of them.
SEGMENT_VALUES_PER_RANK = 1 << 16
LEAST_CUT_VALUES = 1 << 14  # of a segment that is summed part by part
MOST_RANKS_IN_TWO_STEPS = 16  # each has 120 messages under way then; measured up to 8
FEWEST_RANKS_HALVING = 4  # in Open MPI 5: below, it takes its tree in any case
TAGS = 1 << 15  # every MPI has so many, and far fewer sums are under way


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """As MPI takes it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class TwoStepSum:
    """The sum of a segment, in place: each rank adds up one part, which all others send to it, and sends them the sum.

    A rank sends and receives as much as in any sum that spreads the work evenly, and waits for the others twice.
    """

    def __init__(self, comm: MPI.Intracomm, values: torch.Tensor, tag: int, scratch: torch.Tensor) -> None:
        """It begins. `scratch` takes in the other ranks' addends. No other message among them has this `tag` while
        these are under way."""
        self._comm, self._tag = comm, tag
        self._parts = values.tensor_split(comm.Get_size())
        self._others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._own = self._parts[comm.Get_rank()]
        self._addends = [
            scratch[place * self._own.numel() :][: self._own.numel()] for place in range(len(self._others))
        ]
        self._added = False
        self._requests: list[MPI.Request] = []
        for rank, addend in zip(self._others, self._addends, strict=True):
            self._exchange(rank, self._parts[rank], addend)

    def test(self) -> bool:
        if not MPI.Request.Testall(self._requests):
            return False
        if self._added:
            return True
        for addend in self._addends:
            self._own += addend
        self._added = True
        self._requests = []
        for rank in self._others:
            self._exchange(rank, self._own, self._parts[rank])
        return MPI.Request.Testall(self._requests)

    def _exchange(self, rank: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._requests.append(self._comm.Irecv([memory(received), MPI.FLOAT], rank, self._tag))
        self._requests.append(self._comm.Isend([memory(sent), MPI.FLOAT], rank, self._tag))


class MpiLane(Lane):
    """Sums take two steps where each rank is on a host of its own. Several ranks of a host would send all their parts
    over its link: there addends are copied, so that MPI takes its halves and not its tree. In shared memory, where that
    saves nothing, it sums in place.
    """

    def __init__(self, comm: MPI.Intracomm, on_host: int, told_of_deaths: bool) -> None:
        """`on_host`: see `most_on_a_host`. Where MPI tells of deaths all sums are its own: it ends a process of which a
        message fails, to another that dies, after its request has ended (Open MPI 5: "Send error after request freed"),
        and what has met its other half cannot be called back.
        """
        super().__init__()
        self.comm = comm
        size = comm.Get_size()
        self.segment_values: int = SEGMENT_VALUES_PER_RANK * size
        self.in_two_steps = on_host == 1 and 1 < size <= MOST_RANKS_IN_TWO_STEPS and not told_of_deaths
        self.copies = on_host < size and size >= FEWEST_RANKS_HALVING and not self.in_two_steps
        self._sums: list[TwoStepSum] = []  # under way
        self._numbered = 0  # of those that have begun
        # Kept to the end: after a failure MPI may still write to them.
        self._scratch: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []

    def sum_in_place(self, values: torch.Tensor) -> Post:
        if values.numel() >= LEAST_CUT_VALUES and self.in_two_steps:
            return lambda: self._sum_in_two_steps(values)
        if values.numel() >= LEAST_CUT_VALUES and self.copies:
            return lambda: self._sum_copy(values)
        return lambda: self.comm.Iallreduce(MPI.IN_PLACE, [memory(values), MPI.FLOAT]).Test

    def _sum_in_two_steps(self, values: torch.Tensor) -> Test:
        scratch = self._take()
        # All ranks begin the same sums in the same order.
        begun = TwoStepSum(self.comm, values, self._numbered % TAGS, scratch)
        self._numbered += 1
        self._sums.append(begun)

        def test() -> bool:
            if self._sums and self._sums[0] is begun:
                self._go_on()
            if begun in self._sums:
                return False
            self._spare.append(scratch)
            return True

        return test

    def _go_on(self) -> None:
        """As many of the oldest as a sum has under way: who tests one after the other would let each begin its second
        step once those before it have ended; who tests all would do so again for each of many sums."""
        oldest, later = self._sums[:SEGMENTS_IN_FLIGHT], self._sums[SEGMENTS_IN_FLIGHT:]
        self._sums = [*(begun for begun in oldest if not begun.test()), *later]

    def _sum_copy(self, values: torch.Tensor) -> Test:
        scratch = self._take()
        addend = scratch[: values.numel()].copy_(values)
        request = self.comm.Iallreduce([memory(addend), MPI.FLOAT], [memory(values), MPI.FLOAT])

        def test() -> bool:
            if not request.Test():
                return False
            self._spare.append(scratch)
            return True

        return test

    def _take(self) -> torch.Tensor:
        if not self._spare:
            self._scratch.append(torch.empty(self.segment_values))
            self._spare.append(self._scratch[-1])
        return self._spare.pop()

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        return lambda: self.comm.Ialltoall([memory(sent), MPI.BYTE], [memory(received), MPI.BYTE]).Test

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        return lambda: self.comm.Iallgather([memory(own), MPI.BYTE], [memory(all_ranks), MPI.BYTE]).Test


def most_on_a_host(comm: MPI.Intracomm, timeout_seconds: float) -> int:
    """Collective: the number of ranks on the host that has most of them; the same on all ranks."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    most = torch.tensor([host.Get_size()])
    host.Free()
    request = comm.Iallreduce(MPI.IN_PLACE, [memory(most), MPI.INT64_T], MPI.MAX)
    wait_until(request.Test, timeout_seconds, lambda: "other ranks to open their sums")
    return int(most)
