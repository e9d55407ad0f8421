"""Memory that the ranks of a host share: each has an area, which the others map too.

An area is a memfd. So it takes no room of /dev/shm, of which containers have little, and ends with its processes.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

NAME = mmap.PAGESIZE // 8 - 1  # of the words: by this one others know an area

Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]  # collective: what each rank gives, in their order


class Area:
    """A rank's memory: a page of `words` of 64 bits, and `values`, all of it as float32."""

    def __init__(self, descriptor: int, size: int) -> None:
        mapping = mmap.mmap(descriptor, size)
        self.bytes = memoryview(mapping)
        self.words = self.bytes[: mmap.PAGESIZE].cast("q")
        self.values = torch.frombuffer(mapping, dtype=torch.float32)


class SharedMemory:
    """Every rank's area, and tensors in this one's."""

    def __init__(self, size: int) -> None:
        """OSError where the system has no such memory. It is taken by tensors alone; `size` bounds all of them."""
        self._size = size
        self._file = os.fdopen(os.memfd_create("hetsync"), "r+b", buffering=0)
        os.truncate(self._file.fileno(), size)
        os.posix_fallocate(self._file.fileno(), 0, mmap.PAGESIZE)
        self.own = Area(self._file.fileno(), size)
        self.areas: list[Area] = []  # of all ranks, once they are open
        self._lock = threading.Lock()
        self._end = mmap.PAGESIZE  # of what has been taken so far
        self._spare: dict[int, list[int]] = defaultdict(list)  # by size, where parts begin that nobody uses any more

    @staticmethod
    def open(rank: int, gather: Gather, own: SharedMemory | None = None) -> SharedMemory | None:
        """Collective: of ranks each of which sees the memory of all; None, on all of them, where one does not. `own` is
        what this rank has shared before with others, who look at it no more."""
        own = SharedMemory._made() if own is None else own
        told = gather((0, 0, 0, 0) if own is None else own._address())
        seen = own is not None and own._sees(rank, told)
        return own if all(answer for (answer,) in gather((int(seen),))) else None

    @staticmethod
    def _made() -> SharedMemory | None:
        # Where address space is limited, areas as large as the host's memory would use it up.
        unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        if not unlimited or not hasattr(os, "memfd_create"):
            return None
        try:
            return SharedMemory(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
        except OSError:
            return None

    def _address(self) -> tuple[int, ...]:
        self.own.words[:] = memoryview(bytes(mmap.PAGESIZE)).cast("q")
        self.own.words[NAME] = secrets.randbits(62)
        return os.getpid(), self._file.fileno(), self._size, self.own.words[NAME]

    def _sees(self, rank: int, told: Sequence[Sequence[int]]) -> bool:
        """Opens all areas. It cannot where another's are those of another user, or processes have other numbers."""
        try:
            self.areas = [self.own if place == rank else _opened(*address) for place, address in enumerate(told)]
        except OSError:
            return False
        return True

    def tensor(self, values: int) -> torch.Tensor | None:
        """New memory in this rank's area, not cleared, for so many float32 values; None where there is none."""
        size = -(-4 * values // mmap.PAGESIZE) * mmap.PAGESIZE
        start = self._take(size) if values else None
        if start is None:
            return None
        part = self.own.bytes[start : start + size]
        weakref.finalize(part, self._spare[size].append, start).atexit = False  # the tensor, and its views, keep it
        return torch.frombuffer(part, dtype=torch.float32, count=values)

    def _take(self, size: int) -> int | None:
        with self._lock:
            if self._spare[size]:
                return self._spare[size].pop()
            start = self._end
            if start + size > self._size:
                return None
            try:
                os.posix_fallocate(self._file.fileno(), start, size)  # or writing there might kill the process
            except OSError:
                return None
            self._end += size
            return start

    def place(self, tensor: torch.Tensor) -> int | None:
        """Which value of this rank's area is the tensor's first; None where it lies elsewhere."""
        start = tensor.data_ptr() - self.own.values.data_ptr()
        return start // 4 if 0 <= start < self._size else None

    def close(self) -> None:
        """Leave the others' areas. Tensors stay as they are."""
        self.areas = []


def _opened(process: int, descriptor: int, size: int, name: int) -> Area:
    """OSError where there is no such area."""
    with open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
        if not 0 < size == os.fstat(file.fileno()).st_size:
            raise FileNotFoundError("another file")
        area = Area(file.fileno(), size)
    if area.words[NAME] != name:
        raise FileNotFoundError("another file")
    return area
