"""Profiling on tiny models and fake planes: fits find what was put in, and nothing is left behind."""

from __future__ import annotations

import random
import types
from dataclasses import replace
from functools import partial
from time import sleep

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from hetsync.balance.profile import fit
from hetsync.config.schema import Config, ControlConfig, DataConfig, EmulationConfig, OuterConfig, RunConfig, SyncConfig
from hetsync.data import Data
from hetsync.data.random_state import untouched
from hetsync.data.stream import Stream
from hetsync.emulation.cluster import Link, load_cluster
from hetsync.emulation.device import SHORTEST_SLICE_SECONDS
from hetsync.errors import UserError
from hetsync.plane.base import Handle, Plane, PlaneError
from hetsync.plane.local import LocalPlane
from hetsync.profiling import device as profiling
from hetsync.profiling import measure, report
from hetsync.profiling.device import (
    INTERVAL,
    LEAST_SECONDS,
    Profiled,
    activation_bytes,
    available_host_bytes,
    median_interval,
    memory_cap,
    profile_step,
)
from hetsync.profiling.interconnect import (
    ENOUGH_SECONDS,
    SIZES_BYTES,
    WAIT_SECONDS,
    measure_interconnect,
    measure_sum,
)
from hetsync.profiling.measure import (
    Place,
    Subject,
    batch_of,
    choose_device,
    device_name,
    find_place,
    limit_threads,
    measure_ranks,
    ranks_sharing,
    take_device,
)
from hetsync.profiling.report import profile_cluster
from hetsync.sync.agreement import processor

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


@pytest.mark.parametrize(
    ("affinities", "threads"),
    [
        ([{0, 1, 2, 3}] * 4, 1),  # not bound
        ([{0, 1, 2, 3}] * 2, 2),
        ([{0}, {1}, {2}, {3}], 1),  # mpirun --bind-to core
        ([{0, 1}, {2, 3}], 2),  # SLURM's cpus-per-task
        ([{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}, {6}], 2),  # a socket for two
    ],
)
def test_cores_are_divided_among_those_who_share_them(affinities, threads, monkeypatch):
    class Gathering(LocalPlane):
        def __init__(self):
            super().__init__()
            self.members = tuple(range(len(affinities)))

        def gather_objects(self, value):
            return [replace(value, cpus=frozenset(cores), quotas=()) for cores in affinities]

    monkeypatch.setattr("os.sched_getaffinity", lambda process: affinities[0])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = []
    monkeypatch.setattr("torch.set_num_threads", told.append)
    place = find_place(Gathering())
    limit_threads(place, emulated=False)
    assert (told, place.ranks_on_host) == ([threads], len(affinities))


def test_a_step_is_fitted_in_spite_of_warm_up_and_outliers():
    time = Time()
    found = profile_step(Steps(time), [4, 16, 64], budget_seconds=1e9, clock=time.clock)
    assert found.time.fixed_seconds == pytest.approx(0.1, rel=1e-6)
    assert found.time.seconds_per_sample == pytest.approx(0.01, rel=1e-6)
    assert found.uncertainty == pytest.approx(0, abs=1e-9)


def test_a_budget_bounds_the_profile_to_one_round_of_two_sizes():
    time = Time()
    steps = Steps(time, outliers=False)
    found = profile_step(steps, [64, 4, 16], budget_seconds=0.2, clock=time.clock)
    assert steps.sizes == [4, 16, 4, 16]
    assert found.time.seconds(64) == pytest.approx(0.74)
    assert found.uncertainty is None, "one look at each size says nothing of how they scatter"


class Scattered(Steps):
    """Steps of 10 ms on average, uniformly up to `spread` of it longer or shorter."""

    def __init__(self, time, spread):
        super().__init__(time)
        self.spread, self.chance = spread, random.Random(0)

    def __call__(self, samples):
        self.sizes.append(samples)
        self.time.now += 0.01 * (1 + self.chance.uniform(-self.spread, self.spread))


def test_steps_are_timed_for_longer_where_they_scatter():
    looks = {}
    for spread in (0.0, 0.05, 0.1, 0.9):
        time = Time()
        steps = Scattered(time, spread)
        found = profile_step(steps, [8], clock=time.clock)
        looks[spread] = len(steps.sizes)
        assert 2 * found.uncertainty <= INTERVAL or spread == 0.9
        assert found.time.seconds(8) == pytest.approx(0.01, rel=0.01 + found.uncertainty)
    assert LEAST_SECONDS <= 0.01 * looks[0.0] < 2 * LEAST_SECONDS
    assert looks[0.0] <= looks[0.05] < looks[0.1] < looks[0.9]
    assert time.now == pytest.approx(10, abs=0.1), "ten seconds are enough, however they scatter"
    assert 2 * found.uncertainty > INTERVAL, "and then it says so"


