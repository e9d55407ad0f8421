"""What a rank's slices are timed by. Callers treat real and emulated devices alike:

    device.begin_slice(samples);  ... forward, backward with pace(0.5) on the way ...;  device.end_slice()
    device.begin_step();  ... the optimizer's step, after a wait for other ranks ...;  device.end_step()
    seconds = device.take_seconds()

A host queues work for a GPU and goes on. So only the last line waits for the device: there, and not before, the time
of the others is read.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

# A host queues no further slice while so many are not done: each keeps a batch and its activations in memory.
MOST_SLICES_QUEUED = 2


class Device(ABC):
    """What a rank's slices are timed by, with totals over all slices so far.

    `emulated_seconds` is what the device took (what `take_seconds` tells), `real_seconds` what was really computed,
    `overruns` the slices whose real compute ended late, and `overrun_seconds` by how much in total. `on_host` says that
    slices are computed by the cores that the process's other threads take, too.
    """

    on_host = False

    def __init__(self) -> None:
        self.slices = 0
        self.emulated_seconds = 0.0
        self.real_seconds = 0.0
        self.overruns = 0
        self.overrun_seconds = 0.0
        self._untaken = 0.0

    @abstractmethod
    def begin_slice(self, samples: int) -> None:
        """Start a slice of this many samples."""

    @abstractmethod
    def pace(self, fraction: float) -> None:
        """Return once this fraction of the slice's time has passed: called while backward runs, so that
        gradients become ready when the device would have them."""

    @abstractmethod
    def end_slice(self, stepped: bool = False) -> None:
        """All of the slice's work has been queued; an emulated device returns once its time is up. `stepped`: the
        optimizer's step was in it."""

    @abstractmethod
    def begin_step(self) -> None:
        """What follows, up to `end_step`, belongs to the slice that has ended: in synchronous mode, the optimizer's
        step on the sums that it has waited for."""

    @abstractmethod
    def end_step(self) -> None:
        """The step has been queued."""

    def take_seconds(self) -> float:
        """The device's seconds for all since the last call, once that is done."""
        seconds, self._untaken = self._untaken, 0.0
        return seconds

    def _count(self, device_seconds: float, real_seconds: float) -> None:
        self.emulated_seconds += device_seconds
        self._untaken += device_seconds
        self.real_seconds += real_seconds


class RealDevice(Device):
    """The machine's own processor: time is measured, never added."""

    on_host = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began = 0.0

    def begin_slice(self, samples: int) -> None:
        self._began = self._clock()

    def pace(self, fraction: float) -> None:
        pass

    def end_slice(self, stepped: bool = False) -> None:
        self.slices += 1
        self.end_step()

    def begin_step(self) -> None:
        self._began = self._clock()

    def end_step(self) -> None:
        seconds = self._clock() - self._began
        self._count(seconds, seconds)


class Mark(Protocol):
    """A place in the order of a device's work, as torch.cuda.Event has it."""

    def synchronize(self) -> None:
        """Return once the device has come there."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds that the device took from here to there, which it has both passed."""


class MarkedSpans:
    """Stretches of what a host queues for a device, each between two marks. The host waits for marks only, never for
    all that is queued on the device, among it copies and sums of other threads."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        """`mark` leaves one behind all that the calling thread has queued."""
        self._mark = mark
        self._began: Mark | None = None
        self._ended: list[tuple[Mark, Mark]] = []  # since the last `take_seconds`

    def begin(self) -> None:
        self._began = self._mark()

    def end(self) -> None:
        assert self._began is not None
        self._ended.append((self._began, self._mark()))

    def wait_but_for(self, most: int) -> None:
        """Until the device has yet to come to the end of so many of them at most."""
        if len(self._ended) > most:
            self._ended[-most - 1][1].synchronize()

    def take_seconds(self) -> list[float]:
        """Of those since the last call, once the device is through with them."""
        found = []
        for began, ended in self._ended:
            began.synchronize()  # a loop may have changed streams on the way
            ended.synchronize()
            found.append(began.elapsed_time(ended) / 1000)
        self._ended.clear()
        return found


class QueueingDevice(Device):
    """A device that works off what the host queues: slices and steps are timed by marks in that queue.

    Not safe for use by several threads.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        """`mark` as for `MarkedSpans`."""
        super().__init__()
        self._spans = MarkedSpans(mark)

    def begin_slice(self, samples: int) -> None:
        self._spans.wait_but_for(MOST_SLICES_QUEUED - 1)
        self._spans.begin()

    def pace(self, fraction: float) -> None:
        pass

    def end_slice(self, stepped: bool = False) -> None:
        self.slices += 1
        self.end_step()

    def begin_step(self) -> None:
        self._spans.begin()

    def end_step(self) -> None:
        self._spans.end()

    def take_seconds(self) -> float:
        for seconds in self._spans.take_seconds():
            self._count(seconds, seconds)
        return super().take_seconds()


def marks_on(device: torch.device) -> Callable[[], Mark] | None:
    """What leaves a mark behind all that the calling thread has queued on the device. None where work is done when
    calls return, as on a processor."""
    if device.type == "cuda":
        return partial(cuda_mark, device)
    return mps_mark if device.type == "mps" else None


def settle(device: torch.device) -> None:
    """Return once all that the calling thread has queued on the device is done."""
    if (mark := marks_on(device)) is not None:
        mark().synchronize()


def mps_mark() -> Mark:
    """All threads queue on an Apple GPU's one stream."""
    event = torch.mps.event.Event(enable_timing=True)
    event.record()
    return event


def cuda_mark(device: torch.device) -> torch.cuda.Event:
    """An event behind all that this thread has queued on its current stream of the device. Who waits for it sleeps:
    spinning would take the core from the threads that load and communicate."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
