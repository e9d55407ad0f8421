"""Where libraries find the bytes of a tensor: in the tensor itself, or in pinned host memory.

What takes a device some time is begun at once and comes with a test, so that the next segment is on its way while
an earlier one is summed.

Copies and conversions of CUDA tensors run on a stream of their own, after what the caller had queued on
its current stream, and beside the computation that it queues later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Test = Callable[[], bool]  # has what was begun come to its end? It raises where that has failed


def at_once() -> bool:
    """The test of what needs no time."""
    return True


class HostStaging:
    """CPU tensors: libraries work on them where they are."""

    def begin(self) -> None:
        """Order the work to come after what the calling thread has queued so far."""

    def context(self) -> AbstractContextManager[object]:
        """Inside, torch operations are queued in order with the copies below; never yield inside."""
        return nullcontext()

    def buffer(self, n_bytes: int) -> torch.Tensor:
        """New memory that the library can write."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        """Begin to bring the values of a tensor to where the library can read and write them; there once it tests."""
        return tensor, at_once

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        """What the library has written, as a tensor on the device; to be used inside `context`."""
        return buffer

    def store(self, values: torch.Tensor, into: torch.Tensor) -> Test:
        """Begin to copy to the caller's tensor, if it is not the same memory."""
        if values is not into:
            into.copy_(values)
        return at_once


class CopyStaging(HostStaging):
    """Tensors of devices that work in one order, whichever thread queues, and have no pinned memory (Apple's): copies
    wait for what is queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        return tensor.cpu(), at_once

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(self._device)


class CudaStaging(HostStaging):
    """CUDA tensors, through pinned host memory; or `direct`, for libraries that read and write the device's memory:
    they find CUDA tensors in place, and of others a copy there.

    Buffers may be dropped as soon as the library is done with them: torch's pinned allocator reuses them only
    after the copies that were queued on the stream.
    """

    def __init__(self, device: torch.device, direct: bool) -> None:
        self._device = device
        self._direct = direct
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def buffer(self, n_bytes: int) -> torch.Tensor:
        if self._direct:
            with self.context():
                return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Test]:
        if tensor.is_cuda != self._direct:
            with self.context():
                there = self.buffer(tensor.nbytes).view(tensor.dtype)
                tensor = there.copy_(tensor, non_blocking=True)
        return tensor, self._stream.record_event().query

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(self._device, non_blocking=True)

    def store(self, values: torch.Tensor, into: torch.Tensor) -> Test:
        if values is not into:
            with self.context():
                into.copy_(values, non_blocking=True)
        return self._stream.record_event().query


def staging_for(device: torch.device, reads: torch.device | None) -> HostStaging:
    """Of tensors there. `reads`: the device whose memory the library reads and writes, in place of the host's."""
    if reads is not None or device.type == "cuda":
        return CudaStaging(reads or device, reads is not None)
    return HostStaging() if device.type == "cpu" else CopyStaging(device)
