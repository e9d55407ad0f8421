"""Sums made of non-blocking collectives that are polled, whatever library carries them.

The way of a tensor in each wire format is written here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

import torch

from hetsync.config.schema import WireFormat
from hetsync.plane.base import Handle, PlaneError, Residual, Sums
from hetsync.plane.shared_memory import SharedMemory
from hetsync.plane.shared_sums import SharedSums
from hetsync.plane.staging import HostStaging, Test, at_once, staging_for
from hetsync.plane.wire import decode, deliver, encode, encode_sum, encoded_bytes, flat, padded, shard_values

# With few and small enough segments under way MPI's copies stay in the processor's cache, which more than halves the
# time of large sums in shared memory (docs/results/runtime-cost.md).
SEGMENTS_IN_FLIGHT = 4

Item = TypeVar("Item")
Result = TypeVar("Result")
# What has to wait yields while there is nothing else to do, so that a collective reads from top to bottom although it
# is polled.
Waiting = Generator[None, None, Result]
Post = Callable[[], Test]


def until(test: Test) -> Waiting[None]:
    while not test():
        yield


def then(first: Test, begin: Post) -> Test:
    """The test of what is begun once the first thing has come to its end."""
    second: Test | None = None

    def test() -> bool:
        nonlocal second
        if second is None and first():
            second = begin()
        return second is not None and second()

    return test


class Step(NamedTuple):
    """One collective: `post` it once it is `ready`."""

    post: Post
    ready: Test = at_once


class Ahead(Iterator[Item]):
    """The same items; so many of them are always made before they are asked for."""

    def __init__(self, items: Iterable[Item], count: int) -> None:
        self._items = iter(items)
        self._made = deque(islice(self._items, count))

    def __next__(self) -> Item:
        if not self._made:
            raise StopIteration
        self._made.extend(islice(self._items, 1))
        return self._made.popleft()


class Queue:
    """What a group of ranks posts strictly in the order of its tickets.

    Libraries match the collectives of a group by the order in which each rank posts them, while a
    collective gets ready to be posted when its device copy, or its first stage, is done: in another order
    on each rank. Without tickets

        rank 0: first stage of 1, second stage of 1, first stage of 2 ...
        rank 1: first stage of 1, first stage of 2, second stage of 1 ...

    would match the second stage of 1 with the first stage of 2. A queue for each stage lets first stages
    start before earlier second stages. What one ticket posts may be in segments; a few of them are under way at
    a time.
    """

    in_flight = SEGMENTS_IN_FLIGHT  # segments, at most

    def __init__(self) -> None:
        self.completed = 0  # segments
        self._tickets = 0
        self._posted = 0
        # Buffers stay here after a failure too: the library may still write to them, and survivors would crash.
        self._pending: dict[int, tuple[deque[Test], tuple[torch.Tensor, ...]]] = {}

    def ticket(self) -> int:
        """The next place in the order; every ticket must be used."""
        self._tickets += 1
        return self._tickets - 1

    def run(self, ticket: int, steps: Iterable[Step], *buffers: torch.Tensor) -> Waiting[None]:
        """Post all when it is this ticket's turn, then wait."""
        while self._posted != ticket:
            yield
        tests: deque[Test] = deque()
        self._pending[ticket] = (tests, buffers)
        for place, step in enumerate(steps):
            if place and place % self.in_flight == 0:
                yield  # or a fast library would keep its caller until all are summed
            if len(tests) == self.in_flight:
                yield from self._first_of(tests)
            yield from until(step.ready)
            yield from self.all_here()  # ready, too: what spins until all have come would spin for one that is not
            tests.append(step.post())
        self._posted += 1
        while tests:
            yield from self._first_of(tests)
        del self._pending[ticket]

    def _first_of(self, tests: deque[Test]) -> Waiting[None]:
        yield from until(tests[0])
        tests.popleft()
        self.completed += 1

    def all_here(self) -> Waiting[None]:
        """Waits until the other ranks can post this one, too, where collectives must not be posted before."""
        yield from ()


class Lane(Queue, ABC):
    """Collectives of one group of ranks."""

    segment_values: int | None = None  # of a sum, in float32; None where it goes as one piece

    @abstractmethod
    def sum_in_place(self, values: torch.Tensor) -> Post:
        """Of float32 or float64: one segment."""

    @abstractmethod
    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Post:
        """Of bytes: equal parts, one for each rank."""

    @abstractmethod
    def all_gather(self, own: torch.Tensor, all_ranks: torch.Tensor) -> Post:
        """Of bytes: every rank's part, in rank order."""


