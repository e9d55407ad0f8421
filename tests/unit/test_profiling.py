"""Profiling on tiny models and fake planes: fits find what was put in, and nothing is left behind."""

from __future__ import annotations

from time import sleep

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hetsync.config import Config, DataConfig
from hetsync.data import Data
from hetsync.emulate import SHORTEST_SLICE_SECONDS
from hetsync.plane.base import Handle, Plane, PlaneError
from hetsync.plane.local import LocalPlane
from hetsync.profiling import device as profiling
from hetsync.profiling.cluster import Link, load_cluster
from hetsync.profiling.device import (
    activation_bytes,
    available_host_bytes,
    memory_cap,
    profile_step,
    untouched,
)
from hetsync.profiling.interconnect import SIZES_BYTES, measure_interconnect
from hetsync.profiling.measure import Place, Subject, measure_ranks
from hetsync.slicing import fit

CPU = torch.device("cpu")
GIB = 2**30


class Time:
    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Steps:
    """Steps of 0.1 s + 0.01 s a sample, every fifth of them ten times as long, the first three too."""

    def __init__(self, time, outliers=True):
        self.time, self.outliers, self.sizes = time, outliers, []

    def __call__(self, samples):
        self.sizes.append(samples)
        slow = self.outliers and (len(self.sizes) <= 3 or len(self.sizes) % 5 == 0)
        self.time.now += (0.1 + 0.01 * samples) * (10 if slow else 1)


def test_a_step_is_fitted_in_spite_of_warm_up_and_outliers():
    time = Time()
    found = profile_step(Steps(time), [4, 16, 64], budget_seconds=1e9, clock=time.clock)
    assert found.fixed_seconds == pytest.approx(0.1, rel=1e-6)
    assert found.seconds_per_sample == pytest.approx(0.01, rel=1e-6)


def test_a_budget_bounds_the_profile_to_one_round_of_two_sizes():
    time = Time()
    steps = Steps(time, outliers=False)
    found = profile_step(steps, [64, 4, 16], budget_seconds=0.2, clock=time.clock)
    assert steps.sizes == [4, 16, 4, 16]
    assert found.seconds(64) == pytest.approx(0.74)


def test_what_else_the_machine_does_slows_no_emulated_device():
    """Ranks that still start take turns with rank 0 while it finds what the machine can imitate."""

    def waits(model, batch):
        sleep(0.05)
        return model(batch[0]).sum()

    samples = TensorDataset(torch.ones(32, 2))
    config = Config(data=DataConfig(batch_size=8))
    subject = Subject(LocalPlane(), config, nn.Linear(2, 1), Data(samples, samples, waits), Place("here", 0, 1))
    (profile,) = measure_ranks(subject, load_cluster("homogeneous"))
    assert profile.time.seconds_per_sample == pytest.approx(SHORTEST_SLICE_SECONDS / 8)


class Host:
    """A subject whose steps take `factor` times 0.1 s and 10 ms a sample; it writes down the sizes that are timed."""

    plane, config, device = LocalPlane(), Config(data=DataConfig(batch_size=8)), CPU

    def __init__(self, name="here", factor=1.0):
        self.place, self.factor, self.timed = Place(name, 0, 1), factor, []

    def step_time(self, sizes):
        self.timed.append(sizes)
        return fit(sizes, [self.factor * (0.1 + 0.01 * size) for size in sizes])

    def cap(self):
        return None


def profiled(host):
    (profile,) = measure_ranks(host, None)
    return profile.time


def test_a_profile_is_kept_and_looked_at_once_more_before_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, same, slightly_slower = Host(), Host(), Host(factor=1.1)
    assert profiled(first) == profiled(same) == profiled(slightly_slower)
    assert first.timed == [[4, 8, 16]]
    assert same.timed == slightly_slower.timed == [[8]]


def test_a_profile_of_a_busy_host_is_not_believed_for_ever(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profiled(Host(factor=3))
    for _ in range(2):
        assert profiled(Host()).seconds(8) == pytest.approx(0.18)


def test_hosts_with_one_home_have_profiles_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profiled(Host("fast")).seconds(8) == pytest.approx(0.18)
    assert profiled(Host("slow", factor=1.1)).seconds(8) == pytest.approx(1.1 * 0.18)


@pytest.mark.parametrize("content", ["", "{}", '{"fixed_seconds": -1, "seconds_per_sample": 1}', "[1]"])
def test_a_home_that_holds_nonsense_or_cannot_be_written_stops_nobody(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profiled(Host())
    (kept,) = (tmp_path / "hetsync" / "profiles").iterdir()
    kept.write_text(content)
    assert profiled(Host()).seconds(8) == pytest.approx(0.18)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file where a folder should be
    assert profiled(Host()).seconds(8) == pytest.approx(0.18)


def test_a_step_without_sizes_is_refused():
    with pytest.raises(ValueError, match="cannot fit"):
        profile_step(lambda samples: None, [])


def test_activations_are_counted_once_and_parameters_not():
    inputs = torch.randn(10, 20)
    linear = nn.Linear(20, 30)
    # Saved: the input (linear's weight gradient) and the output of ReLU; the weight is no activation.
    assert activation_bytes(lambda: linear(inputs).relu().sum()) == 4 * (10 * 20 + 10 * 30)
    squared = torch.ones(50, requires_grad=True)
    assert activation_bytes(lambda: (squared * squared).sum()) == 0
    with torch.no_grad():
        assert activation_bytes(lambda: linear(inputs).sum()) == 0


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))


