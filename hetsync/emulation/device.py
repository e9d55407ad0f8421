"""Emulated devices: how long a slice takes on a device that is not there.

Emulation computes real gradients and pads each slice with sleep to the time that the profiled device would
take, so that eight unequal devices can be had on a laptop. Callers treat both kinds alike:

    device.begin_slice(samples);  ... forward, backward with pace(0.5) on the way ...;  device.end_slice()
    seconds = device.take_seconds()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, sleep

import torch

from hetsync.balance.device import Device, QueueingDevice, RealDevice, marks_on, settle
from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, Slowdown, slowdown_factor
from hetsync.emulation.jitter import JitterSampler, jitter_sampler

# How much of the machine's cores all ranks' real compute may take. Above a fifth, ranks that compute at once
# wait for a core, and that would be measured instead of the emulated devices.
COMPUTE_FRACTION = 0.15

# The shortest slice that is worth emulating: below, a host's own costs (threads, sleeps, messages), which real
# devices of that speed hide, are what one measures.
SHORTEST_SLICE_SECONDS = 0.1

# A slice that ends this fraction late counts as overrun. What runs between the last `pace` and `end_slice` always
# makes it a little late.
OVERRUN_TOLERANCE = 0.01


class EmulatedDevice(Device):
    """A slower device: n samples take `time.seconds(n)` · jitter, most of it slept, and the optimizer's step on them
    `update_seconds` · jitter, where it is not in the former.

    A sleep ends a little late (a tenth of a millisecond, more on a busy machine), and hundreds of slices
    would add that up to a slower device than the profile's. So the next slice counts as begun earlier by as
    much as sleep made the last one late. Nothing else is given back: what the host does between `end_slice` and the
    next `begin_slice` is the trainer's real cost and belongs into every figure, and so does real compute that took
    longer than the emulated time. The latter is counted as an overrun, because the machine was then measured,
    not the program.

    `slowdowns` are the profile's events for this rank. `settle` returns once the real device has done what this
    thread has queued on it. Not safe for use by several threads.
    """

    def __init__(
        self,
        time: StepTime,
        jitter_sampler: JitterSampler = lambda: 1.0,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
        slowdowns: Sequence[Slowdown] = (),
        settle: Callable[[], None] = lambda: None,
        update_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self._time, self._update_seconds = time, update_seconds
        self._settle = settle
        self._jitter, self._clock, self._sleep = jitter_sampler, clock, sleep
        self._slowdowns = tuple(slowdowns)
        self._samples_before = 0
        self._begun = self._counted_from = self._duration = 0.0
        self._factor = 1.0  # of this slice
        self._slept = self._overslept = 0.0  # of this slice: in all, and how late its last sleep ended

    def begin_slice(self, samples: int) -> None:
        self._begin()
        self._factor = self._jitter() * slowdown_factor(self._slowdowns, self._samples_before)
        self._duration = self._time.seconds(samples) * self._factor
        self._samples_before += samples

    def _begin(self) -> None:
        self._begun = self._clock()
        self._counted_from = self._begun - self._overslept
        self._slept = self._overslept = 0.0

    def pace(self, fraction: float) -> None:
        self._sleep_until(self._counted_from + fraction * self._duration)

    def end_slice(self, stepped: bool = False) -> None:
        self._duration += self._update_seconds * self._factor if stepped else 0.0
        self._end()
        self.slices += 1

    def _end(self) -> None:
        self._settle()
        self._count(self._duration, self._clock() - self._begun - self._slept)
        due = self._counted_from + self._duration
        self._sleep_until(due)
        late = max(0.0, self._clock() - due)
        # A sleep in `pace` that ended late has moved everything after it: so much of it is sleep's doing.
        self._overslept = min(late, self._overslept)
        self._count_overrun(late - self._overslept)

    def begin_step(self) -> None:
        if self._update_seconds:
            self._begin()
            self._duration = self._update_seconds * self._factor

    def end_step(self) -> None:
        if self._update_seconds:
            self._end()

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


def emulated_device(
    cluster: Cluster,
    rank: int,
    time: StepTime,
    seed: int = 0,
    settle: Callable[[], None] = lambda: None,
    update_seconds: float = 0.0,
) -> EmulatedDevice:
    """The device that a profile gives a rank, whose slices and updates take this time, with its jitter and its
    events."""
    events = [event for event in cluster.events if event.rank == rank]
    jitter = jitter_sampler(cluster.jitter, seed, rank)
    return EmulatedDevice(time, jitter, slowdowns=events, settle=settle, update_seconds=update_seconds)


def make_device(
    cluster: Cluster | None, rank: int, time: StepTime, seed: int, device: torch.device, update_seconds: float = 0.0
) -> Device:
    """What times a rank's slices: a cluster's emulated device, whose slices take `time`, and each step
    `update_seconds` besides, or the rank's own."""
    if cluster is not None:
        return emulated_device(cluster, rank, time, seed, partial(settle, device), update_seconds)
    mark = marks_on(device)
    return RealDevice() if mark is None else QueueingDevice(mark)


def affordable_rate(real_seconds_per_sample: float, batch_size: int, cores: int | None = None) -> float:
    """Samples/s of a whole emulated cluster that this machine can imitate honestly.

    All ranks' real compute together (`real_seconds_per_sample`, on one core) takes at most 15 % of the cores, and
    a slice of `batch_size` samples over all ranks at least 0.1 s.
    """
    by_compute = COMPUTE_FRACTION * (cores or _usable_cores()) / real_seconds_per_sample
    return min(by_compute, batch_size / SHORTEST_SLICE_SECONDS)


def tells_rates(cluster: Cluster, ranks: int, model_name: str) -> bool:
    """Does the profile have the model's rate on every rank's device?"""
    return all(model_name in cluster.device_of(rank).samples_per_second for rank in range(ranks))


def emulated_rates(
    cluster: Cluster, ranks: int, model_name: str, samples_per_second: float | None, affordable: float
) -> list[float]:
    """Samples/s of each rank's emulated device, within a slice.

    Where the profile has the model's rate on every rank's device, those rates; else its relative speeds, scaled
    to add up to the `affordable` rate. `samples_per_second`, where given, is what either adds up to instead.
    UserError for more ranks than devices.
    """
    devices = [cluster.device_of(rank) for rank in range(ranks)]
    told = tells_rates(cluster, ranks, model_name)
    weights = [device.samples_per_second[model_name] if told else device.speed for device in devices]
    if told and samples_per_second is None:
        return weights
    total = samples_per_second or affordable
    return [weight * total / sum(weights) for weight in weights]


def emulated_times(
    cluster: Cluster, ranks: int, model_name: str, samples_per_second: float | None, affordable: float
) -> list[StepTime]:
    """Of each rank's slices: samples at `emulated_rates`, after what the profile's devices take for any slice."""
    rates = emulated_rates(cluster, ranks, model_name, samples_per_second, affordable)
    return [StepTime(cluster.device_of(rank).fixed_seconds, 1 / rate) for rank, rate in enumerate(rates)]


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
