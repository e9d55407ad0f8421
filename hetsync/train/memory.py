"""What slices take of a GPU's memory, where no loss was given to measure that before training (`Job.measure`).

Such ranks start with equal shares. Before shares follow their speeds, the coordinator is told how many samples fit.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hetsync.plane.base import Plane
from hetsync.profiling.device import USABLE_FRACTION
from hetsync.profiling.measure import Place, ranks_sharing

# By the first of these slices the optimizer's state and the engine's buffers are there; the last is before any share
# changes (speed_tracker.LEAST_OBSERVATIONS).
FIRST_SLICE, LAST_SLICE = 3, 6


class Memory(Protocol):
    """A device's, as its allocator counts it, in bytes."""

    def allocated(self) -> int: ...

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """Since `begin_peak`."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class SliceMemory:
    """Counts what is allocated, which the host knows without waiting for the device."""

    def __init__(self, memory: Memory, limit_bytes: int) -> None:
        self._memory = memory
        self._limit = USABLE_FRACTION * limit_bytes
        self._slices = 0
        self._before = self._held = 0  # bytes: before this slice, and the most before any
        self._each = 0.0  # bytes a sample: the most of any slice
        self._ran = 0  # samples of the largest slice

    @property
    def _watched(self) -> bool:
        return FIRST_SLICE <= self._slices <= LAST_SLICE

    def begin_slice(self) -> None:
        self._slices += 1
        if self._watched:
            self._memory.begin_peak()
            self._before = self._memory.allocated()
            self._held = max(self._held, self._before)

    def end_slice(self, samples: int) -> int | None:
        """At the last slice that is watched: how many samples fit, where that can be told."""
        if not self._watched or not samples:
            return None
        self._ran = max(self._ran, samples)
        # Gradients count as if they grew with the samples: rather too few fit than too many, but those that ran do.
        self._each = max(self._each, (self._memory.peak() - self._before) / samples)
        if self._slices < LAST_SLICE or not self._each:
            return None
        return max(self._ran, int((self._limit - self._held) / self._each))


def slice_memory(plane: Plane, place: Place, device: torch.device) -> SliceMemory | None:
    """Collective. None on a processor, whose memory is not counted."""
    sharing = ranks_sharing(plane, place, device)
    if device.type != "cuda":
        return None
    return SliceMemory(CudaMemory(device), torch.cuda.get_device_properties(device).total_memory // sharing)