@settings(max_examples=20)
@given(st.integers(6, 200))
def test_the_interval_of_a_median_holds_the_true_one_nineteen_times_of_twenty(count):
    chance, trials = random.Random(count), 2000
    found = [median_interval(sorted(chance.random() for _ in range(count))) for _ in range(trials)]
    assert sum(low <= 0.5 <= high for low, high in found) / trials > 0.93


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


class Slow(TensorDataset):
    """A data set whose every sample takes 10 ms to load."""

    def __getitems__(self, indices):
        sleep(0.01 * len(indices))
        return [self[index] for index in indices]


def test_loading_is_no_part_of_a_step_and_timed_apart():
    samples = Slow(torch.ones(32, 2))
    material = Data(samples, samples, lambda model, batch: model(batch[0]).sum(), collate=default_collate)
    config = Config(data=DataConfig(batch_size=8), run=RunConfig(profile_seconds=0.2))
    (profile,) = measure_ranks(Subject(LocalPlane(), config, nn.Linear(2, 1), material, Place("here", 0, 1)), None)
    assert profile.time.seconds(8) < 0.08, "training loads ahead, so loading has no part in the denominator"
    assert profile.load_seconds_per_sample >= 0.01


def test_profiled_batches_hold_samples_from_all_over_the_data_set():
    samples = TensorDataset(torch.arange(40.0))
    material = Data(samples, samples, lambda model, batch: batch[0].sum())
    (batch,) = batch_of(material, 4, CPU)
    assert batch.tolist() == [0, 10, 20, 30]
    (batch,) = batch_of(material, 80, CPU)
    assert len(batch) == 80


def test_to_choose_samples_is_no_part_of_loading(monkeypatch):
    """Those of large data sets are sorted by their costs for it."""
    chosen = measure.typical_indices

    def slowly(*what):
        sleep(0.2)
        return chosen(*what)

    monkeypatch.setattr(measure, "typical_indices", slowly)
    samples = TensorDataset(torch.ones(32, 2))
    material = Data(samples, samples, costs=[1.0, 9.0] * 16)
    subject = Subject(LocalPlane(), Config(), nn.Linear(2, 1), material, Place("here", 0, 1))
    assert subject.load_seconds(8) < 0.2


class Counted:
    """0, 1, 2, ...; counts what it gives, and how often it was opened."""

    def __init__(self):
        self.given, self.opened = 0, 0

    def __iter__(self):
        self.opened += 1
        for number in range(10**5):
            self.given += 1
            yield float(number)


def test_profiled_batches_of_a_stream_are_its_next_samples():
    """All over it they could only be walked to, once for each batch."""
    data = Counted()
    stream = Stream(data, 10**5)
    material = Data(stream, stream, lambda model, batch: batch.sum())
    assert batch_of(material, 8, CPU).tolist() == list(range(8))
    assert batch_of(material, 2, CPU).tolist() == [8, 9]
    assert (data.given, data.opened) == (10, 1)
    assert stream.__getitems__([0, 1]) == [0, 1], "training begins with the first"
    short = Stream(Counted(), 3)
    assert batch_of(Data(short, short), 7, CPU).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_profiled_batches_of_what_can_be_addressed_are_from_all_over_it():
    data = types.SimpleNamespace(read=lambda start, stop: list(range(start, stop)))
    stream = Stream(data, 40)
    assert batch_of(Data(stream, stream), 4, CPU).tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize("samples", [4, 8, 16])
def test_profiled_batches_cost_about_as_much_as_those_of_training(samples):
    """Every other sample is short; evenly spaced ones all are."""
    lengths = [1.0 if index % 2 == 0 else 9.0 for index in range(64)]
    data_set = TensorDataset(torch.tensor(lengths))
    material = Data(data_set, data_set, lambda model, batch: batch[0].sum(), costs=lengths)
    (batch,) = batch_of(material, samples, CPU)
    assert batch.mean() == pytest.approx(5.0)


class Host:
    """A subject whose steps take `factor` times 0.1 s and 10 ms a sample; it writes down the sizes that are timed."""

    plane, config, device = LocalPlane(), Config(data=DataConfig(batch_size=8)), CPU

    def __init__(self, factor=1.0, largest=None):
        self.place, self.factor, self.timed, self.largest = Place("here", 0, 1), factor, [], largest

    def step_time(self, sizes, sharing):
        self.timed.append(sizes)
        return Profiled(fit(sizes, [self.factor * (0.1 + 0.01 * size) for size in sizes]), 0.01)

    def load_seconds(self, samples):
        return 0.0

    def cap(self, sharing):
        return self.largest


