"""Synchronous mode's tensors: gradient sums in buckets, handed over in backward order while backward still runs.

Each slice adds samples · (mean gradient) into its bucket; in a piece's last slice a bucket is released as soon as
its last gradient is there. Sums are divided by the samples of the round, never by the number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hetsync.plane.base import WireFormat
from hetsync.plane.wire import round_trip


class Bucket:
    """Some parameters' gradient sums in one flat buffer."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self.used = [0] * len(parameters)  # gradients that each parameter got in this round
        self.missing = len(parameters)


def make_buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Parameters in reverse order, as backward reaches them, in buckets of about `bucket_bytes`."""
    buckets: list[Bucket] = []
    group: list[torch.nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        if group and size + 4 * parameter.numel() > bucket_bytes:
            buckets.append(Bucket(group))
            group, size = [], 0
        group.append(parameter)
        size += 4 * parameter.numel()
    return [*buckets, Bucket(group)]


class Gradients:
    """Main thread: `open_slice`, backward (hooks), `flush`, `collect`. Communication thread: `released`."""

    def __init__(
        self,
        model: torch.nn.Module,
        bucket_bytes: int,
        pace: Callable[[float], None],
        wake: Callable[[], None],
    ) -> None:
        """`pace(fraction)` holds an emulated device back to its time; `wake` tells that a bucket is released."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.buckets = make_buckets(self._parameters, bucket_bytes)
        # The tail: how often each parameter was used, then the float buffers. Always float32.
        count = len(self._parameters) + sum(buffer.numel() for buffer in self._buffers)
        self._tail = torch.zeros(count, device=self.buckets[0].flat.device)
        self.samples = 0  # of the piece whose buckets were all released last
        self._residuals: list[torch.Tensor] = []
        self._pace = pace
        self._wake = wake
        self._released = threading.Semaphore(0)
        self._next = 0
        self._slice_samples = 0
        self._last_slice = False
        self._listening = False
        self._where = {
            parameter: (bucket, index) for bucket in self.buckets for index, parameter in enumerate(bucket.parameters)
        }
        self._backward_share = self._cumulative_shares()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _cumulative_shares(self) -> list[float]:
        total = sum(bucket.flat.numel() for bucket in self.buckets)
        sums = [sum(b.flat.numel() for b in self.buckets[: i + 1]) for i in range(len(self.buckets))]
        return [done / total for done in sums]

    def open_slice(self, samples: int, last: bool) -> None:
        """The next backward is of a slice of `samples`; with `last`, buckets are released as they fill."""
        self._slice_samples = samples
        self._last_slice = last
        self._listening = True

    def close(self) -> None:
        """Leave gradients alone (delayed mode, evaluation, profiling)."""
        self._listening = False

    @torch.no_grad()
    def _arrive(self, parameter: torch.Tensor) -> None:
        if not self._listening:
            return
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.grad is not None
        bucket, index = self._where[parameter]
        bucket.views[index].add_(parameter.grad, alpha=self._slice_samples)
        bucket.used[index] += 1
        parameter.grad = None
        if self._last_slice:
            bucket.missing -= 1
            self._release_full()

    def _release_full(self) -> None:
        """Release in the one order that all ranks share, whatever order backward took here."""
        while self._next < len(self.buckets):
            if self.buckets[self._next].missing:
                return
            # Backward takes about twice as long as forward: gradients come in the last two thirds.
            self._pace((1 + 2 * self._backward_share[self._next]) / 3)
            self._release()

    def _release(self) -> None:
        self._next += 1
        self._released.release()
        self._wake()

    @torch.no_grad()
    def flush(self, samples: int) -> None:
        """The piece's last backward is over: release the buckets that lack a gradient, then the tail."""
        self.samples = samples
        while self._next < len(self.buckets):
            self._release()
        used = [count for bucket in self.buckets for count in bucket.used]
        self._tail[: len(used)] = torch.tensor(used)
        if self._buffers:
            torch.cat([buffer.flatten() for buffer in self._buffers], out=self._tail[len(used) :])
            self._tail[len(used) :] *= samples
        self._release()

    def released(self) -> bool:
        """Has the next bucket (or, after the last, the tail) been released? Counts it as fetched if so."""
        return self._released.acquire(blocking=False)

    @torch.no_grad()
    def load(self, index: int, wire: WireFormat) -> tuple[torch.Tensor, WireFormat]:
        """What goes out, and how: a bucket with what rounding lost of it last time, or the tail."""
        if index == len(self.buckets):
            return self._tail, "float32"
        flat = self.buckets[index].flat
        if wire != "float32":
            if not self._residuals:
                self._residuals = [torch.zeros_like(bucket.flat) for bucket in self.buckets]
            flat += self._residuals[index]
            sent = round_trip(flat, wire)
            torch.sub(flat, sent, out=self._residuals[index])
            flat.copy_(sent)
        return flat, wire

    @torch.no_grad()
    def collect(self, samples: int) -> None:
        """Sums are in: set the gradients of the round's `samples`; buffers take their mean over samples."""
        used = self._tail[: len(self._parameters)].tolist()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view.div(samples) if used.pop(0) else None
            bucket.flat.zero_()
            bucket.used = [0] * len(bucket.parameters)
            bucket.missing = len(bucket.parameters)
        self._collect_buffers(samples)
        self._next = 0
        self._listening = False

    def _collect_buffers(self, samples: int) -> None:
        sums = self._tail[len(self._parameters) :]
        parts = sums.div_(samples).split([buffer.numel() for buffer in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
