"""Collectives over MPI, on memory that it reads directly.

MPI has one way for a blocking sum, chosen with care for each size, and few for one that is polled: Open MPI 5 sums in
place along a binomial tree, whose root takes in and sends out everything log2(ranks) times, and otherwise in a ring,
which is polled 2 · (ranks - 1) times before it comes to its end. So segments of some size are summed by messages here,
in two steps, whatever the number of ranks (docs/results/planes.md).
"""

from __future__ import annotations

import sys

import torch

from hetsync.plane.mpi_members import MPI
from hetsync.plane.polled import SEGMENTS_IN_FLIGHT, Lane, Post
from hetsync.plane.staging import Test

# Small enough for MPI's copies to stay in the processor's cache (see polled.SEGMENTS_IN_FLIGHT). Segments grow with the
# ranks, as one rank's part of a segment is passed on at a time.
SEGMENT_VALUES_PER_RANK = 1 << 16
LEAST_EXCHANGED = 1 << 14  # values: below, a tree's few steps of small messages take less than messages of all pairs
MOST_EXCHANGING = 16  # ranks: with more, each would have hundreds of messages under way
FEWEST_IN_RING = 4  # ranks, in Open MPI 5


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """As MPI takes it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class Exchange:
    """The sum of a segment, in place: each rank adds up one part, which all others send to it, and sends them the sum.

    A rank sends and receives as much as in a ring, and waits for the others twice only.
    """

    def __init__(self, comm: MPI.Intracomm, values: torch.Tensor, tag: int, scratch: torch.Tensor) -> None:
        """`scratch` takes in the other ranks' addends. No other message among them has this `tag` or the next one while
        these are under way."""
        self._comm, self._tag = comm, tag
        self._parts = values.tensor_split(comm.Get_size())
        self._others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._own = self._parts[comm.Get_rank()]
        self._addends = [
            scratch[place * self._own.numel() :][: self._own.numel()] for place in range(len(self._others))
        ]
        self._requests: list[MPI.Request] = []
        self._added = False

    def begin(self) -> Test:
        for rank, addend in zip(self._others, self._addends, strict=True):
            self._receive(addend, rank, self._tag)
            self._send(self._parts[rank], rank, self._tag)
        return self._test

    def _test(self) -> bool:
        if not MPI.Request.Testall(self._requests):
            return False
        if self._added:
            return True
        for addend in self._addends:
            self._own += addend
        self._added = True
        self._requests = []
        for rank in self._others:
            self._receive(self._parts[rank], rank, self._tag + 1)
            self._send(self._own, rank, self._tag + 1)
        return MPI.Request.Testall(self._requests)

    def _receive(self, into: torch.Tensor, rank: int, tag: int) -> None:
        self._requests.append(self._comm.Irecv([memory(into), MPI.FLOAT], rank, tag))

    def _send(self, part: torch.Tensor, rank: int, tag: int) -> None:
        self._requests.append(self._comm.Isend([memory(part), MPI.FLOAT], rank, tag))


class MpiLane(Lane):
    """Between hosts a sum is exchanged, if each rank is on a host of its own: a link carries what all ranks of its host
    send, of which in a ring only one sends to another host. Other sums between hosts, and those of more segments than
    are under way at a time, which keep links busy anyhow, have addends copied for MPI, which then takes its ring and
    not its tree: over slow links that is less than half the time. In shared memory the tree does as well as any.
    """

    def __init__(self, comm: MPI.Intracomm, on_host: int) -> None:
        """`on_host`: see `most_on_a_host`."""
        super().__init__()
        self.comm = comm
        size = comm.Get_size()
        self.segment_values: int = SEGMENT_VALUES_PER_RANK * size
        self._copies = on_host < size
        alone = on_host == 1 < size
        self._most_exchanged = 0  # values of a sum
        if alone and size <= MOST_EXCHANGING:
            short = SEGMENTS_IN_FLIGHT * self.segment_values
            self._most_exchanged = sys.maxsize if size < FEWEST_IN_RING else short
        # Kept to the end: after a failure MPI may still write to them.
        self._scratch: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []
        self._exchanged = 0

    def sum_in_place(self, values: torch.Tensor, total: int) -> Post:
        if values.numel() >= LEAST_EXCHANGED and total <= self._most_exchanged:
            return lambda: self._exchange(values)
        if self._copies:
            return lambda: self._sum_copy(values)
        return lambda: self.comm.Iallreduce(MPI.IN_PLACE, [memory(values), MPI.FLOAT]).Test

    def _exchange(self, values: torch.Tensor) -> Test:
        segment = self._take()
        # All ranks exchange the same segments in the same order. MPI has tags for at least so many under way.
        tag = 2 * (self._exchanged % (1 << 14))
        self._exchanged += 1
        return self._giving_back(segment, Exchange(self.comm, values, tag, segment).begin())

    def _sum_copy(self, values: torch.Tensor) -> Test:
        segment = self._take()
        addend = segment[: values.numel()].copy_(values)
        request = self.comm.Iallreduce([memory(addend), MPI.FLOAT], [memory(values), MPI.FLOAT])
        return self._giving_back(segment, request.Test)

    def _take(self) -> torch.Tensor:
        if not self._spare:
            self._scratch.append(torch.empty(self.segment_values))
            self._spare.append(self._scratch[-1])
        return self._spare.pop()

    def _giving_back(self, segment: torch.Tensor, test: Test) -> Test:
        def tested() -> bool:
            if not test():
                return False
            self._spare.append(segment)
            return True

        return tested

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        return lambda: self.comm.Ialltoall([memory(sent), MPI.BYTE], [memory(received), MPI.BYTE]).Test

    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        return lambda: self.comm.Iallgather([memory(own), MPI.BYTE], [memory(all_ranks), MPI.BYTE]).Test


def most_on_a_host(comm: MPI.Intracomm) -> int:
    """Collective: how many of them the host has that has most; the same on all ranks."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return int(comm.allreduce(host.Get_size(), MPI.MAX))
    finally:
        host.Free()