def test_every_start_measures_afresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for factor in (1.0, 1.0, 1.1, 3.0):
        host = Host(factor)
        (profile,) = measure_ranks(host, None)
        assert host.timed == [[4, 8, 16]]
        assert profile.time.seconds(8) == pytest.approx(factor * 0.18)
        assert profile.uncertainty == 0.01


def test_nothing_is_timed_where_the_emulated_speed_is_given(monkeypatch):
    samples = TensorDataset(torch.ones(32, 2))
    config = Config(data=DataConfig(batch_size=8), emulation=EmulationConfig("made up", 50.0))
    material = Data(samples, samples, lambda model, batch: pytest.fail("a step was run"))
    subject = Subject(LocalPlane(), config, nn.Linear(2, 1), material, Place("here", 0, 1))
    (profile,) = measure_ranks(subject, load_cluster("homogeneous"))
    assert profile.time.rate(1) == pytest.approx(50.0)
    assert profile.uncertainty == 0


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


@pytest.mark.parametrize(
    ("sync", "control", "copies"),
    [
        (SyncConfig(4, wire="float32"), "fixed", 4),
        (SyncConfig(4, wire="float32", outer=OuterConfig("nesterov")), "fixed", 5),
        (SyncConfig(None, wire="float32"), "fixed", 4),
        (SyncConfig(0), "fixed", 1),
        (SyncConfig(0, wire="bfloat16"), "fixed", 2),
        (SyncConfig(4), "fixed", 5),
        (SyncConfig(0), "random", 4),
    ],
)
@pytest.mark.parametrize("every", [None, 100])
def test_the_cap_counts_what_these_settings_keep(sync, control, copies, every):
    """And what the optimizer does."""
    model, limit = small_model(), 2 * 10**5
    samples = TensorDataset(torch.randn(32, 8))
    control = ControlConfig(control, min_delay_bound=0)
    config = Config(data=DataConfig(batch_size=8), sync=sync, control=control, run=RunConfig(evaluate_every=every))
    material = Data(samples, samples, lambda model, batch: model(batch[0]).sum())
    plain, momentum = (partial(torch.optim.SGD, momentum=momentum) for momentum in (0.0, 0.9))
    for make, state in ((plain, 0), (momentum, 1), (torch.optim.Adam, 2)):
        optimizer = make(model.parameters(), lr=0.1)
        subject = Subject(LocalPlane(), config, model, material, Place("here", 0, 1), [optimizer])
        assert subject.cap(1, limit) == cap(
            model,
            limit_bytes=limit,
            optimizer_state_buffers=state,
            engine_buffers=copies + (2 if every and copies > 2 else 0),
        )


def test_the_cap_counts_copies_in_the_precision_of_sums_and_of_what_is_trained():
    """The engine's are float32 though weights have 16 bits; a frozen base has none, nor a state."""
    model = small_model().bfloat16()
    loss = lambda n: model(torch.randn(n, 8, dtype=torch.bfloat16)).sum()  # noqa: E731
    caps = {copies: memory_cap(model, loss, CPU, 1, limit_bytes=10**5, engine_buffers=copies) for copies in (0, 4)}
    saved = activation_bytes(lambda: loss(100)) / 100 * profiling.BACKWARD_OVERHEAD
    values = sum(parameter.numel() for parameter in model.parameters())
    assert caps[0] - caps[4] == pytest.approx(4 * 4 * values / saved, abs=2)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    fewer = [memory_cap(model, loss, CPU, 1, limit_bytes=10**5, engine_buffers=copies) for copies in (0, 4)]
    frozen = sum(parameter.numel() for parameter in model[0].parameters())
    assert fewer[0] - fewer[1] < (caps[0] - caps[4]) * (1 - 0.5 * frozen / values)


def test_the_cap_of_an_unlimited_host_is_none(monkeypatch):
    monkeypatch.setattr(profiling, "available_host_bytes", lambda: None)
    assert cap(small_model()) is None


def test_ranks_share_the_hosts_memory(monkeypatch):
    model = small_model()
    monkeypatch.setattr(profiling, "available_host_bytes", lambda: GIB)
    caps = [memory_cap(model, lambda n: model(torch.randn(n, 8)).sum(), CPU, ranks) for ranks in (1, 4)]
    assert caps[0] / caps[1] == pytest.approx(4, rel=0.01)


WORKSPACES = {2: 900, 8: 500, 32: 800, 128: 600, 512: 700}  # MB, as a library chooses them


