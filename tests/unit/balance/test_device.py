"""Slices are timed by what the device does, not by when the host queues it."""

from __future__ import annotations

import pytest
import torch

from hetsync.balance.device import MOST_SLICES_QUEUED, QueueingDevice, RealDevice, marks_on, settle
from hetsync.balance.profile import StepTime
from hetsync.emulation.cluster import Cluster, DeviceGroup
from hetsync.emulation.device import make_device


class Gpu:
    """A device that works off a queue: the host's clock moves on by launching and by waiting."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy_until = 0.0
        self.waits = 0

    def launch(self, seconds: float, on_host: float = 0.001) -> None:
        self.now += on_host
        self.busy_until = max(self.now, self.busy_until) + seconds

    def mark(self) -> FakeMark:
        return FakeMark(self, max(self.now, self.busy_until))


class FakeMark:
    def __init__(self, gpu: Gpu, at: float) -> None:
        self.gpu, self.at = gpu, at

    def synchronize(self) -> None:
        self.gpu.waits += self.at > self.gpu.now
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end_event: FakeMark) -> float:
        assert self.gpu.now >= end_event.at, "not done yet"
        return 1000 * (end_event.at - self.at)


def run_slice(gpu: Gpu, device: QueueingDevice, seconds: float) -> None:
    device.begin_slice(8)
    gpu.launch(seconds)
    device.end_slice()


def test_a_queueing_device_is_timed_by_its_work_not_by_its_launches() -> None:
    gpu = Gpu()
    device = QueueingDevice(gpu.mark)
    for _ in range(2):
        run_slice(gpu, device, 1.0)
    assert gpu.now == pytest.approx(100.002)  # the host has gone on
    assert device.take_seconds() == pytest.approx(2.001, abs=0.002)
    assert device.take_seconds() == 0.0
    assert (device.slices, device.overruns) == (2, 0)
    assert device.real_seconds == device.emulated_seconds == pytest.approx(2.001, abs=0.002)


def test_the_wait_is_for_the_slices_end_and_not_for_what_others_have_queued_since() -> None:
    gpu = Gpu()
    device = QueueingDevice(gpu.mark)
    run_slice(gpu, device, 1.0)
    gpu.launch(50.0)  # a sum that waits for other ranks
    assert device.take_seconds() == pytest.approx(1.0, abs=0.002)
    assert gpu.now < 102


def test_a_host_does_not_run_far_ahead() -> None:
    gpu = Gpu()
    device = QueueingDevice(gpu.mark)
    for done in range(10):
        run_slice(gpu, device, 1.0)
        assert gpu.busy_until - gpu.now <= MOST_SLICES_QUEUED + 1e-9, done
    assert gpu.waits == 10 - MOST_SLICES_QUEUED


def test_a_step_belongs_to_its_slice_and_the_wait_before_it_does_not() -> None:
    gpu = Gpu()
    device = QueueingDevice(gpu.mark)
    run_slice(gpu, device, 1.0)
    gpu.launch(0.0, on_host=30.0)  # the sums of other ranks
    device.begin_step()
    gpu.launch(0.25)
    device.end_step()
    assert device.take_seconds() == pytest.approx(1.25, abs=0.003)
    assert device.slices == 1


def test_a_processor_is_timed_by_the_clock() -> None:
    gpu = Gpu()
    device = RealDevice(lambda: gpu.now)
    for _ in range(2):
        device.begin_slice(7)
        gpu.now += 1.0
        device.end_slice()
        gpu.now += 10.0
        device.begin_step()
        gpu.now += 0.5
        device.end_step()
        assert device.take_seconds() == pytest.approx(1.5)
    assert device.real_seconds == device.emulated_seconds == pytest.approx(3.0)


APPLE = torch.device("mps", 0)


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Event(FakeMark):
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            super().__init__(gpu, max(gpu.now, gpu.busy_until))

    monkeypatch.setattr(torch.mps.event, "Event", Event)
    return gpu


def test_an_apple_gpu_is_timed_by_its_own_work(apple: Gpu) -> None:
    device = make_device(None, 0, StepTime(0.0, 1.0), 0, APPLE)
    assert isinstance(device, QueueingDevice)
    assert not device.on_host
    run_slice(apple, device, 1.0)
    assert apple.now == pytest.approx(100.001)
    assert device.take_seconds() == pytest.approx(1.001, abs=0.002)


def test_an_apple_gpu_is_waited_for_where_it_is_timed(apple: Gpu) -> None:
    apple.launch(1.0)
    settle(APPLE)
    assert apple.now == pytest.approx(101.001)


def test_an_emulated_apple_gpu_counts_what_it_has_really_computed(apple: Gpu) -> None:
    cluster = Cluster("c", "s", (DeviceGroup("d"),))
    device = make_device(cluster, 0, StepTime(0.0, 1e-4), 0, APPLE)
    device.begin_slice(1)
    apple.launch(1.0)
    device.end_slice()
    assert apple.waits == 1


def test_a_processor_has_no_marks() -> None:
    processor = torch.device("cpu")
    assert marks_on(processor) is None
    settle(processor)
    assert isinstance(make_device(None, 0, StepTime(0.0, 1.0), 0, processor), RealDevice)
