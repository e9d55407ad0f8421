"""The peers benchmark: its plans, its arithmetic, its recipes, and one peer end to end. Imports no MPI."""

import json
import math
import os
import socket
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import peer_cells as cells  # noqa: E402
import peer_plan as plan  # noqa: E402
import peer_report as report  # noqa: E402
import peer_start as start  # noqa: E402
import peer_timeline as timeline  # noqa: E402
import peers as harness  # noqa: E402
from peer_job import DDP_FIRST_BUCKET_BYTES, Pacer  # noqa: E402

from hetsync import data, models  # noqa: E402
from hetsync.cli import parse  # noqa: E402
from hetsync.data.loader import EpochOrder  # noqa: E402
from hetsync.data.workers import fetch  # noqa: E402
from hetsync.emulate import Device  # noqa: E402
from hetsync.profiling.cluster import save_cluster  # noqa: E402
from hetsync.profiling.device import memory_cap  # noqa: E402
from hetsync.profiling.measure import loss_on  # noqa: E402
from hetsync.trainer import evaluate_range  # noqa: E402

SCENARIOS = cells.scenarios(None)
DIGITS = cells.WORKLOADS["digits"]


def cell(cluster="v100-p100-k80", peer="ddp-by-speed", workload=DIGITS, **changes):
    return replace(cells.Cell(workload, cluster, SCENARIOS[cluster], peer, 0, 1000, 400.0), **changes)


# Plans.

jobs = st.tuples(
    st.integers(1, 400),
    st.integers(1, 50),
    st.none() | st.integers(1, 120),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
)


@given(jobs, st.sampled_from([plan.lockstep, plan.uneven]))
def test_every_sample_is_used_once_and_none_after_its_rest(job, make):
    total, batch, every, shares = job
    plans = [make(total, batch, every, shares, rank) for rank in range(len(shares))]
    stretches = plan.rests(total, every)
    assert stretches[0][0] == 0
    assert stretches[-1][1] == total
    for index, (first, last) in enumerate(stretches):
        used = [p for steps in plans for step in steps[index] for p in range(step.start, step.stop)]
        assert sorted(used) == list(range(first, last))
    assert all(len(steps) == len(stretches) for steps in plans)


@given(jobs)
def test_in_lockstep_all_ranks_share_every_step(job):
    total, batch, every, shares = job
    plans = [plan.lockstep(total, batch, every, shares, rank) for rank in range(len(shares))]
    for segments in zip(*plans, strict=True):
        for steps in zip(*segments, strict=True):
            assert {step.batch for step in steps} == {sum(step.samples for step in steps)}
            assert steps[0].batch <= batch
            assert all(before.stop == after.start for before, after in pairwise(steps))


def test_with_join_fast_ranks_have_more_steps_of_the_same_size():
    fast, slow = (plan.uneven(800, 80, None, (3, 1), rank)[0] for rank in (0, 1))
    assert {step.samples for step in fast + slow} == {40}
    assert (len(fast), len(slow)) == (15, 5)


# Reference figures.


def test_equal_devices_lose_nothing_by_equal_shares():
    stretches = cells.phases(SCENARIOS["homogeneous"], 400.0)
    assert cells.equal_rate(stretches) == pytest.approx(cells.ideal_rate(stretches)) == pytest.approx(400)


def test_ceiling_of_equal_shares_on_three_generations():
    stretches = cells.phases(SCENARIOS["v100-p100-k80"], 400.0)
    assert cells.equal_rate(stretches) / cells.ideal_rate(stretches) == pytest.approx(8 / (2 * 7.10 + 2 * 4.23 + 4))


def test_the_reference_follows_the_rank_that_slows_down():
    stretches = cells.phases(SCENARIOS["slows-half-way"], 160.0)
    assert [sum(rates) for rates in stretches] == pytest.approx([160, 160 - 40 * 2 / 3])
    half, rest = 1000 / 2 / 160, 1000 / 2 / (160 - 40 * 2 / 3)
    assert cells.ideal_rate(stretches) == pytest.approx(1000 / (half + rest))


@pytest.mark.parametrize(("peer", "after"), [("ddp-equal", 62), ("ddp-by-speed", 125), ("hetsync-delayed", 125)])
def test_the_slow_down_comes_half_way_whatever_the_shares(peer, after):
    event = cells.profile(cell("slows-half-way", peer), None).events[0]
    assert (event.rank, event.factor, event.after_samples) == (cells.SLOW_RANK, 3.0, after)


