"""Passes of a rank: their seconds, and those of an emulated device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Slowdown
from hetsync.plan.assignment import Assignment
from hetsync.replica.memory import Memory
from hetsync.replica.passes import EmulatedPasses, Passes, QueueingPasses
from hetsync.train.planned_ranks import _passes
from hetsync.train.workplace import Workplace


class Clock:
    """Goes on when told, and in sleeps, which end `late`."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 0.0, late
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


def run(passes: Passes, clock: Clock, samples: int, backward: bool, real: float) -> None:
    with passes.timed([samples], backward):
        clock.now += real


def test_real_passes_are_timed() -> None:
    clock = Clock()
    passes = Passes(clock)
    passes.begin_slice(8)
    run(passes, clock, 4, False, 0.5)
    clock.now += 3.0
    run(passes, clock, 4, True, 0.25)
    assert (passes.seconds, passes.real_seconds, passes.slices, passes.overruns) == (0.75, 0.75, 1, 0)


def test_emulated_passes_take_their_part_of_the_devices_step() -> None:
    clock = Clock()
    events = [Slowdown(0, factor=2.0, after_samples=8)]
    draw = iter([1.0, 3.0]).__next__
    passes = EmulatedPasses(StepTime(1.0, 0.5), (0.2, 0.4), 0.0, draw, events, clock, clock.sleep)
    passes.begin_slice(8)
    run(passes, clock, 4, False, 0.1)  # 0.2 of 3 s
    assert clock.now == pytest.approx(0.6)
    run(passes, clock, 8, True, 0.1)  # 0.4 of 5 s
    assert clock.now == pytest.approx(2.6)
    passes.begin_slice(8)
    run(passes, clock, 4, False, 0.1)  # three times as long by jitter, twice by an event
    assert clock.now == pytest.approx(2.6 + 3.6)
    assert passes.seconds == pytest.approx(clock.now)
    assert passes.real_seconds == pytest.approx(0.3)
    assert passes.overruns == 0


def test_an_update_is_timed_and_takes_what_the_device_needs() -> None:
    clock = Clock()
    real = Passes(clock)
    with real.updating():
        clock.now += 0.5
    assert (real.seconds, real.real_seconds, real.samples) == (0.5, 0.5, 0)
    emulated = EmulatedPasses(StepTime(1.0, 0.5), (0.5, 0.5), 2.0, lambda: 3.0, [], clock, clock.sleep)
    emulated.begin_slice(4)
    with emulated.updating():
        clock.now += 0.25
    assert clock.now == pytest.approx(0.5 + 2.0 * 3.0)
    assert (emulated.seconds, emulated.real_seconds, emulated.overruns) == (6.0, 0.25, 0)


def test_every_piece_of_a_micro_batch_costs_an_emulated_device_what_is_fixed() -> None:
    clock = Clock()
    passes = EmulatedPasses(StepTime(1.0, 0.5), (0.5, 0.5), clock=clock, sleep=clock.sleep)
    passes.begin_slice(4)
    with passes.timed([1, 3], backward=False):
        clock.now += 0.1
    with passes.timed([], backward=True):
        pass
    assert clock.now == passes.seconds == pytest.approx(0.5 * (2 * 1.0 + 4 * 0.5))
    assert passes.samples == 4


def test_what_sleep_is_late_is_taken_off_the_next_pass() -> None:
    clock = Clock(late=0.01)
    passes = EmulatedPasses(StepTime(0.0, 1.0), (0.5, 0.5), clock=clock, sleep=clock.sleep)
    passes.begin_slice(2)
    for _ in range(10):
        run(passes, clock, 1, False, 0.1)
    assert clock.slept == pytest.approx([0.4, *[0.39] * 9])
    assert clock.now == pytest.approx(5.01)


def test_a_slice_whose_passes_take_too_long_is_counted_once() -> None:
    clock = Clock()
    passes = EmulatedPasses(StepTime(0.0, 1.0), (0.5, 0.5), clock=clock, sleep=clock.sleep)
    for real in (0.6, 0.1, 0.9):
        passes.begin_slice(2)
        run(passes, clock, 1, False, real)
        run(passes, clock, 1, True, real)
    assert (passes.slices, passes.overruns) == (3, 2)
    assert passes.seconds == pytest.approx(3.0)  # the emulated ones


class Gpu:
    """Works off a queue, far behind the host: its marks are passed when they are waited for."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.reached = -1.0

    def mark(self) -> GpuMark:
        return GpuMark(self)


class GpuMark:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, gpu.queued

    def synchronize(self) -> None:
        self.gpu.reached = max(self.gpu.reached, self.at)

    def elapsed_time(self, end_event: GpuMark) -> float:
        assert self.gpu.reached >= end_event.at, "not done yet"
        return 1000 * (end_event.at - self.at)


def test_passes_of_a_device_that_queues_take_what_the_device_does() -> None:
    gpu = Gpu()
    passes = QueueingPasses(gpu.mark)
    passes.begin_slice(8)
    with passes.timed([3, 5], backward=False):
        gpu.queued += 0.5
    with passes.timed([], backward=False):
        gpu.queued += 7.0
    gpu.queued += 3.0  # copies from another rank
    with passes.timed([3, 5], backward=True):
        gpu.queued += 1.0
    with passes.updating():
        gpu.queued += 0.25
    assert gpu.reached < 0, "nothing has been waited for"
    assert passes.seconds == pytest.approx(1.75)
    assert passes.seconds == passes.real_seconds == pytest.approx(1.75)
    assert (passes.samples, passes.slices, passes.overruns) == (8, 1, 0)


def test_a_gpus_memory_counts_from_when_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiling has tried other batches; and its passes are timed by marks in its queue."""
    began: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", began.append)
    gpu = torch.device("cuda", 0)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=gpu)]))
    Memory(cast(torch.nn.Module, model)).begin()
    assert began == [gpu]
    at = SimpleNamespace(cluster=None, device=gpu)
    assert isinstance(_passes(cast(Workplace, at), cast(Assignment, None)), QueueingPasses)
    at.device = torch.device("cpu")
    assert type(_passes(cast(Workplace, at), cast(Assignment, None))) is Passes
