"""Synchronous mode on a rank alone: its gradients are whole, and nothing travels.

The same calls as `gradients.Gradients`. Copies and sums of gradients would take a fifth of a step of some milliseconds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from hetsync.errors import UserError
from hetsync.plane.base import WireFormat
from hetsync.sync.gradients import CHANGED, Arrivals, Bucket, Stage
from hetsync.sync.tail import Tail

WATCHED_SLICES = 8  # a loop that changes gradients where it must not does so from the beginning


class LoneGradients:
    def __init__(
        self,
        model: torch.nn.Module,
        wake: Callable[[], None],
        groups: Sequence[Sequence[torch.nn.Parameter]] = (),
    ) -> None:
        """Arguments as those of `Gradients`."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        place = {parameter: number for number, group in enumerate(groups) for parameter in group}
        count = max(1, len(groups))
        self._parameters = [[p for p in trained if place.get(p, count - 1) == number] for number in range(count)]
        self.buckets: list[Bucket] = []
        self.stages = [Stage([], 0, Tail(0, [], next(model.parameters()).device)) for _ in range(count)]
        self.samples = 0  # of the task that was flushed last
        self._wake = wake
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}  # over a task's slices, weighted by samples
        self._released = threading.Semaphore(0)
        self._flushed = self._collected = 0  # stages
        self._taken: set[int] = set()
        self._slice_samples = 0
        self._last_slice = self._single = False
        self._slices_left = 0  # to be watched
        self._arrivals = Arrivals()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._watch(trained)

    def _watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        def arrive(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, torch.nn.Parameter)
            self._arrivals.add(parameter)

        self._slices_left = WATCHED_SLICES
        self._hooks = [parameter.register_post_accumulate_grad_hook(arrive) for parameter in parameters]

    @property
    def tail(self) -> Tail:
        return self.stages[-1].tail

    def adopt_buffers(self) -> None:
        """They are this rank's own."""

    def open_task(self) -> None:
        self._collected = self._flushed = 0
        self._single = True  # so far

    def open_slice(self, samples: int, last: bool) -> None:
        self._slice_samples = samples
        self._last_slice = last

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def take(self, number: int) -> None:
        """Raises UserError where gradients were changed since backward, as they must not be on several ranks."""
        if number in self._taken or number < self._collected:
            return
        if self._arrivals.changed():
            raise UserError(CHANGED)
        self._taken.add(number)
        self._arrivals.forget(self._parameters[number])
        if self._single and self._last_slice:
            return
        for parameter in self._parameters[number]:
            if parameter.grad is not None:
                addend = parameter.grad.float() * self._slice_samples
                before = self._sums.get(parameter)
                self._sums[parameter] = addend if before is None else before.add_(addend)
                parameter.grad = None

    def close_slice(self) -> None:
        for number in range(len(self.stages)):
            self.take(number)
        self._taken.clear()
        self._single = self._last_slice
        self._arrivals = Arrivals()
        self._slices_left -= 1
        if not self._slices_left:
            self.close()

    @torch.no_grad()
    def flush(self, samples: int, number: int | None = None, scaled: bool = False, computed: bool = True) -> float:
        """Returns something finite where all gradients up to this stage are."""
        self.samples = samples
        total = 0.0
        for place in range(self._flushed, len(self.stages) if number is None else number + 1):
            mine = [self._sums.get(p, p.grad) for p in self._parameters[place]]
            found = [gradient for gradient in mine if gradient is not None]
            if found and not scaled:
                total += float(torch.stack([gradient.sum() for gradient in found]).sum())
                if not math.isfinite(total):
                    break
            self._flushed += 1
            self._released.release()
            self._wake()
        return total

    @torch.no_grad()
    def collect(self, number: int | None = None) -> int:
        for place in range(self._collected, len(self.stages) if number is None else number + 1):
            for parameter in self._parameters[place]:
                if (total := self._sums.pop(parameter, None)) is not None:
                    parameter.grad = total.div_(self.samples).to(parameter.dtype)
            self._collected += 1
        return self.samples

    @property
    def has_released(self) -> bool:
        return self._flushed > 0

    def is_collected(self, number: int) -> bool:
        return number < self._collected

    def discard(self) -> None:
        self._sums.clear()
        self._taken.clear()
        for parameter in (parameter for stage in self._parameters for parameter in stage):
            parameter.grad = None
        self._arrivals = Arrivals()

    @property
    def summed_samples(self) -> int:
        return self.samples

    def released(self) -> bool:
        return self._released.acquire(blocking=False)

    def pack(self, index: int, wire: WireFormat) -> torch.Tensor:
        raise AssertionError("a rank alone has no buckets")