def test_profiling_leaves_no_trace():
    model = small_model()
    model(torch.randn(4, 8)).sum().backward()
    gradient = model[0].weight.grad
    gradients, before = gradient.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    with untouched(model):
        assert model[0].weight.grad is None
        model(torch.randn(4, 8)).sum().backward()
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, gradients)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def cap(model, **options):
    return memory_cap(model, lambda n: model(torch.randn(n, 8)).sum(), CPU, 1, **options)


def test_the_cap_follows_the_memory_that_is_left_for_activations():
    model = small_model()
    caps = [cap(model, limit_bytes=limit) for limit in (10**5, 2 * 10**5, 3 * 10**5)]
    assert 0 < caps[0] < caps[1] < caps[2]
    assert abs((caps[2] - caps[1]) - (caps[1] - caps[0])) <= 1
    assert cap(model, limit_bytes=10**5, optimizer_state_buffers=10) < caps[0]
    needed = profiling.BACKWARD_OVERHEAD * activation_bytes(lambda: model(torch.randn(caps[2], 8)).sum())
    assert 0.8 < needed / (0.9 * 3 * 10**5) <= 1.0
    assert cap(model, limit_bytes=1000) == 0


def test_the_cap_of_an_unlimited_host_is_none(monkeypatch):
    monkeypatch.setattr(profiling, "available_host_bytes", lambda: None)
    assert cap(small_model()) is None


def test_ranks_share_the_hosts_memory(monkeypatch):
    model = small_model()
    monkeypatch.setattr(profiling, "available_host_bytes", lambda: GIB)
    caps = [memory_cap(model, lambda n: model(torch.randn(n, 8)).sum(), CPU, ranks) for ranks in (1, 4)]
    assert caps[0] / caps[1] == pytest.approx(4, rel=0.01)


def test_a_batch_that_runs_out_of_memory_caps_at_the_one_that_ran():
    model = small_model()

    def loss(samples):
        if samples > 2:
            raise torch.cuda.OutOfMemoryError("injected")
        return model(torch.randn(samples, 8)).sum()

    assert memory_cap(model, loss, CPU, 1, limit_bytes=GIB) == 2


def host(tmp_path, cgroup_lines, files):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup_lines)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return available_host_bytes(proc, cgroups)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("", {}, 1_024_000),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5"}, 1_024_000),
        ("0::/a/b\n", {"a/memory.max": "9000", "a/memory.current": "5000",
                       "a/memory.stat": "anon 1\ninactive_file 700\n"}, 4700),
        ("3:cpu:/x\n9:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9000", "cpu/x/memory.max": "1",
                                       "memory/job/memory.usage_in_bytes": "9100",
                                       "memory/job/memory.stat": "total_inactive_file 50\n"}, 0),
    ],
)  # fmt: skip
def test_the_hosts_memory_ends_at_the_cgroups_limit(tmp_path, lines, files, expected):
    assert host(tmp_path, lines, files) == expected


def test_an_unknown_system_has_unknown_memory(tmp_path):
    assert available_host_bytes(tmp_path, tmp_path) is None


class SlowHandle(Handle):
    def __init__(self, time, seconds):
        self.time, self.due = time, time.now + seconds

    def done(self):
        return self.time.now >= self.due


class RingPlane(Plane):
    """One rank of four on a virtual clock, whose peers always do the same, a little slower."""

    rank, size = 0, 4

    def __init__(self, time, latency_seconds, bytes_per_second):
        self.time, self.link, self.sizes = time, Link(latency_seconds, bytes_per_second), []

    def allreduce(self, tensor, wire="float32"):
        self.sizes.append(4 * tensor.numel())
        return SlowHandle(self.time, self.link.seconds(self.sizes[-1], self.size, 0.0))

    def gather_objects(self, value):
        return [value, value * 0.9]

    def broadcast_object(self, value):
        return value

    def barrier(self):
        self.time.now += 1e-4

    def send(self, message, to): ...
    def unread(self, to): ...
    def receive(self): ...
    def abort(self, code): ...
    def close(self): ...


def test_the_interconnect_is_found():
    time = Time()
    link = measure_interconnect(RingPlane(time, 0.01, 1e9), 10.0, clock=time.clock, sleep=time.sleep)
    assert link.latency_seconds == pytest.approx(0.01, rel=0.02)
    assert link.bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_a_slow_interconnect_does_not_take_all_day():
    time = Time()
    plane = RingPlane(time, 1.0, 1e6)
    link = measure_interconnect(plane, 2.0, clock=time.clock, sleep=time.sleep)
    assert plane.sizes == [size for size in SIZES_BYTES[:2] for _ in range(2)]
    assert link.bytes_per_second == pytest.approx(1e6, rel=0.05)
    assert time.now < 5


def test_a_dead_interconnect_is_an_error_in_bounded_time():
    time = Time()
    plane = RingPlane(time, 1000.0, 1e6)
    with pytest.raises(PlaneError, match="an allreduce of 16 bytes took more than 60"):
        measure_interconnect(plane, clock=time.clock, sleep=lambda s: time.sleep(1.0))


def test_one_rank_has_a_free_link():
    assert measure_interconnect(LocalPlane()) == Link()