def test_the_single_device_is_the_fastest_at_its_own_rate(tmp_path):
    alone = cell("t4-v100-a100", "alone")
    cluster = cells.profile(alone, None)
    assert [(group.name, group.count) for group in cluster.devices] == [("A100", 1)]
    made = cells.recipe(alone, tmp_path, tmp_path / "cluster.yaml", None)
    speeds = SCENARIOS["t4-v100-a100"].speeds()
    assert made["emulation"]["samples_per_second"] == pytest.approx(400 * max(speeds) / sum(speeds))


def test_limited_memory_holds_just_the_samples_that_it_shall():
    source = data.build("digits", {})
    model = models.build_for(source, "digits_cnn", {})
    cpu, limit = torch.device("cpu"), start.memory_for(DIGITS, 20, None)
    assert memory_cap(model, loss_on(model, source, cpu), cpu, 8, limit_bytes=limit) == 20


@pytest.mark.parametrize("peer", cells.PEERS)
@pytest.mark.parametrize("workload", cells.WORKLOADS.values(), ids=lambda w: w.name)
def test_recipes_are_what_hetsync_train_reads(peer, workload, tmp_path):
    job = cell("slow-link", peer, workload, learning_rate=0.125)
    save_cluster(cells.profile(job, None), tmp_path / "cluster.yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(cells.recipe(job, tmp_path / "run", tmp_path / "cluster.yaml", tmp_path)))
    config, _ = parse([str(path)])
    assert config.optimizer.learning_rate == 0.125
    assert config.data.batch_size == workload.batch
    assert (config.sync.delay_bound == 0) == (peer == "hetsync-sync")


# Figures.


def test_seconds_to_an_evaluation_leave_out_those_at_rest():
    def piece(at):
        return {"kind": "piece", "at": at, "compute_seconds": 1.0, "data_seconds": 0.25, "wait_seconds": 0.25}

    lines = [
        piece(2.0),  # so training began at 0.5
        {"kind": "round", "at": 2.5, "round": 0},
        {"kind": "evaluation", "at": 4.5, "samples_applied": 10, "accuracy": 0.5},  # two seconds at rest
        piece(6.5),
        {"kind": "round", "at": 6.0, "round": 1},
        {"kind": "round", "at": 7.5, "round": 2},
        {"kind": "evaluation", "at": 9.0, "samples_applied": 20, "accuracy": 0.75},
    ]
    assert report.evaluations(lines) == [
        {"samples": 10, "seconds": 2.0, "accuracy": 0.5},
        {"samples": 20, "seconds": 5.0, "accuracy": 0.75},
    ]


RANK_FIGURES = {
    "samples": 300,
    "compute_fraction": 0.75,
    "wait_fraction": 0.2,
    "communication_seconds": 1.0,
    "bytes_sent": 6e5,
    "runtime_cpu_seconds": 0.1,
    "peak_bytes": 1e8,
    "slices": 100,
    "overruns": 1,
    "device_samples_per_second": 40.0,
}


def test_a_run_of_hetsync_tells_of_each_rank_what_the_peers_tell():
    own = {key: RANK_FIGURES[key] for key in (*report.SHARED, "device_samples_per_second")}
    summary = {"samples_applied": 300, "train_seconds": 10.0, "metrics": {}, "staleness": {}}
    summary["per_rank"] = [own | {"runtime_cpu_fraction": 0.01}]
    sums = [("sum", 1.0, 1.25), ("compute", 1.0, 2.0), ("sum", 3.0, 3.75)]
    assert report.from_hetsync(summary, [], [sums], [10**8])["per_rank"] == [RANK_FIGURES]


# Timelines.


def told(at, **seconds):
    return {"kind": "piece", "at": at, **{f"{name}_seconds": spent for name, spent in seconds.items()}}


def test_delayed_ranks_wait_before_they_compute_and_sums_fly_meanwhile():
    lines = [
        told(2.0, compute=1.0, data=0.25, wait=0.25),  # training began at 0.5
        {"kind": "round", "at": 3.0, "round": 0, "seconds": 0.75},
        told(3.5, compute=1.0, data=0.0, wait=0.5),
        {"kind": "evaluation", "at": 5.0, "samples_applied": 10},
    ]
    assert timeline.from_telemetry(lines, synchronous=False) == [
        ("compute", 0.5, 1.5),
        ("wait", 0.0, 0.25),
        ("sum", 1.75, 2.5),
        ("compute", 2.0, 3.0),
        ("wait", 1.5, 2.0),
        ("rest", 2.5, 4.5),
    ]


def test_synchronous_ranks_wait_for_the_sum_of_what_they_have_computed():
    lines = [told(2.0, compute=1.0, data=0.0, wait=0.5), {"kind": "round", "at": 2.0, "round": 0, "seconds": 1.5}]
    assert timeline.from_telemetry(lines, synchronous=True) == [
        ("compute", 0.0, 1.0),
        ("wait", 1.0, 1.5),
        ("sum", 1.0, 1.5),
    ]


def test_timelines_leave_out_what_nobody_could_see():
    assert timeline.shifted([("wait", 5.0, 5.00001), ("compute", 5.0, 6.00004)], 4.0) == [("compute", 1.0, 2.0)]


@pytest.mark.parametrize(("rests", "middle"), [(1, 0.0), (2, 0.0), (8, 3.0)])
def test_the_plot_shows_what_happens_at_the_evaluation_half_way(rests, middle):
    assert timeline.half_way([("rest", float(i), i + 0.5) for i in range(rests)]) == middle


# Figures of a job.


def job(peer, seconds=10.0, accuracies=(0.5, 0.9, 1.0), seed=0, **changes):
    """A record of 300 samples."""
    points = [
        {"samples": 100 * (i + 1), "seconds": seconds * (i + 1) / 3, "accuracy": a} for i, a in enumerate(accuracies)
    ]
    result = {"samples": 300, "train_seconds": seconds, "metrics": {"accuracy": accuracies[-1], "loss": 0.1}}
    result |= {"evaluations": points, "per_rank": [RANK_FIGURES]}
    head = {"workload": "digits", "cluster": "c", "title": "C", "peer": peer, "seed": seed, "falling": False}
    return {**head, "target": ["accuracy", 0.95], "ideal": 40.0, "equal": 20.0, "result": result, **changes}


def test_figures_of_a_job():
    record = job("ddp-equal")
    assert report.rate(record) == 30
    assert report.efficiency(record) == 0.75
    assert report.until_target(record) == pytest.approx(10 * 2.5 / 3)  # half-way between the last two evaluations
    assert report.until_target(record, "samples") == pytest.approx(250)
    assert report.megabytes_per_1000_samples(record) == 2
    assert report.idle(record) == 0.25
    assert report.communicating(record) == 0.1


@pytest.mark.parametrize(
    ("accuracies", "expected"), [((0.96, 0.1, 0.2), 10 / 3), ((0.1, 0.2, 0.3), None), ((0.5, 0.95, 0.5), 20 / 3)]
)
def test_the_target_counts_when_it_is_first_reached(accuracies, expected):
    assert report.until_target(job("alone", accuracies=accuracies)) == (expected and pytest.approx(expected))


def test_a_falling_metric_reaches_its_target_from_above():
    record = job("alone", accuracies=(1.0, 0.5, 0.2), falling=True, target=["accuracy", 0.75])
    assert report.until_target(record) == pytest.approx(5)


def test_spread_tells_how_many_have_the_figure():
    assert report.spread([1.0, 3.0, 2.0], ".0f") == "2 [1, 3]"
    assert report.spread([1.0, None], ".0f") == "1 (1 of 2)"
    assert report.spread([None], ".0f") == "–"


def test_a_lost_comparison_and_a_missing_peer_stay_in_the_tables():
    skipped = {k: v for k, v in job("horovod").items() if k not in ("result", "ideal", "equal")}
    records = [job("hetsync-delayed", 12.0), job("ddp-equal", 10.0), skipped | {"missing": "skipped: not here"}]
    lines = report.markdown(records).splitlines()
    assert any(line.startswith("| horovod | skipped: not here |") for line in lines)
    assert "| digits | c | ddp-equal | 0.83 | 0.83 |" in lines
    assert "equal shares reach 0.500 at most" in lines[0]


def test_ratios_compare_within_a_repetition():
    records = [job("hetsync-delayed", s, seed=i) for i, s in enumerate((10.0, 20.0, 40.0))]
    records += [job("alone", 2 * s, seed=i) for i, s in enumerate((10.0, 20.0, 40.0))]
    assert "| digits | c | alone | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] |" in report.markdown(records)


# Learning rates.


class Rehearsal:
    """A starter whose jobs get to the target the sooner, the nearer their learning rate is to the best one."""

    def __init__(self, best):
        self.best = best
        self.cells = []

    def run(self, cell):
        self.cells.append(cell)
        if cell.peer == "horovod":
            return {"missing": "skipped: not here"}
        away = abs(math.log(cell.learning_rate / self.best))
        accuracies = (math.nan,) * 3 if cell.learning_rate > 0.3 else (0.95 - away / 10, 1.0, 1.0)
        return {"result": job(cell.peer, accuracies=accuracies)["result"], "timeline": []}


def test_tuning_gives_every_peer_the_same_jobs_and_takes_the_soonest_at_the_target():
    peers = ["ddp-by-speed", "horovod", "hetsync-delayed"]
    options = Namespace(workloads=["digits"], quick=True, traces=None, clusters=None, peers=peers)
    starter = Rehearsal(best=0.25)
    assert harness.tune(options, starter) == {"digits": {"ddp-by-speed": 0.25, "hetsync-delayed": 0.25}}
    tried = [[c.learning_rate for c in starter.cells if c.peer == peer] for peer in peers]
    assert tried == [[0.0625, 0.125, 0.25, 0.5]] * 3
    assert {(c.samples, c.seed) for c in starter.cells} == {(DIGITS.quick_samples, harness.TUNE_SEED)}


# Emulation.


class Recorder(Device):
    """Writes down when it is asked to pad."""

    def __init__(self):
        super().__init__()
        self.story = []

    def begin(self, samples):
        self.story.append(samples)

    def pace(self, fraction):
        self.story.append(fraction)

    def end(self):
        self.story.append("end")
        return 0.0


@pytest.mark.parametrize("overlaps", [True, False])
def test_backward_is_padded_where_buckets_of_ddp_are_full(overlaps):
    values = [0, 10, DDP_FIRST_BUCKET_BYTES // 4, 30]
    device, weights = Recorder(), torch.nn.ParameterList([torch.zeros(n) for n in values])
    pacer = Pacer(weights, device)
    pacer.overlaps = overlaps
    for _ in range(2):
        pacer.begin(7)
        assert not pacer.complete
        for weight in reversed(list(weights)):
            weight.sum().backward()
    done = (values[3] + values[2]) / sum(values)
    slice_of_seven = [7, *([(1 + 2 * done) / 3] if overlaps else []), "end"]
    assert device.story == 2 * slice_of_seven
    assert pacer.complete


# Processes.


def test_a_job_that_fails_or_hangs_says_so():
    env = dict(os.environ)
    assert start.started([sys.executable, "-c", "raise SystemExit(3)"], env, 30) == "failed: it ended with status 3"
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert start.started(hanging, env, 0.5) == "failed: it did not end within 0 s"
    assert start.started([sys.executable, "-c", ""], env, 30) is None


SAMPLES, BATCH = 330, 16


def run_on_two_ranks(peer, folder):
    """A peer's job of 21 steps on ranks of speeds 3 and 1, without a launcher; its figures."""
    devices = [{"name": "fast", "speed": 3}, {"name": "slow", "speed": 1}]
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"name": "two", "source": "made up", "devices": devices}))
    recipe = cells.recipe(cell("homogeneous", peer), folder, folder / "cluster.yaml", None)
    recipe["run"] |= {"samples": SAMPLES, "evaluate_every": 10 * BATCH}
    recipe["emulation"] = {"samples_per_second": 1000}
    recipe["data"]["batch_size"] = BATCH
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_"))}
    words = [sys.executable, BENCHMARKS / "peer_runner.py", peer, folder / "recipe.yaml", folder]
    env = {**clean, **told, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(words, env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return json.loads((folder / "result.json").read_text())


def loss_of_one_process():
    """The same 21 steps by hand."""
    torch.manual_seed(0)
    source = data.build("digits", {})
    model = models.build_for(source, "digits_cnn", {})
    optimizer = torch.optim.SGD(model.parameters(), DIGITS.learning_rate, momentum=0.9)
    order = EpochOrder(len(source.train), 0)
    for first in range(0, SAMPLES, BATCH):
        batch = fetch(source.train, order.indices([(first, min(first + BATCH, SAMPLES))]), None)
        source.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluate_range(model, source, 0, len(source.test))["loss"] / len(source.test)


def test_ddp_by_speed_is_one_process_with_the_whole_batch(tmp_path):
    figures = run_on_two_ranks("ddp-by-speed", tmp_path)
    assert sum(rank["samples"] for rank in figures["per_rank"]) == SAMPLES
    assert figures["per_rank"][0]["samples"] == pytest.approx(SAMPLES * 3 / 4, abs=1)
    assert figures["metrics"]["loss"] == pytest.approx(loss_of_one_process(), rel=1e-4)
    assert figures["metrics"]["loss"] < 2.2  # it has learned: chance is ln 10 = 2.303
    assert figures["train_seconds"] > SAMPLES / 1000  # the emulated devices need that long
    assert [point["samples"] for point in figures["evaluations"]] == [160, 320, 330]
    assert all(rank.keys() == RANK_FIGURES.keys() for rank in figures["per_rank"])
    for rank, mine in enumerate(json.loads((tmp_path / "timeline.json").read_text())):
        its = figures["per_rank"][rank]
        assert [kind for kind, _, _ in mine].count("compute") == its["slices"] == 21
        assert timeline.total(mine, "sum") == pytest.approx(its["communication_seconds"], abs=0.01)
        assert timeline.total(mine, "wait") == pytest.approx(its["wait_fraction"] * figures["train_seconds"], abs=0.01)
