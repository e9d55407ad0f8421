"""Memory that the ranks of a host share: each has an area, which the others map too.

An area is a memfd. So it takes no room of /dev/shm, of which containers have little, and ends with the processes that
have it, those that were forked from them, too.
"""

from __future__ import annotations

import mmap
import os
import platform
import resource
import secrets
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

NAME = mmap.PAGESIZE // 8 - 1  # of the words: by this one others know an area

PIECE_BYTES = 16 << 20  # of memory that is asked for at once

Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]  # collective: what each rank gives, in their order


class Address(NamedTuple):
    """Where processes of this host find an area: which file of a process, how large, and what names it. Processes of
    another `network` (a namespace of it, or another machine) count as those of another host."""

    process: int
    descriptor: int
    size: int
    name: int
    network: int


NOWHERE = Address(0, 0, 0, 0, 0)


class Area:
    """A rank's memory: a page of `words` of 64 bits, and `values`, all of it as float32."""

    def __init__(self, descriptor: int, size: int) -> None:
        mapping = mmap.mmap(descriptor, size)
        mapping.madvise(mmap.MADV_DONTDUMP)  # a dump would take memory for all of it, most of which has none
        self.mapping = mapping
        self.bytes = memoryview(mapping)
        self.words = self.bytes[: mmap.PAGESIZE].cast("q")
        self.values = torch.frombuffer(mapping, dtype=torch.float32)


class SharedMemory:
    """Every rank's area, and tensors in this one's."""

    def __init__(self, size: int) -> None:
        """OSError where the system has no such memory. Pages are taken as tensors are allocated, at most `size`."""
        self._size = size
        self._file = os.fdopen(os.memfd_create("hetsync"), "r+b", buffering=0)
        os.truncate(self._file.fileno(), size)
        os.posix_fallocate(self._file.fileno(), 0, mmap.PAGESIZE)
        self.own = Area(self._file.fileno(), size)
        self.areas: list[Area] = []  # of all ranks, once they are open
        self._lock = threading.Lock()
        self._network = os.stat("/proc/self/ns/net").st_ino
        self._end = mmap.PAGESIZE  # of what has been claimed so far
        self._spare: dict[int, list[int]] = defaultdict(list)  # by size, where parts begin that nobody has any more

    @staticmethod
    def open(rank: int, ranks: int, gather: Gather, own: SharedMemory | None = None) -> SharedMemory | None:
        """Collective: of ranks each of which sees the memory of all; None, on all of them, where one does not. `own` is
        what this rank has shared before with others, who look at it no more."""
        own = SharedMemory._made(ranks) if own is None else own
        told = gather(NOWHERE if own is None else own._begin_anew())
        seen = own is not None and own._sees(rank, [Address(*address) for address in told])
        return own if all(answer for (answer,) in gather((int(seen),))) else None

    @staticmethod
    def _made(ranks: int) -> SharedMemory | None:
        # Where address space is limited, the areas of all would use it up.
        unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        if not (unlimited and stores_in_order() and hasattr(os, "memfd_create")):
            return None
        try:
            # A rank may take twice its part of the host's memory there. Address space has room for all areas then.
            return SharedMemory(-(-2 * os.sysconf("SC_PHYS_PAGES") // ranks) * mmap.PAGESIZE)
        except OSError:
            return None

    def _begin_anew(self) -> Address:
        """With words that are zero, and another name."""
        self.own.words[:] = memoryview(bytes(mmap.PAGESIZE)).cast("q")
        self.own.words[NAME] = secrets.randbits(62)
        return Address(os.getpid(), self._file.fileno(), self._size, self.own.words[NAME], self._network)

    def _sees(self, rank: int, addresses: Sequence[Address]) -> bool:
        """Opens all areas. It cannot where another's are those of another user, or processes have other numbers."""
        if len({address.network for address in addresses}) > 1:
            return False
        try:
            self.areas = [self.own if other == rank else opened(address) for other, address in enumerate(addresses)]
        except OSError:
            return False
        return True

    def allocate(self, count: int) -> torch.Tensor | None:
        """So many float32 values of this rank's area, not cleared; None where there is no memory."""
        size = -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        start = self._claim(size) if count else None
        if start is None:
            return None
        part = self.own.bytes[start : start + size]
        # The tensor, and its views, keep the part.
        weakref.finalize(part, _give_back, self.own, start, size, self._spare[size], os.getpid()).atexit = False
        return torch.frombuffer(part, dtype=torch.float32, count=count)

    def _claim(self, size: int) -> int | None:
        with self._lock:
            start = self._spare[size].pop() if self._spare[size] else self._end
            if start + size > self._size:
                return None
            self._end = max(self._end, start + size)
        try:
            # Or writing there might kill the process. A signal makes each call begin anew: with a timer's, a long one
            # would never end.
            for piece in range(start, start + size, PIECE_BYTES):
                os.posix_fallocate(self._file.fileno(), piece, min(PIECE_BYTES, start + size - piece))
        except OSError:
            _give_back(self.own, start, size, self._spare[size], os.getpid())
            return None
        return start

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Of the tensor in this rank's area, in float32 values; None where it lies elsewhere."""
        start = tensor.data_ptr() - self.own.values.data_ptr()
        return start // 4 if 0 <= start < self._size else None

    def close(self) -> None:
        """Leave the others' areas. Tensors stay as they are."""
        self.areas = []


def stores_in_order() -> bool:
    """Do all processors of this host see one's stores in their order? What is counted there is after what it tells
    of."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _give_back(area: Area, start: int, size: int, spare: list[int], process: int) -> None:
    """Nobody has this part any more: its memory is the system's, and its place another tensor's."""
    if os.getpid() == process:  # or what was forked would take it from its parent
        area.mapping.madvise(mmap.MADV_REMOVE, start, size)
        spare.append(start)


def opened(address: Address) -> Area:
    """OSError where there is no such area."""
    path = f"/proc/{address.process}/fd/{address.descriptor}"
    if not 0 < address.size == os.stat(path).st_size:
        raise FileNotFoundError("another file")
    with open(path, "r+b", buffering=0) as file:
        area = Area(file.fileno(), address.size)
    if area.words[NAME] != address.name:
        raise FileNotFoundError("another file")
    return area
