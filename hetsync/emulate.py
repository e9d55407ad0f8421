"""Devices, real and emulated: how long a slice takes.

Emulation computes real gradients and pads each slice with sleep to the time that the profiled device would
take, so that eight unequal devices can be had on a laptop. Callers treat both kinds alike:

    device.begin(samples);  ... forward, backward with pace(0.5) on the way ...;  seconds = device.end()
"""

from __future__ import annotations

import csv
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from statistics import NormalDist

from hetsync.errors import UserError
from hetsync.profiling.cluster import Cluster, Jitter, LognormalJitter, QuantileJitter, Slowdown, TraceJitter

# How much of the machine's cores all ranks' real compute may take. Above a fifth, ranks that compute at once
# wait for a core, and that would be measured instead of the emulated devices.
COMPUTE_FRACTION = 0.15

# The shortest slice that is worth emulating: below, a host's own costs (threads, sleeps, messages), which real
# devices of that speed hide, are what one measures.
SHORTEST_SLICE_SECONDS = 0.1

# A slice that ends this fraction late counts as overrun. What runs between the last `pace` and `end` always
# makes it a little late.
OVERRUN_TOLERANCE = 0.01

JitterSampler = Callable[[], float]


def jitter_sampler(jitter: Jitter | None, seed: int, rank: int) -> JitterSampler:
    """A function that returns the next slice's factor on its mean time: mean 1, equal for equal (seed, rank).

    Without jitter every factor is 1. UserError where a trace cannot be read.
    """
    # Seeding by text goes through a hash, so that neighbouring ranks are not correlated.
    source = random.Random(f"{seed}/{rank}")
    if jitter is None:
        return lambda: 1.0
    if isinstance(jitter, LognormalJitter):
        return _lognormal(jitter, source).__next__
    if isinstance(jitter, TraceJitter):
        draws = _replayed(_read_trace(jitter), source, rank)
    else:
        draws = _fitted(jitter, source, rank)
    return (factor for factor in draws for _ in range(jitter.hold)).__next__


def _lognormal(jitter: LognormalJitter, source: random.Random) -> Iterator[float]:
    sigma = jitter.sigma
    while True:
        yield math.exp(sigma * source.gauss(0, 1) - sigma * sigma / 2)


def _fitted(jitter: QuantileJitter, source: random.Random, rank: int) -> Iterator[float]:
    """An AR(1) process of normals, mapped through the normal's distribution and the fitted quantiles."""
    model = jitter.models[rank % len(jitter.models)]
    points = list(zip(model.probabilities, model.factors, strict=True))
    mean = sum((q - p) * (f + g) / 2 for (p, f), (q, g) in pairwise(points))
    keep = model.autocorrelation
    z = source.gauss(0, 1)
    while True:
        u = NormalDist().cdf(z)
        (p, f), (q, g) = next(pair for pair in pairwise(points) if u <= pair[1][0])
        yield (f + (g - f) * (u - p) / (q - p)) / mean
        z = keep * z + math.sqrt(1 - keep * keep) * source.gauss(0, 1)


def _replayed(workers: list[list[float]], source: random.Random, rank: int) -> Iterator[float]:
    """One worker's records over and over, from a start that the seed chooses."""
    factors = workers[rank % len(workers)]
    start = source.randrange(len(factors))
    for i in count(start):
        yield factors[i % len(factors)]


def _read_trace(jitter: TraceJitter) -> list[list[float]]:
    """Every worker's step times in order of time, divided by their mean."""
    records: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        with open(jitter.path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                moment, seconds = float(row[jitter.time_column]), float(row[jitter.batch_time_column])
                records[row[jitter.worker_column]].append((moment, seconds))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the trace that jitter.path names: {error}") from error
    except KeyError as error:
        raise UserError(f"trace {jitter.path} has no column {error}: set jitter's *_column keys") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"trace {jitter.path} holds something that is no number: {error}") from error
    times = [[seconds for _, seconds in sorted(worker)] for worker in records.values()]
    if not times or min(map(min, times)) < 0 or min(map(sum, times)) <= 0:
        raise UserError(f"trace {jitter.path} needs records with positive step times of every worker")
    return [[t * len(worker) / sum(worker) for t in worker] for worker in times]


