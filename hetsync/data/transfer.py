"""From the host's memory to the rank's device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from hetsync.threads import HelperThread


def each_tensor(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A nested batch with every tensor for a device replaced by what `change` makes of it."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, PackedSequence):  # whose batch sizes belong on the CPU
        return PackedSequence(change(batch.data), batch.batch_sizes, *each_tensor(batch[2:], change))
    if isinstance(batch, list | tuple):
        changed = [each_tensor(value, change) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch."""
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


class Transfer:
    """Batches are moved where they are wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, loading: Future[Any]) -> Future[Any]:
        """The batch is wanted soon. Returns at once, with what `complete` takes once it is there."""
        return loading

    def complete(self, arriving: Any) -> Any:
        """The batch on the device, for what the calling thread queues from now on."""
        return to_device(arriving, self._device)

    def close(self) -> None:
        """No batch is wanted any more."""


class PinnedTransfer(Transfer):
    """To a GPU while it computes: copies from pageable memory wait for the host, so a thread pins each batch and
    queues its copy on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._thread = HelperThread("hetsync-transfer")

    def begin(self, loading: Future[Any]) -> Future[Any]:
        return self._thread.submit(self._copy, loading)

    def _copy(self, loading: Future[Any]) -> tuple[Any, torch.cuda.Event]:
        batch = loading.result()
        # Pinned memory may be dropped at once: torch uses it anew only once the copies from it are done.
        with torch.cuda.stream(self._stream):
            copies = each_tensor(batch, self._copied)
            return copies, self._stream.record_event()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:  # no others can be pinned
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def complete(self, arriving: tuple[Any, torch.cuda.Event]) -> Any:
        batch, copied = arriving
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        each_tensor(batch, partial(_used_on, computing))
        return batch

    def close(self) -> None:
        self._thread.close()


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    """Or its memory would go to the next copy as soon as Python drops it, while this stream still reads it."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


def transfer_to(device: torch.device) -> Transfer:
    return PinnedTransfer(device) if device.type == "cuda" else Transfer(device)