@pytest.mark.parametrize(
    ("sample", "last", "weights"), [(1, 512, 0), (10, 512, 0), (40, 128, 0), (200, 32, 0), (40, 32, 9000)]
)
def test_workspaces_of_a_gpus_libraries_do_not_swamp_what_samples_need(monkeypatch, sample, last, weights):
    """Two small batches would say that a sample needs less than nothing. No size is tried that would not fit."""
    tried = []

    def peak(model, make_loss, size, device):
        tried.append(size)
        return (weights + WORKSPACES[size] + sample * size) * 1e6

    monkeypatch.setattr(profiling, "_cuda_peak_bytes", peak)
    cuda, limit = torch.device("cuda", 0), 16e9
    cap = memory_cap(small_model(), lambda n: torch.ones(1), cuda, 1, limit_bytes=int(limit))
    most = (0.9 * limit / 1e6 - weights) / sample
    assert 0.6 * most < cap < 1.05 * most
    assert tried[-1] == last
    assert max(peak(None, None, size, cuda) for size in list(tried)) < limit


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

    def allreduce(self, tensor, wire="float32", residual=None):
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


@pytest.mark.parametrize("n_bytes", [4, 2600, 150_000, 100_000_000])
@pytest.mark.parametrize("link", [Link(1e-3, 1e9), Link(1e-4, 1e6), Link(1.0, 1e6)], ids=["fast", "slow", "far"])
def test_a_sum_is_timed_by_parts_of_it_that_take_a_moment(n_bytes, link):
    """And none is larger than it, nor timed for longer than it tells something."""
    time = Time()
    plane = RingPlane(time, link.latency_seconds, link.bytes_per_second)
    seconds = measure_sum(plane, n_bytes, clock=time.clock, sleep=time.sleep)
    assert seconds == pytest.approx(link.seconds(n_bytes, 4, 0.0), rel=0.1, abs=WAIT_SECONDS)
    assert max(plane.sizes) <= n_bytes
    sums = len(plane.sizes) * (link.latency_seconds + 0.01)
    assert time.now < sums + 2 * 4 * ENOUGH_SECONDS * 4 / 3


def test_noise_of_a_sum_only_adds():
    time, slow = Time(), iter([5.0, 0.0, 0.0, 5.0, 1.0, *[0.0] * 100])  # at first connections are opened
    plane = RingPlane(time, 1e-3, 1e9)
    allreduce = plane.allreduce

    def late(values):
        handle = allreduce(values)
        handle.due += next(slow)
        return handle

    plane.allreduce = late
    seconds = measure_sum(plane, 100_000_000, clock=time.clock, sleep=time.sleep)
    assert seconds == pytest.approx(0.151, rel=0.1)


def test_a_dead_interconnect_is_an_error_in_bounded_time():
    time = Time()
    plane = RingPlane(time, 1000.0, 1e6)
    with pytest.raises(PlaneError, match="an allreduce of 16 bytes took more than 60"):
        measure_interconnect(plane, clock=time.clock, sleep=lambda s: time.sleep(1.0))


def test_the_interconnect_is_measured_where_sums_are_made():
    time = Time()
    plane = RingPlane(time, 0.01, 1e9)
    seen, allreduce = set(), plane.allreduce
    plane.allreduce = lambda values: seen.add(values.device.type) or allreduce(values)
    measure_interconnect(plane, 10.0, device=torch.device("meta"), clock=time.clock, sleep=time.sleep)
    assert seen == {"meta"}


def test_one_rank_has_a_free_link():
    assert measure_interconnect(LocalPlane()) == Link()


@pytest.mark.parametrize(("name", "taken"), [("auto", 1), ("cuda", 1), ("cuda:0", 0)])
def test_a_rank_takes_its_own_gpu_before_anything_else_does(
    name: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "compute_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(
        UserError, match=r"no kernels for Some GPU \(compute capability 8.0; it was built for sm_75, comp"
    ):
        take_device(name, Place("here", 3, 4))
    assert current == []
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    assert take_device(name, Place("here", 3, 4)) == torch.device("cuda", taken)
    assert current == [torch.device("cuda", taken)]


def test_no_batch_is_tried_that_would_not_fit():
    for largest, sizes in ((None, [4, 8, 16]), (100, [4, 8, 16]), (10, [4, 8, 10]), (3, [3])):
        host = Host(largest=largest)
        (profile,) = measure_ranks(host, None)
        assert host.timed == [sizes]
        assert profile.cap == largest


