"""What a rank's slices are timed by. Callers treat real and emulated devices alike:

device.begin_slice(samples);  ... forward, backward with pace(0.5) on the way ...;  seconds = device.end_slice()
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable


class Device(ABC):
    """What a rank's slices are timed by, with totals over all slices so far.

    `emulated_seconds` is what the device took (`end_slice`'s results), `real_seconds` what the host computed,
    `overruns` the slices whose real compute ended late, and `overrun_seconds` by how much in total.
    """

    def __init__(self) -> None:
        self.slices = 0
        self.emulated_seconds = 0.0
        self.real_seconds = 0.0
        self.overruns = 0
        self.overrun_seconds = 0.0

    @abstractmethod
    def begin_slice(self, samples: int) -> None:
        """Start a slice of this many samples."""

    @abstractmethod
    def pace(self, fraction: float) -> None:
        """Return once this fraction of the slice's time has passed: called while backward runs, so that
        gradients become ready when the device would have them."""

    @abstractmethod
    def end_slice(self) -> float:
        """Return once the slice is done, with the device's seconds for it."""

    def end_step(self, seconds: float) -> float:
        """The optimizer's step took the host so long after the slices (synchronous mode): the device's seconds for it.

        An emulated slice's time is that of whole steps already.
        """
        return 0.0


class RealDevice(Device):
    """The machine's own device: time is measured, never added.

    `synchronize` (torch.cuda.synchronize on GPUs) is called at the end of a slice only: within it, waiting
    for the device would stop the host from queueing work ahead.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._synchronize, self._clock = synchronize, clock
        self._started = 0.0

    def begin_slice(self, samples: int) -> None:
        self._started = self._clock()

    def pace(self, fraction: float) -> None:
        pass

    def end_slice(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        seconds = self._clock() - self._started
        self.slices += 1
        self.emulated_seconds += seconds
        self.real_seconds += seconds
        return seconds

    def end_step(self, seconds: float) -> float:
        self.emulated_seconds += seconds
        self.real_seconds += seconds
        return seconds
