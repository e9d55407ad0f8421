"""Where MPI finds the bytes of a tensor: in the tensor itself, or in pinned host memory.

What has to wait for a device is written as a generator that yields while there is nothing to do but wait,
so that a collective reads from top to bottom although it is polled.

Copies and conversions of CUDA tensors run on a stream of their own, after what the caller had queued on
its current stream, and beside the computation that it queues later.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

Result = TypeVar("Result")
Waiting = Generator[None, None, Result]


class HostStaging:
    """CPU tensors: MPI works on them where they are."""

    def begin(self) -> None:
        """Order the work to come after what the calling thread has queued so far."""

    def context(self) -> AbstractContextManager[object]:
        """Inside, torch operations are queued in order with the copies below; never yield inside."""
        return nullcontext()

    def buffer(self, n_bytes: int) -> torch.Tensor:
        """New memory that MPI can write."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def fetch(self, tensor: torch.Tensor) -> Waiting[torch.Tensor]:
        """The values of a tensor where MPI can read and write them, once they are there."""
        yield from ()
        return tensor

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        """What MPI has written, as a tensor on the device; to be used inside `context`."""
        return buffer

    def store(self, values: torch.Tensor, into: torch.Tensor) -> Waiting[None]:
        """Copy to the caller's tensor (if it is not the same memory) and wait until that has happened."""
        if values is not into:
            into.copy_(values)
        yield from ()


class CudaStaging(HostStaging):
    """CUDA tensors, through pinned host memory, or with a CUDA-aware MPI in place.

    Buffers may be dropped as soon as MPI is done with them: torch's pinned allocator reuses them only
    after the copies that were queued on the stream.
    """

    def __init__(self, device: torch.device, cuda_aware: bool) -> None:
        self._device = device
        self._cuda_aware = cuda_aware
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def buffer(self, n_bytes: int) -> torch.Tensor:
        if self._cuda_aware:
            with self.context():
                return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> Waiting[torch.Tensor]:
        if not self._cuda_aware:
            with self.context():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                tensor = pinned.copy_(tensor, non_blocking=True)
        yield from self._settle()
        return tensor

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(self._device, non_blocking=True)

    def store(self, values: torch.Tensor, into: torch.Tensor) -> Waiting[None]:
        if values is not into:
            with self.context():
                into.copy_(values, non_blocking=True)
        yield from self._settle()

    def _settle(self) -> Waiting[None]:
        event = self._stream.record_event()
        while not event.query():
            yield
