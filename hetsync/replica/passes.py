"""How long a rank's passes and its optimizer's updates take: timed, or padded to those of an emulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep

from hetsync.balance.device import Mark, MarkedSpans
from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Slowdown, slowdown_factor
from hetsync.emulation.device import OVERRUN_TOLERANCE
from hetsync.emulation.jitter import JitterSampler


class Passes:
    """Attributes:
    samples: That have gone forward.
    slices: That have begun.
    overruns: Slices in which a pass or the update took longer than its emulated device would.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.samples = self.slices = self.overruns = 0
        self._seconds = self._real_seconds = 0.0
        self._clock = clock

    @property
    def seconds(self) -> float:
        """Of all passes and updates so far."""
        return self._seconds

    @property
    def real_seconds(self) -> float:
        """Of these, computed by the real device."""
        return self._real_seconds

    def begin_slice(self, samples: int) -> None:
        self.slices += 1

    @contextmanager
    def timed(self, pieces: Sequence[int], backward: bool) -> Iterator[None]:
        """Around the passes of a micro-batch's pieces, of so many samples each; where there are none, nothing
        passes."""
        if not pieces:
            yield
            return
        began = self._clock()
        yield
        spent = self._clock() - began
        self.samples += 0 if backward else sum(pieces)
        self._end(spent, self._pass_seconds(spent, pieces, backward))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the optimizer's update."""
        began = self._clock()
        yield
        spent = self._clock() - began
        self._end(spent, self._updates_seconds(spent))

    def _pass_seconds(self, spent: float, pieces: Sequence[int], backward: bool) -> float:
        return spent

    def _updates_seconds(self, spent: float) -> float:
        return spent

    def _end(self, spent: float, duration: float) -> None:
        """The device has needed its `duration`; an emulated one is waited for."""
        self._real_seconds += spent
        self._seconds += duration


class QueueingPasses(Passes):
    """Of a device that works off what the host queues, as `QueueingDevice` has it. Who asks for seconds waits until the
    device is through with all passes so far; they are not waited for before."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        """`mark` as for `MarkedSpans`."""
        super().__init__()
        self._spans = MarkedSpans(mark)

    @property
    def seconds(self) -> float:
        for seconds in self._spans.take_seconds():
            self._end(seconds, seconds)
        return self._seconds

    @property
    def real_seconds(self) -> float:
        return self.seconds

    @contextmanager
    def timed(self, pieces: Sequence[int], backward: bool) -> Iterator[None]:
        if not pieces:
            yield
            return
        with self._marked():
            yield
        self.samples += 0 if backward else sum(pieces)

    @contextmanager
    def updating(self) -> Iterator[None]:
        with self._marked():
            yield

    @contextmanager
    def _marked(self) -> Iterator[None]:
        self._spans.begin()
        yield
        self._spans.end()


class EmulatedPasses(Passes):
    """The pass of a piece of n samples takes its part of the seconds of all of the device's passes, times the slice's
    jitter; so does the update.

    A pass counts as begun earlier by as much as sleep ended late in the one before, as `EmulatedDevice` has it.
    """

    def __init__(
        self,
        time: StepTime,
        parts: tuple[float, float],
        update_seconds: float = 0.0,
        jitter: JitterSampler = lambda: 1.0,
        slowdowns: Sequence[Slowdown] = (),
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        """`time` of the whole model's passes; `parts` of it: those of the forward and of the backward pass."""
        super().__init__(clock)
        self._time, self._parts, self._update_seconds = time, parts, update_seconds
        self._jitter, self._slowdowns, self._sleep = jitter, tuple(slowdowns), sleep
        self._samples_before = 0
        self._factor = 1.0  # of this slice
        self._overslept = 0.0
        self._overrun = False  # in this slice

    def begin_slice(self, samples: int) -> None:
        super().begin_slice(samples)
        self._factor = self._jitter() * slowdown_factor(self._slowdowns, self._samples_before)
        self._samples_before += samples
        self._overslept, self._overrun = 0.0, False

    def _pass_seconds(self, spent: float, pieces: Sequence[int], backward: bool) -> float:
        return self._parts[backward] * sum(self._time.seconds(samples) for samples in pieces) * self._factor

    def _updates_seconds(self, spent: float) -> float:
        return self._update_seconds * self._factor

    def _end(self, spent: float, duration: float) -> None:
        super()._end(spent, duration)
        left = duration - spent - self._overslept
        self._overslept = 0.0
        if left > 0:
            due = self._clock() + left
            self._sleep(left)
            self._overslept = max(0.0, self._clock() - due)
        elif spent > duration * (1 + OVERRUN_TOLERANCE) > 0 and not self._overrun:
            self._overrun = True
            self.overruns += 1
