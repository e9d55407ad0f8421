"""Collectives over MPI, and how a segment is summed by it.

Where all ranks share memory, large sums are made there (`shared_sums.py`), and come here only in their last bits.

MPI has an algorithm for each size of a blocking sum, and few for one that is polled. Open MPI 5, as it is, sums in
place along a binomial tree, whose root takes in and sends out everything log2(ranks) times; and out of place, from four
ranks and 64 kB on, by Rabenseifner's algorithm: ranks exchange halves, quarters and so on, and collect the sums the
same way back; where they are no power of two, some are sent the whole sum. What it sends over TCP in more than 64 kB
waits for its receiver's answer, that is, for a poll at either end. So between hosts segments are small; and between a
few, which are no power of two, sums are direct: messages between all pairs of ranks, in two steps
(docs/results/planes.md).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from hetsync.plane.mpi_members import MPI, memory
from hetsync.plane.polled import SEGMENTS_IN_FLIGHT, Lane, Post
from hetsync.plane.staging import Test

# On one host. Small enough for MPI's copies to stay in the processor's cache (see polled.SEGMENTS_IN_FLIGHT).
SEGMENT_VALUES_PER_RANK = 1 << 16
MESSAGE_VALUES = 15 << 10  # of float32, 60 kB; Open MPI counts its header, too (btl_tcp_eager_limit)
SMALL_SEGMENTS_IN_FLIGHT = 16  # 32 are no faster
LEAST_VALUES = 1 << 14  # of float32, of a segment; of less, all are summed in place, as Open MPI 5 would take its tree
FEWEST_RANKS_RABENSEIFNER = 4  # in Open MPI 5
MOST_RANKS_DIRECT = 12  # measured so far; of sixteen, Rabenseifner's algorithm was faster
TAGS = 1 << 15  # every MPI has so many, and far fewer sums are under way


class Algorithm(NamedTuple):
    """How segments are summed, of how many float32 values (or as many bytes), and how many are under way at a time."""

    kind: Literal["direct", "out of place", "in place"]
    segment_values: int
    in_flight: int


def algorithm_for(ranks: int, most_on_a_host: int, told_of_deaths: bool) -> Algorithm:
    """For the sums of so many ranks. Those of a host would all send directly over its one link.

    Where MPI tells of deaths nothing is direct: Open MPI 5 ends a process of which a message to a rank that dies fails
    after its request was freed.
    """
    if most_on_a_host == ranks:  # through their memory, where nothing is won by the others
        return Algorithm("in place", SEGMENT_VALUES_PER_RANK * ranks, SEGMENTS_IN_FLIGHT)
    by_halves = ranks >= FEWEST_RANKS_RABENSEIFNER and ranks.bit_count() == 1
    if most_on_a_host == 1 and ranks <= MOST_RANKS_DIRECT and not by_halves and not told_of_deaths:
        return Algorithm("direct", 2 * MESSAGE_VALUES * ranks, SEGMENTS_IN_FLIGHT)
    if ranks >= FEWEST_RANKS_RABENSEIFNER:
        segment_values = 2 * MESSAGE_VALUES  # halves are its largest messages
        return Algorithm("out of place", segment_values, SMALL_SEGMENTS_IN_FLIGHT)
    return Algorithm("in place", MESSAGE_VALUES, SMALL_SEGMENTS_IN_FLIGHT)  # the tree, which sends whole segments


def typed(values: torch.Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    """As MPI takes what it sums."""
    return memory(values), MPI.DOUBLE if values.dtype is torch.float64 else MPI.FLOAT


class DirectSum:
    """The sum of a segment, in place, by a direct reduce-scatter and all-gather: each rank adds up one part, which all
    others send to it, and sends them the sum.

    A rank sends and receives as much as in a ring, and waits for the others twice, whatever their number.
    """

    def __init__(self, comm: MPI.Intracomm, values: torch.Tensor, tag: int, scratch: torch.Tensor) -> None:
        """It begins. `scratch` takes in the other ranks' addends. No other message among them has this `tag` while
        these are under way."""
        self._comm, self._tag = comm, tag
        self._parts = values.tensor_split(comm.Get_size())
        self._others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._own = self._parts[comm.Get_rank()]
        self._addends = [
            scratch.view(values.dtype)[place * self._own.numel() :][: self._own.numel()]
            for place in range(len(self._others))
        ]
        self._added = self.ended = False
        self._requests: list[MPI.Request] = []
        for rank, addend in zip(self._others, self._addends, strict=True):
            self._exchange(rank, self._parts[rank], addend)

    def proceed(self) -> None:
        """As far as it goes without waiting."""
        if not self._added and MPI.Request.Testall(self._requests):
            self._begin_second_step()
        self.ended = self._added and MPI.Request.Testall(self._requests)

    def _begin_second_step(self) -> None:
        for addend in self._addends:
            self._own += addend
        self._added = True
        self._requests = []
        for rank in self._others:
            self._exchange(rank, self._own, self._parts[rank])

    def _exchange(self, rank: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        most = MESSAGE_VALUES * 4 // sent.itemsize
        for message in received.split(most):
            self._requests.append(self._comm.Irecv(typed(message), rank, self._tag))
        for message in sent.split(most):
            self._requests.append(self._comm.Isend(typed(message), rank, self._tag))


class MpiLane(Lane):
    """Segments of less bytes than LEAST_VALUES have are summed in place, whatever the `algorithm`."""

    def __init__(self, comm: MPI.Intracomm, algorithm: Algorithm) -> None:
        super().__init__()
        self.comm = comm
        self.algorithm = algorithm
        self.segment_values: int = algorithm.segment_values
        self.in_flight = algorithm.in_flight
        self._direct: list[DirectSum] = []  # under way
        self._begun = 0  # of these, so far
        self._spare: list[torch.Tensor] = []  # scratch memory, each for a segment

    def sum_in_place(self, values: torch.Tensor) -> Post:
        if self.algorithm.kind == "in place" or values.nbytes < 4 * LEAST_VALUES:
            return lambda: self.comm.Iallreduce(MPI.IN_PLACE, typed(values)).Test
        return lambda: (self._sum_direct if self.algorithm.kind == "direct" else self._sum_out_of_place)(values)

    def _sum_direct(self, values: torch.Tensor) -> Test:
        scratch = self._scratch()
        begun = DirectSum(self.comm, values, self._begun % TAGS, scratch)  # on all ranks in the same order
        self._begun += 1
        self._direct.append(begun)

        def test() -> bool:
            if self._direct and self._direct[0] is begun:
                self._proceed()
            return begun.ended

        return self._giving_back(scratch, test)

    def _proceed(self) -> None:
        """With as many of the oldest as a sum has under way. One after the other, each would begin its second step once
        those before it have ended; and all of them would be looked at for each of many sums."""
        oldest, later = self._direct[: self.in_flight], self._direct[self.in_flight :]
        for begun in oldest:
            begun.proceed()
        self._direct = [*(begun for begun in oldest if not begun.ended), *later]

    def _sum_out_of_place(self, values: torch.Tensor) -> Test:
        scratch = self._scratch()
        addend = scratch.view(values.dtype)[: values.numel()].copy_(values)
        request = self.comm.Iallreduce(typed(addend), typed(values))
        return self._giving_back(scratch, request.Test)

    def _scratch(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else torch.empty(self.segment_values, dtype=torch.float32)

    def _giving_back(self, scratch: torch.Tensor, test: Test) -> Test:
        """The same test. It holds the scratch memory until it tells of the end; after a failure MPI may still write
        there."""

        def tested() -> bool:
            ended = test()
            if ended:
                self._spare.append(scratch)
            return ended

        return tested

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        return lambda: self.comm.Ialltoall([memory(sent), MPI.BYTE], [memory(received), MPI.BYTE]).Test

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        return lambda: self.comm.Iallgather([memory(own), MPI.BYTE], [memory(all_ranks), MPI.BYTE]).Test