class _Collective(Handle):
    def __init__(self, sums: PolledSums, steps: Waiting[None]) -> None:
        self._sums = sums
        self._steps = steps
        self.finished = False

    def done(self) -> bool:
        if not self.finished:
            self._sums._progress()
        return self.finished

    def step(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self.finished = True


class PolledSums(Sums):
    """Sums on two lanes: one for what is not rounded and for first stages, one for second stages.

    `by` names what carries them. `reads`: the CUDA device whose memory the lanes' library reads and writes, wherever
    tensors are; None where it is the host's. `shared` sums what is not rounded in the ranks' own memory, but for what
    is small.
    """

    def __init__(
        self,
        by: str,
        rank: int,
        size: int,
        first: Lane,
        second: Lane,
        reads: torch.device | None = None,
        shared: SharedSums | None = None,
    ) -> None:
        self._rank, self._size = rank, size
        self._by = by if shared is None else f"{by} and shared memory"
        self._first, self._second = first, second
        self._reads = reads
        self._shared = shared
        self._under_way: list[_Collective] = []
        self._staging: dict[torch.device, HostStaging] = {}
        self._error: PlaneError | None = None

    @property
    def sums_by(self) -> str:
        return self._by

    @property
    def shared_memory(self) -> SharedMemory | None:
        return None if self._shared is None else self._shared.memory

    def allocate(self, count: int, device: torch.device) -> torch.Tensor:
        memory = self.shared_memory if device.type == "cpu" else None
        found = None if memory is None else memory.allocate(count)
        return super().allocate(count, device) if found is None else found

    def allreduce(self, tensor: torch.Tensor, wire: WireFormat = "float32", residual: Residual | None = None) -> Handle:
        self._raise_latched()
        tensor = flat(tensor)
        encoded_bytes(0, wire)  # an unknown format raises before a ticket is drawn
        steps = self._sum(tensor, residual) if wire == "float32" else self._rounded_sum(tensor, wire, residual)
        collective = _Collective(self, steps)
        self._under_way.append(collective)
        self._step(collective)
        return collective

    def _sum(self, tensor: torch.Tensor, residual: Residual | None) -> Waiting[None]:
        deliver(residual, tensor)
        ticket = self._first.ticket()
        staging = self._staging_for(tensor.device)
        most = self._first.segment_values if self._shared is None else self._shared.segment_values(tensor.device)
        segments = tensor.split(most * 4 // tensor.itemsize if most else max(tensor.numel(), 1))
        # Before its turn, and beside the sums of segments before: a device copies while a library sums.
        steps = Ahead((self._segment(segment, staging) for segment in segments), self._first.in_flight)
        yield from self._first.run(ticket, steps, tensor)

    def _segment(self, segment: torch.Tensor, staging: HostStaging) -> Step:
        """Its way to where the library finds it begins now, and its way back once it is summed."""
        values, ready = staging.fetch(segment)
        post = self._sum_in_place(values)
        return Step(lambda: then(post(), lambda: staging.store(values, into=segment)), ready)

    def _sum_in_place(self, values: torch.Tensor) -> Post:
        if (shared := self._shared) is not None and values.numel() >= shared.least_values:
            return lambda: shared.begin(values)
        return self._first.sum_in_place(values)

    def _rounded_sum(self, tensor: torch.Tensor, wire: WireFormat, residual: Residual | None) -> Waiting[None]:
        first, first_ticket = self._first, self._first.ticket()
        second, second_ticket = self._second, self._second.ticket()
        staging = self._staging_for(tensor.device)
        n, shard = tensor.numel(), shard_values(tensor.numel(), self._size, wire)
        n_padded = shard * self._size
        with staging.context():
            addend = padded(encode(tensor, wire), encoded_bytes(n_padded, wire))
        # Before `fetch`, which waits for whatever used this memory earlier.
        shards = staging.buffer(addend.numel())
        sent, ready = staging.fetch(addend)
        yield from first.run(first_ticket, [Step(first.all_to_all(sent, shards), ready)], sent, shards)
        with staging.context():
            addends = decode(staging.load(shards), n_padded, wire).view(self._size, shard)
            total = encode_sum(addends.sum(0), wire, residual, self._rank * shard)
        totals = staging.buffer(total.numel() * self._size)
        own, ready = staging.fetch(total)
        yield from second.run(second_ticket, [Step(second.all_gather(own, totals), ready)], own, totals)
        # The owner decodes its own shard as well: every rank holds the same bits.
        with staging.context():
            values = decode(staging.load(totals), n_padded, wire)[:n]
        yield from until(staging.store(values, into=tensor))

    @property
    def moves(self) -> int:
        first, second = self._first, self._second
        return first.completed + (0 if second is first else second.completed)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def _staging_for(self, device: torch.device) -> HostStaging:
        if device not in self._staging:
            self._staging[device] = staging_for(device, self._reads)
        staging = self._staging[device]
        staging.begin()
        return staging

    def _progress(self) -> None:
        self._raise_latched()
        for collective in tuple(self._under_way):
            self._step(collective)

    def _step(self, collective: _Collective) -> None:
        try:
            collective.step()
        except Exception as error:
            # Latched: whatever was posted after it will not come to an end either.
            self._error = error if isinstance(error, PlaneError) else self._failure(error)
            raise self._error from error
        if collective.finished:
            self._under_way.remove(collective)

    def _failure(self, error: Exception) -> PlaneError:
        """What an error of the library's means."""
        return PlaneError(f"allreduce on rank {self._rank} failed: {error}")

    def _raise_latched(self) -> None:
        if self._error is not None:
            raise type(self._error)(f"the plane has failed before: {self._error}") from self._error

    def close(self) -> None:
        if self._under_way:
            raise PlaneError(f"closing with {len(self._under_way)} collectives under way on rank {self._rank}")
        if (memory := self.shared_memory) is not None:
            memory.close()
