"""Sums of tensors that lie in memory which all ranks share.

Each rank adds up one part, from where the others' addends lie, and then takes the sums of the other parts from there:

    rank 0    [a0 b0]   adds a1 to a0   [A b0]   takes B    [A B]
    rank 1    [a1 b1]   adds b0 to b1   [a1 B]   takes A    [A B]

Nothing is sent. Each rank counts in words of its own how far it has come, after writing what they tell of, and reads
the others', on processors of which all see one's stores in their order (`shared_memory.stores_in_order`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hetsync.plane.base import PlaneError
from hetsync.plane.shared_memory import NAME, Area, Gather, SharedMemory
from hetsync.plane.staging import Test

# Words, in a cache line each. How many sums a rank has offered to the others, added up its part of, and taken whole.
OFFERED, ADDED, TAKEN = 0, 8, 16
OFFSETS = 64  # from this word on: where in its area they lie
MOST_OFFERED = 16  # that some rank has not taken; so a poll has no more to do
LINE_VALUES = 16  # of a cache line
MOST_VALUES_PER_RANK = 1 << 17  # of a sum: calls cost little beside adding up so many, which stay in the cache
MOST_VALUES = 1 << 20  # whatever the ranks: each has scratch memory for some
MOST_SCRATCHES = 4


def parts_of(values: int, ranks: int) -> list[slice]:
    """One for each rank, which no two share a cache line of."""
    most = -(-values // (LINE_VALUES * ranks)) * LINE_VALUES
    return [slice(min(rank * most, values), min((rank + 1) * most, values)) for rank in range(ranks)]


class Offered(NamedTuple):
    """A sum under way. Its addend lies in this rank's area: in `values` themselves, or in `scratch`, whose own type is
    float32, a copy of them."""

    values: torch.Tensor
    scratch: torch.Tensor | None
    parts: Sequence[slice]

    @property
    def shared(self) -> torch.Tensor:
        return self.values if self.scratch is None else self.scratch.view(self.values.dtype)


class SharedSums:
    """Sums of tensors of float32 or float64, in place, in the same order on all ranks."""

    least_values = 1 << 16  # for fewer, a library's sums are as fast

    def __init__(self, memory: SharedMemory, rank: int, scratch: torch.Tensor, look: Callable[[], object]) -> None:
        """A tensor that does not lie in this rank's area has at most as many bytes as `scratch`, which does. `look`
        raises where another rank has gone: of that their memory says nothing."""
        self.memory, self._rank, self._look = memory, rank, look
        self._words = memory.own.words
        self._name = self._words[NAME]
        self._to_come = MOST_SCRATCHES - 1
        self._spare, self._scratch_values = [scratch], scratch.numel()
        self._to_offer: deque[torch.Tensor] = deque()
        self._under_way: deque[Offered] = deque()
        self._begun = self._ended = 0

    @staticmethod
    def open(
        rank: int,
        ranks: int,
        gather: Gather,
        look: Callable[[], object] = lambda: None,
        own: SharedMemory | None = None,
    ) -> SharedSums | None:
        """Collective. None, on all ranks, where they do not share their memory; `own` as in `SharedMemory.open`."""
        memory = SharedMemory.open(rank, ranks, gather, own)
        if memory is None:
            return None
        scratch = memory.allocate(MOST_VALUES)
        all_have = all(has for (has,) in gather((int(scratch is not None),)))
        return SharedSums(memory, rank, scratch, look) if scratch is not None and all_have else None

    def segment_values(self, device: torch.device) -> int:
        """Of float32, of a sum. What comes from a device is copied anyway, and each segment waits for a poll."""
        scratch = self._scratch_values
        return scratch if device.type != "cpu" else min(MOST_VALUES_PER_RANK * len(self.memory.areas), scratch)

    def begin(self, values: torch.Tensor) -> Test:
        """What tests it proceeds with all that are under way."""
        self._begun += 1
        number = self._begun
        self._to_offer.append(values)

        def ended() -> bool:
            if number == self._ended + 1:  # or all of them would be looked at for each
                self._proceed()
            return number <= self._ended

        return ended

    def _proceed(self) -> None:
        """As far as it goes without waiting."""
        words = self._words
        if words[NAME] != self._name:
            raise PlaneError("the ranks that share memory are others by now")
        while self._to_offer and self._offer(self._to_offer[0]):
            self._to_offer.popleft()
        for number in range(words[ADDED] + 1, self._reached(OFFERED) + 1):
            self._add_up(number)
            words[ADDED] = number
        for number in range(words[TAKEN] + 1, self._reached(ADDED) + 1):
            self._take(number)
            words[TAKEN] = number
        for _ in range(self._ended, self._reached(TAKEN)):
            scratch = self._under_way.popleft().scratch
            self._spare += [] if scratch is None else [scratch]
            self._ended += 1
        self._look()

    def _reached(self, word: int) -> int:
        """How far all ranks have come."""
        return min(area.words[word] for area in self.memory.areas)

    def _offer(self, values: torch.Tensor) -> bool:
        """False while there is no room."""
        number, offset = self._words[OFFERED] + 1, self.memory.offset(values)
        if number > self._ended + MOST_OFFERED:
            return False
        scratch = None
        if offset is None:
            if (scratch := self._scratch()) is None:
                return False
            scratch.view(values.dtype)[: values.numel()] = values
            offset = self.memory.offset(scratch)
        assert offset is not None
        self._under_way.append(Offered(values, scratch, parts_of(values.numel(), len(self.memory.areas))))
        self._words[OFFSETS + number % MOST_OFFERED] = offset
        self._words[OFFERED] = number
        return True

    def _scratch(self) -> torch.Tensor | None:
        if not self._spare and self._to_come:
            self._to_come -= 1
            more = self.memory.allocate(self._scratch_values)
            self._spare += [] if more is None else [more]
        return self._spare.pop() if self._spare else None

    def _add_up(self, number: int) -> None:
        """This rank's part."""
        offered = self._under_way[number - self._ended - 1]
        part = offered.parts[self._rank]
        total = offered.shared[part]
        for rank, area in enumerate(self.memory.areas):
            if rank != self._rank:
                total += lying_in(area, number, part, total.dtype)

    def _take(self, number: int) -> None:
        """All parts."""
        offered = self._under_way[number - self._ended - 1]
        for rank, (area, part) in enumerate(zip(self.memory.areas, offered.parts, strict=True)):
            if rank != self._rank or offered.scratch is not None:
                offered.values[part] = lying_in(area, number, part, offered.values.dtype)


def lying_in(area: Area, number: int, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """A part of what its rank has offered by this number."""
    offset, width = area.words[OFFSETS + number % MOST_OFFERED], dtype.itemsize // 4
    return area.values[offset + width * part.start : offset + width * part.stop].view(dtype)