def few_a_rank(batch_size, model, cluster=None):
    samples = TensorDataset(torch.randn(32, 8))
    config = Config(data=DataConfig(batch_size=batch_size), run=RunConfig(profile_seconds=0.1))
    sizes = []

    def loss(model, batch):
        sizes.append(len(batch[0]))
        return model(batch[0]).sum()

    subject = Subject(LocalPlane(), config, model, Data(samples, samples, loss), Place("here", 0, 1))
    (profile,) = measure_ranks(subject, cluster)
    return profile, sizes


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batch_norm_is_measured_where_ranks_have_two_samples(batch_size):
    profile, sizes = few_a_rank(batch_size, small_model())
    assert profile.time.seconds(batch_size) > 0
    assert {2, batch_size, 2 * batch_size} <= set(sizes), "one size would tell no fixed part"
    assert min(sizes) == 2


@pytest.mark.parametrize("cluster", [None, "homogeneous"])
def test_batch_norm_of_one_sample_is_one_sentence(cluster):
    emulated = cluster and load_cluster(cluster)
    with pytest.raises(UserError, match=r"batch_size 1 is less .*Expected more than 1 value.*: raise it to"):
        few_a_rank(1, small_model(), emulated)
    profile, _ = few_a_rank(1, nn.Linear(8, 1), emulated)
    assert profile.time.seconds(1) > 0


class Pairs(nn.Linear):
    def forward(self, input):
        if len(input) < 2:
            raise ValueError("no pair")
        return super().forward(input)


def test_what_else_a_model_says_of_one_sample_stays_as_it_is():
    with pytest.raises(ValueError, match="no pair"):
        few_a_rank(1, Pairs(8, 1))


class OneHost(LocalPlane):
    """Says what other ranks would."""

    def __init__(self, *others):
        super().__init__()
        self.others = others

    def gather_objects(self, value):
        return [value, *self.others]


def test_ranks_on_one_gpu_share_its_memory_whatever_index_they_know_it_by(monkeypatch):
    gpu = types.SimpleNamespace(uuid="GPU-1", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    plane = OneHost(("here", "GPU-1"), ("here", "GPU-2"), ("elsewhere", "GPU-1"), ("here", None))
    sharing = ranks_sharing(plane, Place("here", 0, 4), torch.device("cuda", 0))
    assert sharing == 2
    assert profiling._own_memory(torch.device("cuda", 0), sharing) == 40 * GIB
    assert ranks_sharing(plane, Place("here", 0, 4), CPU) == 4


def test_ranks_that_share_a_gpu_measure_until_all_are_done(monkeypatch):
    asked = []
    monkeypatch.setattr(measure, "profile_steps", lambda *what, least_seconds, **more: asked.append(least_seconds))
    subject = types.SimpleNamespace(config=Config(), model=None, data=None, optimizers=())
    for device, sharing in ((CPU, 4), (torch.device("cuda", 0), 1), (torch.device("cuda", 0), 2)):
        subject.device = device
        Subject.step_time(subject, [4], sharing)
    assert asked == [profiling.LEAST_SECONDS, profiling.LEAST_SECONDS, Config().run.profile_seconds]


def test_hetsync_profile_measures_in_the_precision_of_the_recipe(monkeypatch):
    seen = set()

    def model_loss(model, batch):
        seen.add(model(batch[0]).dtype)
        return model(batch[0]).sum()

    samples = TensorDataset(torch.ones(32, 2))
    monkeypatch.setattr(report.data, "build", lambda name, options: Data(samples, samples, model_loss))
    monkeypatch.setattr(report.models, "build_for", lambda data, name, options: nn.Linear(2, 1))
    run = RunConfig(precision="bfloat16", device="cpu", profile_seconds=0.01)
    profile_cluster(LocalPlane(), Config(run=run, data=DataConfig(batch_size=8)))
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(("name", "granted"), [("auto", "2"), ("cuda", "2"), ("cuda:0", None)])
def test_gpus_that_a_job_was_given_are_not_left_idle(
    monkeypatch: pytest.MonkeyPatch, name: str, granted: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if granted is not None:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", granted)
    with pytest.raises(UserError, match=r"run.device is .*here.*cpu"):
        take_device(name, Place("here", 0, 2))
    assert take_device("cpu", Place("here", 0, 2)).type == "cpu"


def test_an_apple_gpu_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("mac", 0, 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"run.device is mps, but torch finds no GPU of Apple's on mac: use auto or cpu"
    ):
        choose_device("mps", place)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 10)
    device = choose_device("mps", place)
    assert device == torch.device("mps", 0)
    assert device_name(device) == processor(device) == "Apple M2 GPU, 10 cores"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", place).type == "cpu"