class Device(ABC):
    """What a rank's slices are timed by, with totals over all slices so far.

    `emulated_seconds` is what the device took (`end`'s results), `real_seconds` what the host computed,
    `overruns` the slices whose real compute ended late, and `overrun_seconds` by how much in total.
    """

    def __init__(self) -> None:
        self.slices = 0
        self.emulated_seconds = 0.0
        self.real_seconds = 0.0
        self.overruns = 0
        self.overrun_seconds = 0.0

    @abstractmethod
    def begin(self, samples: int) -> None:
        """Start a slice of this many samples."""

    @abstractmethod
    def pace(self, fraction: float) -> None:
        """Return once this fraction of the slice's time has passed: called while backward runs, so that
        gradients become ready when the device would have them."""

    @abstractmethod
    def end(self) -> float:
        """Return once the slice is done, with the device's seconds for it."""


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

    def begin(self, samples: int) -> None:
        self._started = self._clock()

    def pace(self, fraction: float) -> None:
        pass

    def end(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        seconds = self._clock() - self._started
        self.slices += 1
        self.emulated_seconds += seconds
        self.real_seconds += seconds
        return seconds


class EmulatedDevice(Device):
    """A slower device: n samples take n · seconds_per_sample · jitter, most of it slept.

    A sleep ends a little late (a tenth of a millisecond, more on a busy machine), and hundreds of slices
    would add that up to a slower device than the profile's. So the next slice counts as begun earlier by as
    much as sleep made the last one late. Nothing else is given back: what the host does between `end` and the
    next `begin` is the trainer's real cost and belongs into every figure, and so does real compute that took
    longer than the emulated time. The latter is counted as an overrun, because the machine was then measured,
    not the program.

    `slowdowns` are the profile's events for this rank. Not safe for use by several threads.
    """

    def __init__(
        self,
        seconds_per_sample: float,
        jitter_sampler: JitterSampler = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        slowdowns: Sequence[Slowdown] = (),
    ) -> None:
        super().__init__()
        self.seconds_per_sample = seconds_per_sample
        self._jitter, self._clock, self._sleep = jitter_sampler, clock, sleep
        self._slowdowns = tuple(slowdowns)
        self._samples_before = 0
        self._begun = self._counted_from = self._duration = 0.0
        self._slept = self._overslept = 0.0  # of this slice: in all, and how late its last sleep ended

    def begin(self, samples: int) -> None:
        self._begun = self._clock()
        self._counted_from = self._begun - self._overslept
        self._slept = self._overslept = 0.0
        self._duration = samples * self.seconds_per_sample * self._jitter() * self._slowdown()
        self._samples_before += samples

    def pace(self, fraction: float) -> None:
        self._sleep_until(self._counted_from + fraction * self._duration)

    def end(self) -> float:
        self.real_seconds += self._clock() - self._begun - self._slept
        due = self._counted_from + self._duration
        self._sleep_until(due)
        late = max(0.0, self._clock() - due)
        # A sleep in `pace` that ended late has moved everything after it: so much of it is sleep's doing.
        self._overslept = min(late, self._overslept)
        self._count_overrun(late - self._overslept)
        self.slices += 1
        self.emulated_seconds += self._duration
        return self._duration

    def _sleep_until(self, due: float) -> None:
        now = self._clock()
        if now >= due:
            return
        self._sleep(due - now)
        woken = self._clock()
        self._slept += woken - now
        self._overslept = max(0.0, woken - due)

    def _count_overrun(self, late: float) -> None:
        if late > OVERRUN_TOLERANCE * self._duration:
            self.overruns += 1
            self.overrun_seconds += late

    def _slowdown(self) -> float:
        done = self._samples_before
        active = (s for s in self._slowdowns if s.after_samples <= done < (s.until_samples or math.inf))
        return math.prod(s.factor for s in active)


def emulated_device(cluster: Cluster, rank: int, rate: float, seed: int = 0) -> EmulatedDevice:
    """The device that a profile gives a rank, at this rate (samples/s), with its jitter and its events."""
    events = [event for event in cluster.events if event.rank == rank]
    return EmulatedDevice(1 / rate, jitter_sampler(cluster.jitter, seed, rank), slowdowns=events)


def affordable_rate(real_seconds_per_sample: float, batch_size: int, cores: int | None = None) -> float:
    """Samples/s of a whole emulated cluster that this machine can imitate honestly.

    All ranks' real compute together (`real_seconds_per_sample`, on one core) takes at most 15 % of the cores, and
    a slice of `batch_size` samples over all ranks at least 0.1 s.
    """
    by_compute = COMPUTE_FRACTION * (cores or _usable_cores()) / real_seconds_per_sample
    return min(by_compute, batch_size / SHORTEST_SLICE_SECONDS)


def emulated_rates(
    cluster: Cluster, ranks: int, model_name: str, samples_per_second: float | None, affordable: float
) -> list[float]:
    """Samples/s of each rank's emulated device.

    Where the profile has the model's rate on every rank's device, those rates; else its relative speeds, scaled
    to add up to the `affordable` rate. `samples_per_second`, where given, is what either adds up to instead.
    UserError for more ranks than devices.
    """
    devices = [cluster.device_of(rank) for rank in range(ranks)]
    measured = [device.samples_per_second.get(model_name) for device in devices]
    rates = [rate for rate in measured if rate is not None]
    if len(rates) == ranks and samples_per_second is None:
        return rates
    weights = rates if len(rates) == ranks else [device.speed for device in devices]
    total = samples_per_second or affordable
    return [weight * total / sum(weights) for weight in weights]


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
